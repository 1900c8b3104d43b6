"""Gemma 2: Gemma 3's blocks without norms of heads."""

from whet.models.families import gemma3, llama
from whet.models.family import Family

FAMILY = Family(
    model_types=("gemma2",),
    package="transformers.models.gemma2",
    attention=("Gemma2Attention",),
    blocks=("Gemma2DecoderLayer",),
    causal=True,
    parts=gemma3.parts_of("Gemma2"),
    feed_forward=llama.FEED_FORWARD,
    rms_norms={"Gemma2RMSNorm": gemma3.NORM},
    why_padded=gemma3.why_padded,
    tiny=gemma3.TINY,
)
