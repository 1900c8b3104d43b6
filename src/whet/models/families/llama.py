"""Llama, and the families that have its modules under other names: RMSNorm before each part, rotary positions, SwiGLU.

SmolLM's first two generations are Llama models. Qwen, SmolLM3, Mistral, Mixtral, OLMoE and Gemma's first generation are
here; Gemma 2 and 3 and Phi have forwards of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from whet.models.family import (
    WINDOWS_BY_LAYER,
    WINDOWS_IN_CONFIG,
    WINDOWS_OF_ALL,
    Family,
    FeedForward,
    Part,
    RmsNorm,
    Slots,
    window_in_pass,
)
from whet.models.fused import decoder
from whet.models.fused.layers import is_plain, normalised, pass_position, product, residual_and_norm, with_bias
from whet.models.fused.limits import has_cache, require_understood

_SAME = nn.Identity()


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
    angles = position_embeddings if getattr(attn, "use_rope", True) else None  # SmolLM3 rotates in some blocks only
    return decoder.attended(attn, x, angles, window_in_pass(attn))


def parts_of(name: str) -> dict[str, Part]:
    """Return the parts of a family whose classes begin with this name."""
    norms: Slots = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), f"{name}RMSNorm")
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


def like_llama(model_type: str, prefix: str, **differences: Any) -> Family:
    """Return a family whose classes are Llama's under another name: `prefix` in place of `Llama`."""
    settings: dict[str, Any] = {
        "model_types": (model_type,),
        "package": f"transformers.models.{model_type}",
        "attention": (f"{prefix}Attention",),
        "blocks": (f"{prefix}DecoderLayer",),
        "causal": True,
        "parts": parts_of(prefix),
        "feed_forward": FEED_FORWARD,
        "rms_norms": {f"{prefix}RMSNorm": RmsNorm()},
        "why_padded": decoder.why_padded,
        "tiny": TINY,
    }
    return Family(**settings | differences)


def _why_mixtral_is_padded(model: Any) -> str | None:
    """Return why a model needs its padding: noise on the routers' input follows the order of the batch."""
    if getattr(model.config, "router_jitter_noise", 0.0):
        return f"its routers draw noise (router_jitter_noise {model.config.router_jitter_noise})"
    return decoder.why_padded(model)


_WINDOWS_TINY = {**TINY, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
_EXPERTS_TINY = {**TINY, "num_experts": 4, "num_experts_per_tok": 2}
_QWEN_EXPERTS_TINY = {**_WINDOWS_TINY, **_EXPERTS_TINY, "moe_intermediate_size": 16, "norm_topk_prob": True}

PACKAGES = (
    "transformers.models.llama",
    "transformers.models.qwen2",
    "transformers.models.qwen3",
    "transformers.models.smollm3",
    "transformers.models.gemma",
    "transformers.models.mistral",
    "transformers.models.mixtral",
    "transformers.models.qwen2_moe",
    "transformers.models.qwen3_moe",
    "transformers.models.olmoe",
)
FAMILIES = (
    like_llama("llama", "Llama"),
    like_llama("qwen2", "Qwen2", windows=WINDOWS_BY_LAYER, tiny=_WINDOWS_TINY),
    # With a norm of each query and key head.
    like_llama("qwen3", "Qwen3", windows=WINDOWS_BY_LAYER, tiny=_WINDOWS_TINY),
    like_llama("smollm3", "SmolLM3", windows=WINDOWS_BY_LAYER, tiny={**TINY, "no_rope_layers": [1, 0]}),
    like_llama("gemma", "Gemma", rms_norms={"GemmaRMSNorm": RmsNorm("eps", weight_offset=1.0)}),
    like_llama("mistral", "Mistral", windows=WINDOWS_IN_CONFIG, tiny={**TINY, "sliding_window": 8}),
    # These have experts in the place of some or all feed-forward parts.
    like_llama(
        "mixtral",
        "Mixtral",
        parts={name: part for name, part in parts_of("Mixtral").items() if name != "MixtralMLP"},
        feed_forward=None,
        why_padded=_why_mixtral_is_padded,
        windows=WINDOWS_IN_CONFIG,
        tiny={**TINY, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    like_llama(
        "qwen2_moe",
        "Qwen2Moe",
        feed_forward=None,
        windows=WINDOWS_BY_LAYER,
        tiny={**_QWEN_EXPERTS_TINY, "shared_expert_intermediate_size": 32},
    ),
    like_llama(
        "qwen3_moe",
        "Qwen3Moe",
        feed_forward=None,
        windows=WINDOWS_OF_ALL,
        tiny={**_QWEN_EXPERTS_TINY, "mlp_only_layers": [0]},
    ),
    # No fused piece normalises all query and key heads together yet: attention's products and norms are torch's own.
    like_llama("olmoe", "Olmoe", parts={}, feed_forward=None, tiny=_EXPERTS_TINY),
)
