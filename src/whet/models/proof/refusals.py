"""Reasons to keep a model's padding that need no forward pass: they are cheaper and clearer than a failed proof."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from whet.models.forwards import instance_forward, is_whets
from whet.models.fused.decoder import why_rotary_moves

MOST_WEIGHTS = 4_000_000_000
"""Weights of an encoder beyond which a proof on a CPU would take minutes."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def why_padded(encoder: Any) -> str | None:
    """Return why the encoder needs its padding, as far as its classes and its configuration say; None: prove it."""
    return next((why for reason in _REASONS if (why := reason(encoder)) is not None), None)


def _other_model(encoder: Any) -> str | None:
    if not isinstance(encoder, PreTrainedModel):
        return "it is not a model of transformers"
    if getattr(encoder.config, "is_encoder_decoder", False) or getattr(encoder.config, "is_decoder", False):
        return "it is a decoder, or has one: whet packs encoders"
    return None


def _other_inputs(encoder: Any) -> str | None:
    names = inspect.signature(type(encoder).forward).parameters
    if "input_ids" not in names:
        return "it does not read input_ids"
    return None if "position_ids" in names else "its forward takes no position_ids, which restart in each row"


def _other_attention(encoder: Any) -> str | None:
    if not type(encoder)._can_set_attn_implementation():
        return "its attention does not go through transformers' AttentionInterface"
    return None


def _replaced_forward(encoder: nn.Module) -> str | None:
    for name, module in encoder.named_modules():
        forward = instance_forward(module)
        if forward is not None and not is_whets(forward):
            return f"{name or type(module).__name__} has a forward of its own"
    return None


def _mixing_layer(encoder: nn.Module) -> str | None:
    for module in encoder.modules():
        if isinstance(module, nn.RNNBase | nn.MultiheadAttention | nn.modules.batchnorm._NormBase):
            return f"it holds a {type(module).__name__}, which would mix the tokens of different rows"
        if isinstance(module, nn.modules.conv._ConvNd) and any(size > 1 for size in module.kernel_size):
            return f"it holds a {type(module).__name__}, which would mix the tokens of different rows"
    return None


def _joined_neighbours(encoder: Any) -> str | None:
    if not getattr(encoder.config, "trigram_input", False):
        return None
    return "its embeddings join neighbouring tokens (trigram_input), at the end of a row its padding"


def _experts(encoder: Any) -> str | None:
    configured = encoder.config.to_dict()
    found = next((name for name in _EXPERTS if isinstance(configured.get(name), int) and configured[name] > 1), None)
    if found is None:
        return None
    return (
        f"it routes tokens to {configured[found]} experts, whose capacity and losses may depend on all rows of a batch"
    )


def _moving_rotary(encoder: Any) -> str | None:
    return why_rotary_moves(encoder.config)


def _odd_weights(encoder: nn.Module) -> str | None:
    n_weights = 0
    for name, parameter in encoder.named_parameters():
        if parameter.is_meta:
            return "its weights are on the meta device and have no values yet"
        if type(parameter) not in (nn.Parameter, Tensor) or not parameter.is_floating_point():
            return f"{name} is a {type(parameter).__name__} of {parameter.dtype}: quantized weights have no proof yet"
        n_weights += parameter.numel()
    if n_weights > MOST_WEIGHTS:
        return f"it has {n_weights / 1e9:.1f} billion weights; a proof is tried up to {MOST_WEIGHTS / 1e9:.0f} billion"
    return None


_REASONS: tuple[Callable[[Any], str | None], ...] = (
    _other_model,
    _other_inputs,
    _other_attention,
    _replaced_forward,
    _mixing_layer,
    _joined_neighbours,
    _experts,
    _moving_rotary,
    _odd_weights,
)
