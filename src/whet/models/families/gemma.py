"""Gemma: Llama's blocks with norms whose weights are distances from 1."""

from whet.models.families import llama
from whet.models.family import Family, RmsNorm
from whet.models.fused import decoder

FAMILY = Family(
    model_types=("gemma",),
    package="transformers.models.gemma",
    attention=("GemmaAttention",),
    blocks=("GemmaDecoderLayer",),
    causal=True,
    parts=llama.parts_of("Gemma"),
    feed_forward=llama.FEED_FORWARD,
    rms_norms={"GemmaRMSNorm": RmsNorm("eps", weight_offset=1.0)},
    why_padded=decoder.why_padded,
    tiny=llama.TINY,
)
