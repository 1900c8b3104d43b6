"""The state of an optimizer and its schedule in a checkpoint: under the names of the model's parameters.

The keys are those of `torch.distributed.checkpoint`: `state.<parameter>.<moment>`. A moment keeps the shape that the
optimizer gives it, so tools can split and merge moments as they split and merge the parameters. A saved state is
compared with the one that this optimizer has after a step, which is computed without data.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from whet.errors import ConfigError
from whet.log import logger
from whet.optim import schedule
from whet.optim.optimizers.native import NativeAdamW
from whet.store import compare, schema
from whet.store.state import State

_SHAPED = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "sum"}
"""State of torch's optimizers that has the parameter's shape."""
_ANYWHERE = {"step", "master"}
"""Entries that torch's AdamW and whet's hold in different forms; each reads the states of the other."""


class OptimizerPart:
    """The optimizer's state; settings in `changed` keep the values of the new run."""

    def __init__(self, optimizer: Optimizer, model: nn.Module, changed: Set[str]) -> None:
        self._optimizer, self._model, self._changed = optimizer, model, changed

    @property
    def names(self) -> list[str]:
        """The names of the optimizer's parameters, in the order of its groups."""
        return names_in(self._optimizer, self._model)

    def state(self) -> State:
        return OptimizerState(self._optimizer, self.names).state()

    def load_state(self, saved: State) -> None:
        if compare.OPTIMIZER in self._changed:
            logger.warning("another optimizer than before: its state starts from zero")
            return
        groups, names = self._optimizer.param_groups, self.names
        fresh = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        if "layerwise_lr_decay" in self._changed:
            left = iter(names)
            wanted = [[next(left) for _ in group["params"]] for group in groups]
            saved = {**saved, "param_groups": _regrouped(saved["param_groups"], wanted)}
        if "optim_args" in self._changed:
            _require_same_form(self._optimizer, names, saved["state"])
        OptimizerState(self._optimizer, names).load_state(saved)
        for group, new in zip(self._optimizer.param_groups, fresh, strict=True):
            group.update({name: new[name] for name in compare.group_settings(set(self._changed), new)})


class SchedulePart:
    """The schedule's state. It is restored after the optimizer's, whose groups hold the learning rates."""

    def __init__(self, optimizer: Optimizer, scheduler: Any, changed: Set[str]) -> None:
        self._optimizer, self._scheduler, self._changed = optimizer, scheduler, changed

    def state(self) -> State:
        return without_tensors(schedule.state_of(self._scheduler))

    def load_state(self, saved: State) -> None:
        # The optimizer's groups hold the rates already: a step of the schedule here would be one too many.
        kept = alike(saved, self._scheduler.state_dict())
        if self._changed & compare.SCHEDULE:
            fresh = self._scheduler.state_dict()
            kept = {name: value for name, value in kept.items() if name in ("last_epoch", "_step_count")}
            kept |= {"lr_lambdas": fresh["lr_lambdas"]} if "lr_lambdas" in fresh else {}  # one for each group
        schedule.load_state(self._scheduler, kept)
        if isinstance(self._scheduler, LambdaLR):  # a function of the step: a longer run has another rate here
            rates = zip(self._optimizer.param_groups, self._scheduler.base_lrs, self._scheduler.lr_lambdas, strict=True)
            for group, base, share in rates:
                group["lr"] = base * share(self._scheduler.last_epoch)
            self._scheduler._last_lr = [group["lr"] for group in self._optimizer.param_groups]


class OptimizerState:
    """The state of one optimizer; `names` are those of its parameters, in the order of its groups."""

    def __init__(self, optimizer: Optimizer, names: Sequence[str]) -> None:
        self._optimizer, self._names = optimizer, names

    def state(self) -> State:
        """Return `{"param_groups": [settings and names], "state": {name: moments and numbers}}`."""
        state = self._optimizer.state_dict()
        names = dict(zip(_indices(state["param_groups"]), self._names, strict=True))
        groups = [
            {**_numbers(group), "params": [names[index] for index in group["params"]]}
            for group in state["param_groups"]
        ]
        return {
            "param_groups": groups,
            "state": {names[index]: dict(values) for index, values in state["state"].items()},
        }

    def load_state(self, saved: State) -> None:
        """Restore the state of an optimizer over parameters of the same names; raises ValueError for any other."""
        fresh = self._optimizer.state_dict()["param_groups"]
        index_of = dict(zip(self._names, _indices(fresh), strict=True))
        groups = [_restored(group) for group in saved["param_groups"]]
        _require_same_names(groups, fresh, index_of)
        for group, new in zip(groups, fresh, strict=True):
            group["params"] = list(new["params"])
        unknown = sorted(saved["state"].keys() - index_of.keys())
        if unknown:
            raise ValueError(f"the saved optimizer has a state for {unknown[0]!r}, which it does not update here")
        parameters = dict(zip(self._names, parameters_of(self._optimizer), strict=True))
        _require_shapes(saved["state"], parameters)
        _require_like(self._optimizer, self._names, saved["state"])
        _require_all(saved["state"])
        _require_steps(saved["state"])
        schema.require_groups(groups, self._optimizer.param_groups)
        state = {index_of[name]: dict(values) for name, values in saved["state"].items()}
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})


