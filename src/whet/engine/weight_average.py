"""The mean of the weights over the last steps of a run (`weight_averaging_start`): stochastic weight averaging."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from whet.config.arguments import TrainingArguments
from whet.log import logger
from whet.models import finite
from whet.store import schema
from whet.store.state import State

_KINDS = {"n": schema.count, "last": schema.count}


class WeightAverage:
    """Averages the weights after each step from step `begins` on (Lu et al. 2022, arXiv:2212.05956, section 3).

    The model is evaluated and saved with the mean, and trains with its own weights. A checkpoint holds the mean as its
    model, and the weights to resume with as a part of the run's state.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, args: TrainingArguments, n_steps: int) -> None:
        updated = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
        self._model = model
        self._weights = {name: weight for name, weight in model.named_parameters() if id(weight) in updated}
        start = args.weight_averaging_start
        self.begins = None if start is None else int(start * n_steps) + 1
        """The first step whose weights count; None: nothing is averaged."""
        self.n = 0
        """Steps that the mean is over."""
        self._last = 0
        self._mean: dict[str, Tensor] = {}
        self._own: dict[str, Tensor] = {}
        """The model's own weights while the mean is in their place."""

    @torch.no_grad()
    def add(self, done: int) -> None:
        """Count the weights after `done` steps, if the average has begun."""
        if self.begins is None or done < self.begins:
            return
        self.n, self._last = self.n + 1, done
        if self.n == 1:
            self._mean = _copies(self._weights)
            return
        means, now = list(self._mean.values()), [self._weights[name].detach() for name in self._mean]
        torch._foreach_lerp_(means, now, 1.0 / self.n)  # pyright: ignore[reportPrivateImportUsage]

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Put the mean into the model for the block, once there is one; blocks may be nested."""
        if not self.n or self._own:
            yield
            return
        self._own = _copies(self._weights)
        _put(self._mean, self._weights)
        try:
            yield
        finally:
            _put(self._own, self._weights)
            self._own = {}

    def finish(self) -> None:
        """Leave the mean in the model at the end of the training."""
        if self.n:
            _put(self._mean, self._weights)
            logger.info("the model has the mean of its weights after the last %d steps", self.n)
        elif self.begins is not None:
            logger.warning(
                "weight_averaging_start: the training ended before step %d, so no weights were averaged", self.begins
            )

    def state(self) -> State:
        """Return the weights to resume with; the mean is the checkpoint's model."""
        return {"n": self.n, "last": self._last} | ({"weights": self._own or dict(self._weights)} if self.n else {})

    def largest_state(self) -> State:
        """Return a state as large as that of the last checkpoint, to forecast its bytes."""
        return self.state() | ({} if self.begins is None else {"weights": dict(self._weights)})

    def load_state(self, saved: State) -> None:
        """Take the mean from the model, which has been loaded, and give the model its own weights."""
        schema.require_all(saved, _KINDS, "average")
        if not saved["n"]:
            return
        own = _like(saved.get("weights"), self._weights)
        if found := finite.not_finite(self._model):
            raise ValueError(f"the averaged weights are not finite: {finite.shown(found)}")
        if self.begins is not None and saved["last"] >= self.begins:  # a longer run may begin to average later
            self.n, self._last, self._mean = saved["n"], saved["last"], _copies(self._weights)
            if (before := self._last - self.n + 1) != self.begins:
                logger.warning(
                    "the average began after step %d; a run of this length would begin it after step %d",
                    before - 1, self.begins - 1,
                )  # fmt: skip
        _put(own, self._weights)


def _copies(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in weights.items()}


@torch.no_grad()
def _put(values: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        weights[name].copy_(value)


def _like(saved: Any, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the saved weights; raises ValueError if names, shapes or types are not those of this run."""
    if not isinstance(saved, Mapping) or saved.keys() != weights.keys():
        raise ValueError("the weights next to the averaged ones are not those of this model")
    for name, weight in weights.items():
        value = saved[name]
        if not isinstance(value, Tensor) or value.shape != weight.shape or value.dtype != weight.dtype:
            raise ValueError(f"the weights next to the averaged ones have another {name}")
    return saved
