"""SmolLM3: Llama's blocks, of which every fourth has no rotary positions."""

from whet.models.families import llama
from whet.models.family import Family, RmsNorm
from whet.models.fused import decoder

FAMILY = Family(
    model_types=("smollm3",),
    package="transformers.models.smollm3",
    attention=("SmolLM3Attention",),
    blocks=("SmolLM3DecoderLayer",),
    causal=True,
    parts=llama.parts_of("SmolLM3"),
    feed_forward=llama.FEED_FORWARD,
    rms_norms={"SmolLM3RMSNorm": RmsNorm()},
    why_padded=decoder.why_padded,
    tiny={**llama.TINY, "no_rope_layers": [1, 0]},
)