def names_in(optimizer: Optimizer, model: nn.Module) -> list[str]:
    """Return the names of the optimizer's parameters in the model; one of another module is named by its index."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names.get(id(one), f"parameter.{number}") for number, one in enumerate(parameters_of(optimizer))]


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the optimizer's parameters, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _regrouped(saved: Sequence[Mapping[str, Any]], wanted: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Return the saved groups, split or joined into groups of these parameters, all of which they must hold."""
    group_of = {name: group for group in saved for name in group["params"]}
    if group_of.keys() != {name for names in wanted for name in names}:
        raise ValueError("the saved optimizer holds other parameters")
    return [{**group_of[names[0]], "params": list(names)} for names in wanted]


def _indices(groups: Sequence[Mapping[str, Any]]) -> list[int]:
    return [index for group in groups for index in group["params"]]


def _numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.item() if isinstance(value, Tensor) else value for name, value in group.items()}


def _restored(group: dict[str, Any]) -> dict[str, Any]:
    lists = {name: value for name, value in group.items() if isinstance(value, list) and name != "params"}
    return group | {name: tuple(value) for name, value in lists.items()}  # JSON has no tuples


def _require_same_names(
    groups: Sequence[Mapping[str, Any]], fresh: Sequence[Mapping[str, Any]], index_of: Mapping[str, int]
) -> None:
    """Require groups of the same parameters: the group decides their learning rate and decay."""
    if len(groups) != len(fresh):
        raise ValueError(f"the saved optimizer has {len(groups)} groups of parameters, this one {len(fresh)}")
    for number, (group, new) in enumerate(zip(groups, fresh, strict=True)):
        if [index_of.get(name) for name in group["params"]] != new["params"]:
            raise ValueError(f"group {number} of the saved optimizer holds other parameters")


def _require_shapes(state: Mapping[str, Mapping[str, Any]], parameters: Mapping[str, nn.Parameter]) -> None:
    """Check the shapes. Torch does not, and its optimizers would write out of bounds."""
    for parameter, values in state.items():
        shape = tuple(parameters[parameter].shape)
        for name in _SHAPED & values.keys():
            if isinstance(values[name], Tensor) and tuple(values[name].shape) != shape:
                raise ValueError(f"{parameter} is {shape}, its saved {name} {tuple(values[name].shape)}")
            if isinstance(values[name], Tensor) and not _may_hold_moments(values[name], parameters[parameter]):
                raise ValueError(f"the saved {name} of {parameter} holds {values[name].dtype}")


def _may_hold_moments(tensor: Tensor, parameter: Tensor) -> bool:
    wider = tensor.dtype is torch.float64 and parameter.dtype is not torch.float64
    return (tensor.is_floating_point() and not wider) or tensor.dtype is torch.uint8  # the codes of 8-bit moments


def _require_all(state: Mapping[str, Mapping[str, Any]]) -> None:
    """Require that all named parameters have a state, or none of them."""
    empty = [name for name, values in state.items() if not values]
    if empty and len(empty) < len(state):
        raise ValueError(f"{empty[0]} has no saved state, others have")


def _require_steps(state: Mapping[str, Mapping[str, Any]]) -> None:
    for name, values in state.items():
        step = values.get("step", 0)
        if isinstance(step, Tensor) and (step.is_floating_point() or step.dtype is torch.int64):
            step = step.item() if step.numel() == 1 else math.nan
        if not isinstance(step, int | float) or not 0 <= step < schema.MOST or step != int(step):
            raise ValueError(f"the saved step of {name} is {str(values['step'])[:60]}")


# ---- the state after a step ----


def state_after_a_step(optimizer: Optimizer, model: nn.Module) -> State:
    """Return the optimizer's state after a step: its own, or that of an equal one; two moments if that is unknown."""
    names = names_in(optimizer, model)
    own = OptimizerState(optimizer, names).state()
    if own["state"]:
        return own
    parameters = {
        name: parameter
        for name, parameter in zip(names, parameters_of(optimizer), strict=True)
        if parameter.requires_grad
    }
    try:
        return OptimizerState(_after_a_step(optimizer), list(parameters)).state()
    except Exception:  # an optimizer that does not run without data
        moments = {name: torch.empty_like(parameter, device="meta") for name, parameter in parameters.items()}
        return own | {"state": {name: {"first": one, "second": one} for name, one in moments.items()}}


