"""Mistral: Llama's blocks, with a window in all of them or in none."""

from whet.models.families import llama
from whet.models.family import Family, RmsNorm
from whet.models.fused import decoder

FAMILY = Family(
    model_types=("mistral",),
    package="transformers.models.mistral",
    attention=("MistralAttention",),
    blocks=("MistralDecoderLayer",),
    causal=True,
    parts=llama.parts_of("Mistral"),
    feed_forward=llama.FEED_FORWARD,
    rms_norms={"MistralRMSNorm": RmsNorm()},
    why_padded=decoder.why_padded,
    tiny={**llama.TINY, "sliding_window": 8},
)
