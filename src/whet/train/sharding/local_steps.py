"""Ranks that step alone and meet every few steps (local SGD: Stich 2018, arXiv:1805.09767; DiLoCo: `outer_step.py`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from whet.dist.averages import averaged
from whet.errors import ConfigError
from whet.optim import divisible
from whet.train.checkpoint.optimizer_state import parameters_of
from whet.train.resume import schema
from whet.train.sharding import unfinished
from whet.train.sharding.outer_step import Meeting
from whet.train.state import Stateful
from whet.train.update import OptimizerUpdate


class LocalSteps:
    """Gives the ranks common weights, and the mean of the optimizer's state, after every `every` steps of each.

    Evaluations, checkpoints and the end of the training do so first, and count from there: a checkpoint is that of
    one process, and a resumed run needs no record of the steps since the ranks met.
    """

    def __init__(self, sync: Any, every: int, meeting: Meeting) -> None:
        self._sync, self._every, self._meeting = sync, every, meeting
        self._n_steps = 0
        """Steps since the weights of the ranks were the same."""
        self._model: nn.Module | None = None
        self._optimizer: Optimizer | None = None

    @property
    def is_on(self) -> bool:
        """Whether the ranks have different weights now."""
        return self._sync.weights_differ

    def begin(self, model: nn.Module, optimizer: Optimizer) -> None:
        if divisible.unit_of(optimizer) != 1:
            raise ConfigError(
                what="local_sgd_steps does not go with this optimizer",
                got=type(optimizer).__name__,
                why="the ranks average its state, which must be a plain number for each weight",
                fix="use --optim adamw_whet, adamw_torch, sgd or another optimizer that updates weights one by one",
            )
        self._model, self._optimizer = model, optimizer

    def parameters(self, model: nn.Module) -> list[nn.Parameter]:
        return list(model.parameters())

    @contextmanager
    def stepping(self) -> Iterator[None]:
        if not self._sync.weights_differ:
            self._meeting.remember()
        yield
        self._n_steps += 1
        self._sync.weights_differ = True
        if self._n_steps >= self._every:
            self._average()

    @contextmanager
    def saving(self) -> Iterator[None]:
        self._average()
        yield

    def evaluating(self) -> AbstractContextManager[None]:
        return self.saving()

    def finish(self) -> None:
        self._average()

    def abandon(self) -> None:
        if self._sync.weights_differ and self._model is not None:
            unfinished.leave(self._model)
        self._sync.weights_differ = False

    def update(self, alone: OptimizerUpdate) -> OptimizerUpdate:
        return alone

    def optimizer_part(self, alone: Stateful) -> Stateful:
        return alone

    def parts(self) -> Mapping[str, Stateful]:
        return self._meeting.parts()

    @torch.no_grad()
    def _average(self) -> None:
        """Give all ranks common weights and the mean of the optimizer's state; all ranks call it."""
        if not self._sync.weights_differ:
            return
        assert self._optimizer is not None
        weights = parameters_of(self._optimizer)
        _require_same_form(self._sync, self._optimizer, weights)
        self._meeting.meet()
        places = list(_tensors_of(self._optimizer, weights))
        means = averaged(self._sync.group, [state[name] for state, name in places])
        for (state, name), mean in zip(places, means, strict=True):
            state[name] = mean  # another tensor: WhetAdamW then looks for the rows with moments again
        self._n_steps, self._sync.weights_differ = 0, False


def _tensors_of(optimizer: Optimizer, weights: Sequence[nn.Parameter]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield each tensor of the state that has a number for each weight, by its place."""
    for weight in weights:
        state = optimizer.state.get(weight, {})
        for name, value in sorted(state.items()):
            if isinstance(value, Tensor) and value.shape == weight.shape and value.is_floating_point():
                yield state, name


def _require_same_form(sync: Any, optimizer: Optimizer, weights: Sequence[nn.Parameter]) -> None:
    """Raise ConfigError if a weight had a gradient on some ranks alone, so that their states are of different steps."""
    own = [_form(optimizer.state.get(weight, {}), weight) for weight in weights]
    of_first = sync.of_first(own, schema.list_of(schema.list_of(lambda pair: isinstance(pair, tuple))))
    if not sync.group.any_of(own != of_first):
        return
    raise ConfigError(
        what="the optimizers of the ranks have updated different weights",
        got=f"{sum(one != first for one, first in zip(own, of_first, strict=False))} weights differ from rank 0's",
        why="with local_sgd_steps each rank updates the weights that have a gradient there, and then states of "
        "different steps cannot be averaged",
        fix="leave --local_sgd_steps out, or use all weights in each step and on each rank",
    )


def _form(state: dict[str, Any], weight: nn.Parameter) -> list[tuple[str, Any]]:
    """Return names and shapes of the state, and the values of its single numbers, such as the step."""
    found: list[tuple[str, Any]] = []
    for name, value in sorted(state.items()):
        if isinstance(value, Tensor):
            single = value.dim() == 0 and weight.dim() > 0
            found.append((name, float(value) if single else tuple(value.shape)))
        else:
            found.append((name, value if isinstance(value, int | float) else type(value).__name__))
    return found
