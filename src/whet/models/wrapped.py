"""Models that peft has wrapped: adapters sit in the layers of the model inside, which is what whet changes and runs."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from whet.models.standard import has_hooks


def unwrapped(model: nn.Module) -> Any:
    """Return the model of transformers inside one of peft; any other as it is."""
    if isinstance(model, _peft_class("PeftModel")):
        return model.get_base_model()  # pyright: ignore
    return model.model if isinstance(model, _peft_class("BaseTuner")) else model


def adds_tokens(model: nn.Module) -> bool:
    """Return whether the model puts learnt tokens before each row, as prompt tuning and its like do."""
    return isinstance(model, _peft_class("PeftModel")) and bool(model.active_peft_config.is_prompt_learning)  # pyright: ignore


def why_not_inside(model: nn.Module) -> str | None:
    """Return why this model has to be called, and not the one inside of it; None if what is around hands calls on.

    Of peft's wrappers most do. Those of AdaLoRA, X-LoRA and Poly have forwards of their own, which add to the loss or
    run the model twice, and activated LoRA looks for its tokens in each call.
    """
    base = unwrapped(model)
    outer = [model, model.base_model] if isinstance(model, _peft_class("PeftModel")) else [model]
    for one in outer:
        name = type(one).__name__
        if one is not base and has_hooks(one):
            return f"hooks on its {name} see its calls"
        if one is not base and not _hands_on(one):
            return f"its {name} may do more than call the model inside"
    configs: Any = getattr(model, "peft_config", {}) if model is not base else {}
    if any(getattr(config, "alora_invocation_tokens", None) for config in configs.values()):
        return "its adapter begins at tokens that it looks for in each call (alora_invocation_tokens)"
    return None


def _hands_on(wrapper: nn.Module) -> bool:
    """Return whether the wrapper runs a forward of peft's that calls the model inside, and does no more."""
    cls = type(wrapper)
    known = is_pefts(wrapper) and cls.forward.__module__ in _HANDING_ON and cls.__call__ is nn.Module.__call__
    return known and "forward" not in wrapper.__dict__


def passed_on(model: nn.Module, names: frozenset[str]) -> frozenset[str]:
    """Return which of these columns of tokens a wrapped model hands on to the model inside.

    Some of peft's wrappers keep `token_type_ids` to themselves: a run without padding must not know more than one with.
    """
    base = unwrapped(model)
    if base is model:
        return names
    before = base.__dict__.get("forward")
    base.forward = _stop
    try:
        model.forward(**{name: torch.zeros(1, 1, dtype=torch.int64) for name in names})
    except _Reached as reached:
        return names & reached.names
    finally:
        del base.forward
        if before is not None:
            base.forward = before
    return names


_HANDING_ON = ("peft.peft_model", "peft.tuners.tuners_utils")
"""Where peft has the forwards that hand a call on; tuners that do more have forwards in files of their own."""


class _Reached(Exception):  # noqa: N818
    """Carries the names of the arguments that came through."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__()
        self.names = names


def _stop(*_: Any, **given: Any) -> None:
    raise _Reached(frozenset(name for name, value in given.items() if value is not None))


def is_pefts(module: nn.Module) -> bool:
    """Return whether the module is one of peft's own classes: an adapter, or what goes around one."""
    return type(module).__module__.startswith("peft.")


def _peft_class(name: str) -> tuple[type, ...]:
    """Return the class of peft with this name, for isinstance; nothing if peft is not in use."""
    peft, tuners = sys.modules.get("peft"), sys.modules.get("peft.tuners.tuners_utils")
    found = getattr(peft, name, None) or getattr(tuners, name, None)
    return () if found is None else (found,)
