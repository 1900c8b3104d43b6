"""XLM-RoBERTa-XL: RoBERTa with its norms before attention and feed-forward.

Attention and activations are fused. Norms, residuals and embeddings are torch's own: no fused piece has this order yet.
"""

from torch import nn

from whet.models.families import bert
from whet.models.family import Family, Part, after_padding

FAMILY = Family(
    model_types=("xlm-roberta-xl",),
    package="transformers.models.xlm_roberta_xl",
    attention=("XLMRobertaXLSelfAttention",),
    blocks=("XLMRobertaXLLayer",),
    parts={
        "XLMRobertaXLSelfAttention": Part(bert.self_attention, bert.PROJECTIONS),
        "XLMRobertaXLIntermediate": Part(bert.intermediate, {"dense": nn.Linear, "intermediate_act_fn": None}),
    },
    feed_forward=bert.FEED_FORWARD,
    first_position=after_padding,
    skips_padding=True,
)
