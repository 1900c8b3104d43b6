"""Which modules of a model have a fused forward, and which of their submodules are called nevertheless.

A known family declares fused forwards of large parts. Models that run packed by proof, and encoders of other libraries,
get those of single layers that any model may have (`put_generic`): linear layers, norms and activations. Each computes
what its class computes, from the module's own weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from whet.kernels.activation import bias_act
from whet.kernels.batch_position import Placement
from whet.kernels.linear import linear
from whet.kernels.norm import Norm, add_norm
from whet.models.family import Part, owner_of
from whet.models.forwards import bind, instance_forward
from whet.models.fused.layers import PLACEMENT, layer_of
from whet.models.standard import ACTIVATIONS, learn, why_called


def part_of(module: nn.Module) -> Part | None:
    """Return the fused part that may take the place of the module's forward; None for any class but a family's own."""
    return _declared(module) if learn(type(module)) else None


def is_fused(module: nn.Module) -> bool:
    """Return whether the module's forward is a fused one now."""
    part = _declared(module)
    return part is not None and instance_forward(module) is part.forward


def runs_always(module: nn.Module) -> bool:
    """Return whether the module's forward is one that it has wherever the model runs packed."""
    part = _declared(module)
    return part is not None and part.always and is_fused(module)


def ends_a_block(module: nn.Module) -> bool:
    """Return whether the result of the module's block is this module's result."""
    part = part_of(module)
    return part is not None and part.ends_block


def called(module: nn.Module) -> dict[str, str]:
    """Return which submodules of a fused module are called all the same, and why."""
    part, found = _declared(module), {}
    assert part is not None
    for path, standard in part.slots.items():
        slot = _slot(module, path)
        if slot is None:
            continue
        if (why := why_called(slot, standard)) is not None and layer_of(slot) is None:
            found[path] = why
    return found


def has_products(module: nn.Module) -> bool:
    """Return whether an operator multiplies by the weight of one of the module's linear layers."""
    part = _declared(module)
    if part is None or not is_fused(module):
        return False
    slots = ((_slot(module, path), standard) for path, standard in part.slots.items() if standard is nn.Linear)
    return any(slot is not None and why_called(slot, standard) is None for slot, standard in slots)


def _slot(module: nn.Module, path: str) -> nn.Module | None:
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


def _declared(module: nn.Module) -> Part | None:
    family = owner_of(type(module))
    return None if family is None else family.parts.get(type(module).__name__)


_EPSILONS = ("variance_epsilon", "eps", "epsilon")


def _generic_part_of(module: nn.Module) -> Part | None:
    """Return the fused part for a layer of this class; None if there is none, or the module is more than its class."""
    part = _GENERIC.get(type(module)) or (_RMS if _is_rms_norm(module) else None)
    return None if part is None or why_called(module, type(module)) is not None else part


def is_generic(module: nn.Module) -> bool:
    """Return whether the module's forward is one of these now."""
    forward = getattr(module.__dict__.get("forward"), "__func__", None)
    return any(forward is part.forward for part in (*_GENERIC.values(), _RMS))


def put_generic(model: nn.Module, placement: Placement) -> dict[str, int]:
    """Give each such layer of the model its fused forward; return how many of each class."""
    changed: dict[str, int] = {}
    for module in model.modules():
        part = None if "forward" in module.__dict__ else _generic_part_of(module)
        if part is not None:
            module.__dict__[PLACEMENT] = placement
            module.forward = bind(part.forward, module)
            changed[type(module).__name__] = changed.get(type(module).__name__, 0) + 1
    return changed


def take_generic(model: nn.Module) -> None:
    """Undo `put_generic`, exactly."""
    for module in model.modules():
        if is_generic(module):
            del module.__dict__[PLACEMENT]
            del module.forward


def _linear(self: Any, input: Tensor) -> Tensor:
    return linear(input, self.weight, self.bias) if _in_pass(self, input) else type(self).forward(self, input)


def _layer_norm(self: Any, input: Tensor) -> Tensor:
    if not _in_pass(self, input):
        return type(self).forward(self, input)
    return add_norm(input, None, Norm(self.weight, self.bias, self.eps))[0]


def _rms_norm(self: Any, hidden_states: Tensor) -> Tensor:
    if not _in_pass(self, hidden_states):
        return type(self).forward(self, hidden_states)
    eps: Any = _epsilon(self)
    return add_norm(hidden_states, None, Norm(self.weight, None, eps, rms=True))[0]


def _activation(self: Any, input: Tensor) -> Tensor:
    if not _in_pass(self, input):
        return type(self).forward(self, input)
    return bias_act(input, None, ACTIVATIONS[type(self)])


def _in_pass(module: nn.Module, x: Tensor) -> bool:
    """Return whether this call belongs to a packed pass of the module's model."""
    position = module.__dict__[PLACEMENT].now
    return position is not None and x.dim() > 2 and position.is_of(*x.shape[:2])


def _is_rms_norm(module: Any) -> bool:
    """Return whether a class that calls itself RMSNorm is one: with its weight as factor, and nothing else."""
    if not type(module).__name__.endswith("RMSNorm") or [name for name, _ in module.named_parameters()] != ["weight"]:
        return False
    weight, eps = module.weight, _epsilon(module)
    if weight.dim() != 1 or eps is None or weight.device.type != "cpu":
        return False
    x = torch.linspace(-2, 3, 3 * len(weight), device="cpu").view(3, -1)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        wanted = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()
        try:
            found = module(x)
        except Exception:
            return False
    return torch.allclose(found.float(), wanted, rtol=1e-5 if weight.dtype == torch.float32 else 2e-2, atol=1e-5)


def _epsilon(module: Any) -> float | None:
    return next((value for name in _EPSILONS if isinstance(value := getattr(module, name, None), float)), None)


_GENERIC: dict[type[nn.Module], Part] = {
    nn.Linear: Part(_linear, {}),
    nn.LayerNorm: Part(_layer_norm, {}),
    **{cls: Part(_activation, {}) for cls in ACTIVATIONS},
}
_RMS = Part(_rms_norm, {})
