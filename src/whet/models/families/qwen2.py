"""Qwen2 and Qwen2.5: Llama's blocks, with biases of queries, keys and values, and windows in some blocks."""

from whet.models.families import llama
from whet.models.family import Family, RmsNorm
from whet.models.fused import decoder

FAMILY = Family(
    model_types=("qwen2",),
    package="transformers.models.qwen2",
    attention=("Qwen2Attention",),
    blocks=("Qwen2DecoderLayer",),
    causal=True,
    parts=llama.parts_of("Qwen2"),
    feed_forward=llama.FEED_FORWARD,
    rms_norms={"Qwen2RMSNorm": RmsNorm()},
    why_padded=decoder.why_padded,
    tiny={**llama.TINY, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
)
