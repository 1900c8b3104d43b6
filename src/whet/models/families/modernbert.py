"""ModernBERT: norms before attention and feed-forward, rotary positions, gated activations, and windows in most blocks.

The sums between blocks stay in float32 under bf16, as they do in transformers: blocks add to them and never normalise.
"""

from typing import Any

from torch import Tensor, nn

from whet.kernels.activation import gated_act_joined
from whet.kernels.attention_spec import window_of
from whet.kernels.packed_attention import attend_joined
from whet.kernels.rotary import rotate_joined
from whet.models.family import SLIDING, Family, FeedForward, Part, Slots, Windows
from whet.models.fused import decoder
from whet.models.fused.attention import of_chosen, spec_of
from whet.models.fused.layers import (
    EmbeddingNames,
    PlacedDropout,
    embeddings,
    is_plain,
    normalised,
    pass_position,
    product,
    residual_and_norm,
    with_bias,
)
from whet.models.fused.limits import require_understood
from whet.models.standard import ACTIVATIONS, why_called

_NAMES = EmbeddingNames(("tok_embeddings",), "norm", "drop")


def modernbert_embeddings(self: Any, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None) -> Tensor:
    """Return the normalised embeddings (B, T, D)."""
    found = None
    if input_ids is not None and inputs_embeds is None and pass_position(self, input_ids) is not None:
        found = embeddings(self, input_ids, None, None, _NAMES)
    return type(self).forward(self, input_ids, inputs_embeds) if found is None else found


def modernbert_attention(
    self: Any, hidden_states: Tensor, position_embeddings: Any = None, attention_mask: Any = None, **options: Any
) -> tuple[Tensor, None]:
    """Return the attention through its output product (B, T, D)."""
    if pass_position(self, hidden_states) is None or position_embeddings is None:
        return type(self).forward(self, hidden_states, position_embeddings, attention_mask, **options)
    require_understood(self, attention_mask, options)
    return self.out_drop(with_bias(_attended(self, hidden_states, position_embeddings), self.Wo)), None


def mlp(self: Any, hidden_states: Tensor) -> Tensor:
    """Return the gated feed-forward part (B, T, D)."""
    if pass_position(self, hidden_states) is None or why_called(self.act) is not None:
        return type(self).forward(self, hidden_states)
    found = gated_act_joined(with_bias(hidden_states, self.Wi), ACTIVATIONS[type(self.act)])
    return with_bias(self.drop(found), self.Wo)


def block(
    self: Any, hidden_states: Tensor, attention_mask: Any = None, position_embeddings: Any = None, **options: Any
) -> Tensor:
    """Return the block's result (B, T, D): its input plus attention plus feed-forward."""
    if pass_position(self, hidden_states) is None or position_embeddings is None:
        return type(self).forward(self, hidden_states, attention_mask, position_embeddings, **options)
    x, attn = normalised(hidden_states, self.attn_norm), self.attn
    require_understood(attn, attention_mask, options)
    if is_plain(attn):
        found, dropout = product(_attended(attn, x, position_embeddings), attn.Wo), attn.out_drop
    else:
        given = {"position_embeddings": position_embeddings, "attention_mask": attention_mask}
        found, dropout = (attn(x, **given, **options)[0], None), nn.Identity()
    x, total = residual_and_norm(found, hidden_states, self.mlp_norm, dropout)
    return total + self.mlp(x)


def _attended(attn: Any, x: Tensor, positions: tuple[Tensor, Tensor]) -> Tensor:
    """Return the attention output (1, N, D) of x (1, N, D), or (1, M, D) of the tokens that the last block computes.

    `positions` are cosines and sines (1, N, K).
    """
    qkv = with_bias(x, attn.Wqkv)[0].unflatten(-1, (3, -1, attn.head_dim))
    p = attn.attention_dropout if attn.training else 0.0
    spec = spec_of(attn, x.shape[1], attn.head_dim**-0.5, p, window_of(_window(attn)))
    found = attend_joined(rotate_joined(qkv, positions[0][0], positions[1][0]), spec).flatten(1)[None]
    return of_chosen(found, attn, attn.whet_site.placement.now)


def _window(attn: Any) -> int | None:
    return attn.sliding_window


def _masked_window(config: Any, _: int, block: Any) -> int | None:
    """Return the window of the block's mask; the configuration counts the keys on one side without the token itself."""
    return config.sliding_window + 1 if getattr(block, "attention_type", None) == SLIDING else None


_BLOCK: Slots = {"attn.Wqkv": nn.Linear, "attn.Wo": nn.Linear, "mlp_norm": nn.LayerNorm}

PACKAGES = ("transformers.models.modernbert",)
FAMILIES = (
    Family(
        model_types=("modernbert",),
        package=PACKAGES[0],
        attention=("ModernBertAttention",),
        blocks=("ModernBertEncoderLayer",),
        stack="layers",
        parts={
            "ModernBertEmbeddings": Part(
                modernbert_embeddings, {"tok_embeddings": nn.Embedding, "norm": nn.LayerNorm, "drop": PlacedDropout}
            ),
            "ModernBertAttention": Part(modernbert_attention, {"Wqkv": nn.Linear, "Wo": nn.Linear}),
            "ModernBertMLP": Part(mlp, {"Wi": nn.Linear, "act": None, "Wo": nn.Linear}),
            "ModernBertEncoderLayer": Part(block, _BLOCK),
        },
        feed_forward=FeedForward(
            path="mlp", up=("mlp.Wi",), down="mlp.Wo", activation="mlp.act", joined=True, inner_dropout="mlp.drop"
        ),
        why_padded=decoder.why_padded,
        windows=Windows(of_attention=_window, of_mask=_masked_window),
        tiny={
            "pad_token_id": 0,
            "local_attention": 8,
            "global_attn_every_n_layers": 2,
            **dict.fromkeys(("bos_token_id", "cls_token_id"), 1),
            **dict.fromkeys(("eos_token_id", "sep_token_id"), 2),
        },
    ),
)
