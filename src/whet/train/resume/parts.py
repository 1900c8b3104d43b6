"""Optimizer and schedule as parts of a run's state; changed settings keep the values of the new run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from whet.errors import ConfigError
from whet.log import logger
from whet.optim import schedule
from whet.train.checkpoint.optimizer_state import OptimizerState, names_in
from whet.train.resume import compare
from whet.train.state import State


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
        groups = self._optimizer.param_groups
        fresh = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        OptimizerState(self._optimizer, self.names).load_state(saved)
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
            kept = {name: kept[name] for name in ("last_epoch", "_step_count", "lr_lambdas") if name in kept}
        schedule.load_state(self._scheduler, kept)
        if isinstance(self._scheduler, LambdaLR):  # a function of the step: a longer run has another rate here
            rates = zip(self._optimizer.param_groups, self._scheduler.base_lrs, self._scheduler.lr_lambdas, strict=True)
            for group, base, share in rates:
                group["lr"] = base * share(self._scheduler.last_epoch)


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