def _after_a_step(optimizer: Optimizer, *, frozen_too: bool = False) -> Optimizer:
    """Return an optimizer like this one after a step over parameters on the meta device.

    Raises TypeError for optimizers that are not known to run there.
    """
    known = type(optimizer).__module__.startswith(("torch.optim.", "whet.optim."))
    if not known:
        raise TypeError("only torch's optimizers and whet's are known to run without memory")
    plain = {"fused": False, "foreach": False, "capturable": False}
    probe: Any = object.__new__(type(optimizer))  # each class has its own arguments; what they set is in attributes
    own = {name: OrderedDict() if name.endswith("_hooks") else value for name, value in vars(optimizer).items()}
    own.pop("step", None)  # of a schedule, which steps the optimizer itself
    vars(probe).update(own)
    probe.state, probe.param_groups = defaultdict(dict), []
    for group in optimizer.param_groups:
        params = [one for one in group["params"] if one.requires_grad or frozen_too]
        like = {nn.Parameter(torch.empty_like(one, device="meta")): one for one in params}
        settings = {name: plain.get(name, value) for name, value in group.items()}
        probe.param_groups.append({**settings, "params": [*like]})
        for parameter, real in like.items():
            parameter.grad = torch.empty_like(parameter)
            if begun := optimizer.state.get(real):  # some make it before the first step
                probe.state[parameter] = {name: _without_memory(value) for name, value in begun.items()}
    probe.start() if isinstance(probe, NativeAdamW) else probe.step()
    return probe


def _without_memory(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_like(value, device="meta") if value.dim() else value.clone()


def _usual_state(optimizer: Optimizer, names: Sequence[str]) -> Mapping[str, Mapping[str, Any]] | None:
    """Return the state of each parameter after a step, by name; None for an optimizer that does not run without data.

    `names` are those of its parameters, in the order of its groups.
    """
    try:
        made: dict[int, Any] = _after_a_step(optimizer, frozen_too=True).state_dict()["state"]
    except Exception:
        return None
    return {names[index]: values for index, values in made.items()}


def _require_like(optimizer: Optimizer, names: Sequence[str], state: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ValueError for saved entries that this optimizer does not have, or has in another form.

    `names` are those of its parameters, in the order of its groups.
    """
    known = _usual_state(optimizer, names)
    if known is None:  # there is nothing to compare with
        return
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


def _require_same_form(optimizer: Optimizer, names: Sequence[str], state: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ConfigError for optim_args with which the optimizer does not keep the state that is saved."""
    known = _usual_state(optimizer, names)
    found = None if known is None else next(_other_forms(state, known), None)
    if known is not None and found is None:
        return
    raise ConfigError(
        what="these optim_args cannot change in a run that resumes",
        got=found or f"{type(optimizer).__name__}, whose state whet does not know",
        why="the new options ask for a state of another form than the one that the checkpoint holds"
        if found
        else "it may keep the state of the old options and ignore the new ones",
        fix="use the --optim_args of the checkpoint; or start a new run in another --output_dir, without "
        "--resume_from_checkpoint",
    )


def _other_forms(saved: Mapping[str, Mapping[str, Any]], known: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for parameter, values in saved.items():
        usual = known.get(parameter, {})
        for name in sorted((values.keys() | usual.keys()) - _ANYWHERE) if values else ():
            before, now = (_form(one[name]) if name in one else "nothing" for one in (values, usual))
            if before != now:
                yield f"{name} of {parameter}: {before} in the checkpoint -> {now} now"


def _alike(found: Any, usual: Any) -> bool:
    if not isinstance(found, Tensor) or not isinstance(usual, Tensor):
        return type(found) is type(usual)
    return found.shape == usual.shape and found.is_floating_point() == usual.is_floating_point()


def _form(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


# ---- states in JSON ----


def without_tensors(value: Any) -> Any:
    """Return the state with plain numbers instead of tensors; raises ConfigError for values that JSON cannot hold."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {str(name): without_tensors(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [without_tensors(one) for one in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ConfigError(
        what="the state of the schedule cannot be written",
        got=f"{type(value).__name__} has no JSON form",
        why="checkpoints hold plain numbers and texts: they can be read without running code",
        fix="use a schedule of torch or of --lr_scheduler_type, or --save_strategy no",
    )


def alike(kept: Any, fresh: Any) -> Any:
    """Return the saved state in the types of a fresh one: JSON has neither tuples nor numbers as keys."""
    if isinstance(fresh, Counter):
        return Counter({int(name): count for name, count in kept.items()})
    if isinstance(fresh, dict):
        return {name: alike(value, fresh.get(name)) for name, value in kept.items()}
    if isinstance(fresh, Tensor):
        return fresh.new_tensor(kept)
    if isinstance(fresh, list) and isinstance(kept, list) and len(fresh) == len(kept):
        return [alike(old, new) for old, new in zip(kept, fresh, strict=True)]
    return tuple(kept) if isinstance(fresh, tuple) else kept
