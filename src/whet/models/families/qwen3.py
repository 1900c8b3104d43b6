"""Qwen3: Llama's blocks with a norm of each query and key head."""

from whet.models.families import llama
from whet.models.family import Family, RmsNorm
from whet.models.fused import decoder

FAMILY = Family(
    model_types=("qwen3",),
    package="transformers.models.qwen3",
    attention=("Qwen3Attention",),
    blocks=("Qwen3DecoderLayer",),
    causal=True,
    parts=llama.parts_of("Qwen3"),
    feed_forward=llama.FEED_FORWARD,
    rms_norms={"Qwen3RMSNorm": RmsNorm()},
    why_padded=decoder.why_padded,
    tiny={**llama.TINY, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
)
