"""XLM-RoBERTa: RoBERTa with another vocabulary."""

from whet.models.families import bert
from whet.models.family import Family, after_padding

FAMILY = Family(
    model_types=("xlm-roberta",),
    package="transformers.models.xlm_roberta",
    attention=("XLMRobertaSelfAttention",),
    blocks=("XLMRobertaLayer",),
    stack="encoder.layer",
    parts=bert.parts("XLMRoberta"),
    feed_forward=bert.FEED_FORWARD,
    first_position=after_padding,
    skips_padding=True,
)
