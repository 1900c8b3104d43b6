"""Llama, and the families that have its modules under other names: RMSNorm before each part, rotary positions, SwiGLU.

SmolLM's first two generations are Llama models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from whet.models.called_with import has_cache, require_understood
from whet.models.family import Family, FeedForward, Part, RmsNorm, Slots
from whet.models.fused import decoder
from whet.models.fused.layers import is_plain, normalised, pass_position, product, residual_and_norm, with_bias

_SAME = nn.Identity()
_WINDOW_IN_CONFIG = ("MistralAttention", "MixtralAttention", "Phi3Attention")


def attention(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: Any = None,
    attention_mask: Any = None,
    *more: Any,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return the attention through its output product (B, T, D)."""
    if more or not in_training_pass(self, hidden_states, position_embeddings, options):
        return type(self).forward(self, hidden_states, position_embeddings, attention_mask, *more, **options)
    require_understood(self, attention_mask, options)
    return with_bias(_attended(self, hidden_states, position_embeddings), self.o_proj), None


def mlp(self: Any, x: Tensor) -> Tensor:
    """Return the gated feed-forward part (B, T, D)."""
    return type(self).forward(self, x) if pass_position(self, x) is None else decoder.gated(self, x)


def block(
    self: Any,
    hidden_states: Tensor,
    *more: Any,
    position_embeddings: Any = None,
    attention_mask: Any = None,
    **options: Any,
) -> Tensor:
    """Return the block's result (B, T, D): its input plus attention plus feed-forward."""
    given = {"position_embeddings": position_embeddings, "attention_mask": attention_mask, **options}
    if more or not in_training_pass(self, hidden_states, position_embeddings, options):
        return type(self).forward(self, hidden_states, *more, **given)
    x, attn = normalised(hidden_states, self.input_layernorm), self.self_attn
    if is_plain(attn):
        require_understood(attn, attention_mask, options)
        found = product(_attended(attn, x, position_embeddings), attn.o_proj)
    else:
        found = attn(hidden_states=x, **given)[0], None
    drop = getattr(self, "resid_attn_dropout", _SAME)  # of Phi-3, as the other one
    x, total = residual_and_norm(found, hidden_states, self.post_attention_layernorm, drop)
    return total + getattr(self, "resid_mlp_dropout", _SAME)(self.mlp(x))


def in_training_pass(module: Any, x: Tensor, position_embeddings: Any, options: Mapping[str, Any]) -> bool:
    """Return whether a call belongs to a packed pass: it has angles, and no keys of earlier calls."""
    if position_embeddings is None or has_cache(options):
        return False
    return pass_position(module, x) is not None


def _attended(attn: Any, x: Tensor, position_embeddings: decoder.Angles) -> Tensor:
    holder = attn.config if type(attn).__name__ in _WINDOW_IN_CONFIG else attn
    angles = position_embeddings if getattr(attn, "use_rope", True) else None  # SmolLM3 rotates in some blocks only
    return decoder.attended(attn, x, angles, getattr(holder, "sliding_window", None))


def parts_of(name: str, norm: str | None = None) -> dict[str, Part]:
    """Return the parts of a family whose classes begin with this name; `norm` is the class of its norms."""
    norms: Slots = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), norm or f"{name}RMSNorm")
    slots: Slots = {"self_attn.o_proj": nn.Linear, **norms}
    return {
        f"{name}Attention": Part(attention, decoder.PROJECTIONS),
        f"{name}MLP": Part(mlp, decoder.GATED),
        f"{name}DecoderLayer": Part(block, slots),
    }


FEED_FORWARD = FeedForward(
    path="mlp", up=("mlp.gate_proj", "mlp.up_proj"), down="mlp.down_proj", activation="mlp.act_fn"
)
TINY = {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
"""Settings of a tiny model in Llama's shape."""

FAMILY = Family(
    model_types=("llama",),
    package="transformers.models.llama",
    attention=("LlamaAttention",),
    blocks=("LlamaDecoderLayer",),
    causal=True,
    parts=parts_of("Llama"),
    feed_forward=FEED_FORWARD,
    rms_norms={"LlamaRMSNorm": RmsNorm()},
    why_padded=decoder.why_padded,
    tiny=TINY,
)
