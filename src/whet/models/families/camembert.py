"""CamemBERT: RoBERTa with another vocabulary."""

from whet.models.families import bert
from whet.models.family import Family, after_padding

FAMILY = Family(
    model_types=("camembert",),
    package="transformers.models.camembert",
    attention=("CamembertSelfAttention",),
    blocks=("CamembertLayer",),
    stack="encoder.layer",
    parts=bert.parts("Camembert"),
    feed_forward=bert.FEED_FORWARD,
    first_position=after_padding,
    skips_padding=True,
)
