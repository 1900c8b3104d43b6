"""Fused pieces that block forwards are written with: products without their bias, residual norms, activations.

A forward of a family (`Part.forward`) is a chain of these. A product leaves its bias to the operator behind it. A
submodule that is more than its class, by a hook or an adapter for example, is called; each forward pass asks again.
"""

from typing import Any

import torch
from torch import Tensor, nn

from whet.kernels.activation import bias_act
from whet.kernels.batch_position import BatchPosition
from whet.kernels.linear import linear
from whet.kernels.norm import Norm, add_norm
from whet.models.binding import bound
from whet.models.fused.chosen import residual_for
from whet.models.fused.dropout import PlacedDropout, drop_of
from whet.models.fused.ending import Ending, end
from whet.models.fused.low_rank import result_of
from whet.models.recomputation import came_later, require_no_other_pass
from whet.models.standard import ACTIVATIONS, LAYER_NORMS, has_hooks, is_unchanged, rms_norm_of, why_called

PLACEMENT = "whet_placement"
"""Attribute of a module that runs a fused forward: the Placement of its model."""
Product = tuple[Tensor, Tensor | None]
"""A product, and the bias that is still to be added."""
Unfinished = tuple[Tensor, Tensor, Ending] | Tensor
"""A product, its residual and what follows; or the result, if a norm had to be called."""


def pass_position(module: Any, x: Tensor) -> BatchPosition | None:
    """Return the position of the running pass of whet; None if the class's own forward must run on x (B, T, ...).

    Raises ConfigError if x is of a pass of another model: the module came into that one after whet had prepared it.
    """
    placement = module.__dict__.get(PLACEMENT)
    position = placement.now if placement is not None and is_unchanged(module) else None
    if position is None and placement is not None and placement.now is None:
        require_no_other_pass(module, *x.shape[:2])
    return position if position is not None and position.is_of(*x.shape[:2]) else None


def require_prepared(attention: nn.Module) -> None:
    """Raise ConfigError if an attention that cannot run packed as its class has it is not prepared."""
    if PLACEMENT not in attention.__dict__:
        raise came_later(attention)


def product(x: Tensor, dense: nn.Linear) -> Product:
    """Return the product, and the bias that is still to be added; a layer that must be called adds its own."""
    if why_called(dense, nn.Linear) is not None:
        return result_of(x, dense), None
    return linear(x, dense.weight), dense.bias


def with_bias(x: Tensor, dense: nn.Linear) -> Tensor:
    """Return dense(x)."""
    if why_called(dense, nn.Linear) is not None:
        return result_of(x, dense)
    return linear(x, dense.weight, dense.bias)


def inner(x: Tensor, dense: nn.Linear, activation: Any) -> Tensor:
    """Return activation(dense(x))."""
    result, bias = product(x, dense)
    if not isinstance(activation, nn.Module) or why_called(activation) is not None:
        return activation(_plus(result, bias))
    return bias_act(result, bias, ACTIVATIONS[type(activation)])


def layer_norm_of(norm: Any) -> Norm | None:
    """Return the parameters of a LayerNorm or a family's RMSNorm, for an operator; None if it must be called."""
    epsilon = LAYER_NORMS.get(type(norm))
    rms = rms_norm_of(norm) if epsilon is None else None
    if (epsilon is None and rms is None) or why_called(norm, type(norm)) is not None:
        return None
    if rms is None:
        return Norm(norm.weight, norm.bias, getattr(norm, epsilon or ""))
    weight = norm.weight + rms.weight_offset if rms.weight_offset else norm.weight
    return Norm(weight, None, getattr(norm, rms.epsilon), rms=True)


def residual_norm(found: Product, residual: Tensor, norm: nn.Module, dropout: nn.Module | None) -> Unfinished:
    """Return what `finished` makes into LayerNorm(residual + dropout(product + bias)).

    A norm that must be called is, and the result is a tensor.
    """
    result, bias = found
    residual = residual_for(result, residual)
    called = dropout is not None and why_called(dropout, PlacedDropout) is not None
    settings = layer_norm_of(norm)
    if dropout is not None and (called or settings is None):
        result, bias = dropout(_plus(result, bias)), None
    if settings is None:
        return norm(_plus(result, bias) + residual)
    drop = drop_of(dropout) if isinstance(dropout, PlacedDropout) and not called else None
    return result, residual, Ending(bias, settings, drop)


def normalised(x: Tensor, norm: nn.Module) -> Tensor:
    """Return norm(x)."""
    settings = layer_norm_of(norm)
    return norm(x) if settings is None else add_norm(x, None, settings)[0]


def residual_and_norm(found: Product, residual: Tensor, norm: nn.Module, dropout: nn.Module) -> tuple[Tensor, Tensor]:
    """Return LayerNorm(s) and s = residual + dropout(product + bias); a dropout may be an Identity."""
    result, bias = found
    residual = residual_for(result, residual)
    dropped = isinstance(dropout, PlacedDropout) and why_called(dropout, PlacedDropout) is None
    settings = layer_norm_of(norm)
    if settings is None or not (dropped or type(dropout) is nn.Identity):
        total = residual + dropout(_plus(result, bias))
        return norm(total), total
    drop = drop_of(dropout) if isinstance(dropout, PlacedDropout) else None
    return add_norm(result.to(residual.dtype), residual, settings, linear_bias=bias, drop=drop)


def finished(found: Unfinished) -> Tensor:
    """Return the norm's result."""
    if isinstance(found, Tensor):
        return found
    result, residual, ending = found
    return ending.finish(result, residual)


def block_end(module: nn.Module, found: Unfinished) -> Tensor:
    """Return what `finished` does; a checkpoint may leave it out of its block, unless a hook looks at the result."""
    return finished(found) if isinstance(found, Tensor) or has_hooks(module) else end(*found)


def is_plain(module: nn.Module) -> bool:
    """Return whether a block may do the work of this submodule itself, without calling it."""
    own = bound(module)
    ours = own is None or getattr(own, "__module__", "").startswith("whet.models.families.")
    return is_unchanged(module) and ours and not has_hooks(module)


def as_products_are(x: Tensor) -> Tensor:
    """Return x in bf16 if the CPU's products are: what lies between blocks then needs no copies in two formats.

    The norms' own arithmetic stays in fp32. fp16, whose numbers end at 65,504, keeps its sums in fp32.
    """
    if x.device.type != "cpu" or not torch.is_autocast_enabled("cpu"):
        return x
    return x.to(torch.bfloat16) if torch.get_autocast_dtype("cpu") is torch.bfloat16 else x


def _plus(result: Tensor, bias: Tensor | None) -> Tensor:
    return result if bias is None else result + bias.to(result.dtype)
