"""Which modules do exactly what their class does, so that an operator may take their place.

An operator reads a module's weights and never calls it. A subclass, a hook, a parametrization, an adapter or a weight
that is quantized would be ignored, so such a module is called. Hooks and adapters may come at any time: every forward
pass asks again, which costs a few attribute reads, less than the call that is saved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers import activations
from transformers.models.deberta.modeling_deberta import DebertaLayerNorm
from transformers.pytorch_utils import Conv1D

from whet.kernels.activation import Kind
from whet.models.family import RmsNorm, home_of_forward, owner_of
from whet.models.forwards import home_of

ACTIVATIONS: dict[type[nn.Module], Kind] = {
    activations.GELUActivation: "gelu",
    activations.NewGELUActivation: "gelu_tanh",
    activations.GELUTanh: "gelu_tanh",
    activations.SiLUActivation: "silu",
    nn.SiLU: "silu",
}
"""Activations that have an operator."""
LAYER_NORMS: dict[type[nn.Module], str] = {nn.LayerNorm: "eps", DebertaLayerNorm: "variance_epsilon"}
"""Norms that have an operator, and the attribute that holds their epsilon."""
_FORWARDS: dict[type[nn.Module], Callable[..., Any]] = {
    cls: cls.forward for cls in (nn.Linear, Conv1D, *LAYER_NORMS, nn.Embedding, *ACTIVATIONS)
}
"""The forward of each class when whet was imported."""
_TRUSTED: dict[type[nn.Module], Callable[..., Any]] = {}
"""The same for classes of transformers and of known families, from when whet first met them."""
_FOR_ALL = (
    torch_module._global_forward_hooks,
    torch_module._global_forward_pre_hooks,
    torch_module._global_backward_hooks,
    torch_module._global_backward_pre_hooks,
)
"""Hooks that torch runs at every module."""


def why_called(module: Any, standard: type[nn.Module] | str | None = None) -> str | None:
    """Return why this module must be called; None if it does what its class `standard` does, and no more.

    `standard` may be the name of an RMSNorm of the module's family. Without it any activation that has an operator will
    do.
    """
    cls = type(module)
    if isinstance(standard, str):
        standard = cls if cls.__name__ == standard and rms_norm_of(module) is not None else nn.Module
    if cls is not standard and (standard is not None or cls not in ACTIVATIONS):
        return f"is a {name_of(cls)}"
    if "forward" in module.__dict__ or (cls in _FORWARDS and cls.forward is not _FORWARDS[cls]):
        return "has a forward of its own"
    return why_odd(module)


def why_odd(module: Any) -> str | None:
    """Return why a module whose class and forward are known must be called all the same: hooks, odd weights."""
    if has_hooks(module):
        return "has hooks"
    cls = type(module)
    if cls in ACTIVATIONS:
        return None
    for name in ("weight", "bias"):
        parameter = module._parameters.get(name)
        if parameter is not None and type(parameter) not in (nn.Parameter, Tensor):
            return f"has a {name} of class {name_of(type(parameter))}"
        if parameter is not None and not parameter.is_floating_point():
            return f"has a {name} of {parameter.dtype}"
    if cls in (nn.Linear, nn.LayerNorm, nn.Embedding) and module._parameters.get("weight") is None:
        return "has no weight of its own"
    if cls is nn.LayerNorm and len(module.normalized_shape) != 1:
        return "normalises over several dimensions"
    if cls is nn.Embedding and not module.weight.is_contiguous():
        return "has a weight that does not lie in one piece"
    if cls is nn.Embedding and (module.max_norm is not None or module.scale_grad_by_freq or module.sparse):
        return "changes its rows or their gradient"
    return None


def rms_norm_of(module: nn.Module) -> RmsNorm | None:
    """Return how the module's family computes this RMSNorm; None if it is none of a family, or was changed."""
    family = owner_of(type(module))
    found = None if family is None else family.rms_norms.get(type(module).__name__)
    return found if found is not None and is_unchanged(module) else None


def has_hooks(module: nn.Module) -> bool:
    """Return whether hooks around the module's forward or backward could see or change anything."""
    return any(_FOR_ALL) or has_own_hooks(module)


def has_own_hooks(module: nn.Module) -> bool:
    """Return whether hooks of this module, and not those of every module, could see or change anything."""
    if module._backward_hooks or module._backward_pre_hooks:
        return True
    if not (module._forward_hooks or module._forward_pre_hooks):
        return False
    return not all(map(is_harmless, [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]))


def is_harmless(hook: Any) -> bool:
    """Return whether the hook only names the time that passes, keeps outputs, or asks for gradients for checkpoints.

    transformers keeps what a call with `output_hidden_states` asks for by hooks that stay. Those for gradients are put
    on embeddings by transformers and peft, as reentrant checkpoints need them.
    """
    home = home_of(hook)
    if home.startswith(("whet.", "transformers.utils.output_capturing")):
        return True
    asks = getattr(hook, "__name__", "") in ("make_inputs_require_grads", "make_inputs_require_grad")
    return asks and home.startswith(("transformers.", "peft."))


def is_trusted(cls: type) -> bool:
    """Return whether the class is defined in transformers or in the package of a known family."""
    return cls.__module__.startswith("transformers.") or owner_of(cls) is not None


def learn(cls: type[nn.Module]) -> bool:
    """Return whether this is a trusted class whose forward is as its source has it, inherited or not; remember that."""
    if not (is_trusted(cls) and is_trusted(home_of_forward(cls)) and is_as_in_source(cls)):
        return False
    _TRUSTED[cls] = cls.forward
    return True


def is_as_in_source(cls: type[nn.Module]) -> bool:
    """Return whether the forward of the class, inherited or not, is the one that its source file has."""
    home, forward = home_of_forward(cls), _without_theirs(cls.forward)
    code, written = getattr(forward, "__code__", None), getattr(forward, "__globals__", {})
    if code is None or written.get("__name__") != home.__module__:
        return False
    return code.co_filename == written.get("__file__") and code.co_qualname == f"{home.__qualname__}.forward"


def _without_theirs(forward: Any) -> Any:
    """Return the forward that transformers' own decorators are around.

    They are known by the module that they were written in: its path changes where transformers is imported again.
    """
    while hasattr(forward, "__wrapped__") and _written_in(forward).startswith("transformers."):
        forward = forward.__wrapped__
    return forward


def _written_in(function: Any) -> str:
    return getattr(function, "__globals__", {}).get("__name__") or ""


def is_unchanged(module: nn.Module) -> bool:
    """Return whether the module's class is a trusted one, with the forward that whet met first."""
    known = _TRUSTED.get(type(module))
    return learn(type(module)) if known is None else type(module).forward is known


def name_of(cls: type) -> str:
    """Return a class as a user knows it: with its package, unless it is torch's own layer or of the user's script."""
    own = cls.__module__.startswith(("torch.nn.", "__main__", "builtins"))
    return cls.__name__ if own else f"{cls.__name__} of {cls.__module__.partition('.')[0]}"
