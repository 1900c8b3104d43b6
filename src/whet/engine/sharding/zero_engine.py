"""A run whose gradients, optimizer and weights DeepSpeed's engine shares between the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from whet.dist.zero_engine import ZeroEngine
from whet.engine.sharding.shares import SHARED, CollectedState, mark_unfinished
from whet.engine.update import OptimizerUpdate
from whet.errors import ConfigError
from whet.optim import divisible
from whet.store.optimizer import names_in, parameters_of
from whet.store.state import State, Stateful


@dataclass(frozen=True)
class EngineUpdate:
    """The update that DeepSpeed makes of the gradients that it has summed."""

    engine: ZeroEngine
    alone: OptimizerUpdate
    applied: list[bool]
    """Whether the present step was applied: empty before that."""

    def gradient_norm(self) -> float:
        return self.engine.gradient_norm()

    def apply(self, grad_scale: float) -> None:
        self.applied.append(True)
        self.alone.send("on_pre_optimizer_step")
        self.engine.step()  # clips by the norm of all ranks, as grad_scale would
        self.alone.send("on_optimizer_step")

    def clear(self) -> None:
        if not self.applied:
            self.engine.discard()
        self.applied.clear()
        self.alone.clear()


class EngineSharing:
    """What DeepSpeed shares: the optimizer's state; from stage 2 on the gradients; at stage 3 the weights."""

    is_on = False

    def __init__(self, sync: Any, config: Callable[[nn.Module], dict[str, Any]]) -> None:
        self._sync, self._config = sync, config
        self._part: _EnginePart | None = None

    def begin(self, model: nn.Module, optimizer: Optimizer) -> None:
        _require_by_element(optimizer)
        part = _EnginePart(model, optimizer)
        states = {one: state for one, state in ((p, optimizer.state.get(p)) for p in part.parameters) if state}
        part.engine = self._sync.engine = ZeroEngine(self._sync.group, model, optimizer, self._config(model), states)
        self._part, self.is_on = part, True
        setattr(optimizer, SHARED, True)

    def parameters(self, model: nn.Module) -> list[nn.Parameter]:
        return list(model.parameters())

    def stepping(self) -> AbstractContextManager[None]:
        return nullcontext()

    def update(self, alone: OptimizerUpdate) -> EngineUpdate:
        assert self._sync.engine is not None
        return EngineUpdate(self._sync.engine, alone, [])

    @contextmanager
    def saving(self) -> Iterator[None]:
        if self._part is None:
            yield
            return
        with self._part.engine.complete_weights(), self._part.collected():
            yield

    def evaluating(self) -> AbstractContextManager[None]:
        return nullcontext() if self._part is None else self._part.engine.complete_weights()

    def optimizer_part(self, alone: Stateful) -> Stateful:
        return alone if self._part is None else self._part

    def abandon(self) -> None:
        if self._part is not None and self._part.engine.stage == 3:
            mark_unfinished(self._part.engine.model)

    def finish(self) -> None:
        """Return the model to a plain one; the optimizer's state ends with the engine."""
        if self._part is not None:
            self._part.engine.end()
            self._part, self._sync.engine, self.is_on = None, None, False


def _require_by_element(optimizer: Optimizer) -> None:
    if divisible.unit_of(optimizer) != 1:
        raise ConfigError(
            what="deepspeed does not go with this optimizer",
            got=type(optimizer).__name__,
            why="DeepSpeed's engine gives it flat parts of the weights, and it reads complete tensors",
            fix="use --optim adamw_whet, or --zero_stage 1 instead of --deepspeed",
        )


class _EnginePart(CollectedState):
    """The optimizer as a part of a checkpoint, with the names and shapes of the complete parameters."""

    engine: ZeroEngine

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._optimizer, self.parameters = optimizer, parameters_of(optimizer)
        self._names = names_in(optimizer, model)
        self._sizes = [len(group["params"]) for group in optimizer.param_groups]

    def collect(self) -> State:
        states = self.engine.state(self.parameters)
        names, groups = iter(self._names), []
        for group, size in zip(self._optimizer.param_groups, self._sizes, strict=True):
            plain = {name: value for name, value in group.items() if name != "params"}
            groups.append({**plain, "params": [next(names) for _ in range(size)]})
        found = {name: state for name, state in zip(self._names, states, strict=True) if state}
        return {"param_groups": groups, "state": found}
