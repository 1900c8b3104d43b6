"""ELECTRA: BERT's blocks, with embeddings that may be narrower."""

from whet.models.families import bert
from whet.models.family import Family

FAMILY = Family(
    model_types=("electra",),
    package="transformers.models.electra",
    attention=("ElectraSelfAttention",),
    blocks=("ElectraLayer",),
    stack="encoder.layer",
    parts=bert.parts("Electra"),
    feed_forward=bert.FEED_FORWARD,
    tiny={"embedding_size": 16},
)
