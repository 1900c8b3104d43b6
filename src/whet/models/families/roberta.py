"""RoBERTa: BERT's blocks, with positions that start after the padding token's number."""

from whet.models.families import bert
from whet.models.family import Family, after_padding

FAMILY = Family(
    model_types=("roberta",),
    package="transformers.models.roberta",
    attention=("RobertaSelfAttention",),
    blocks=("RobertaLayer",),
    stack="encoder.layer",
    parts=bert.parts("Roberta"),
    feed_forward=bert.FEED_FORWARD,
    first_position=after_padding,
    skips_padding=True,
)
