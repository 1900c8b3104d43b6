"""The state that an optimizer has after a step, computed without data; saved states are compared with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from whet.optim.optimizers.native import NativeAdamW

_ANYWHERE = {"step", "master"}
"""Entries that torch's AdamW and whet's hold in different forms; each reads the states of the other."""


def after_a_step(optimizer: Optimizer, *, frozen_too: bool = False) -> Optimizer:
    """Return an optimizer like this one after a step over parameters on the meta device.

    Raises TypeError for optimizers that are not known to run there.
    """
    known = type(optimizer).__module__.startswith(("torch.optim.", "whet.optim."))
    if not known:
        raise TypeError("only torch's optimizers and whet's AdamW are known to run without memory")
    plain = {"fused": False, "foreach": False, "capturable": False}
    groups = [
        {
            **{name: plain.get(name, value) for name, value in group.items()},
            "params": [
                nn.Parameter(torch.empty_like(p, device="meta"))
                for p in group["params"]
                if p.requires_grad or frozen_too
            ],
        }
        for group in optimizer.param_groups
    ]
    probe: Any = type(optimizer)(groups, lr=0.0)  # pyright: ignore[reportCallIssue, reportArgumentType]
    for group in probe.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.empty_like(parameter)
    probe.start() if isinstance(probe, NativeAdamW) else probe.step()
    return probe


def require_like(optimizer: Optimizer, names: Sequence[str], state: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ValueError for saved entries that this optimizer does not have, or has in another form.

    `names` are those of its parameters, in the order of its groups.
    """
    try:
        made = after_a_step(optimizer, frozen_too=True).state_dict()["state"]
    except Exception:  # an optimizer that does not run without data: there is nothing to compare with
        return
    known = {names[index]: values for index, values in made.items()}
    for parameter, values in state.items():
        usual = known.get(parameter, {})
        for name in values.keys() - _ANYWHERE:
            if name not in usual:
                raise ValueError(f"the saved state of {parameter} has {str(name)[:60]}, this optimizer has none")
            if not _alike(values[name], usual[name]):
                found, wanted = _form(values[name]), _form(usual[name])
                raise ValueError(f"the saved {name} of {parameter} is {found}, not {wanted}")
        master = values.get("master")
        if master is not None and not (isinstance(master, Tensor) and master.dtype is torch.float32):
            raise ValueError(f"the saved master of {parameter} is {_form(master)}")


def _alike(found: Any, usual: Any) -> bool:
    if not isinstance(found, Tensor) or not isinstance(usual, Tensor):
        return type(found) is type(usual)
    return found.shape == usual.shape and found.is_floating_point() == usual.is_floating_point()


def _form(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
