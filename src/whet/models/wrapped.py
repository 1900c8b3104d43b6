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


def only_wraps(model: nn.Module) -> bool:
    """Return whether calling the model inside is as good as calling this one: nobody looks at the calls in between."""
    base = unwrapped(model)
    outer = [model, model.base_model] if isinstance(model, _peft_class("PeftModel")) else [model]
    around = [module for module in outer if module is not base]
    return not any(has_hooks(one) or "forward" in one.__dict__ or not is_pefts(one) for one in around)


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
