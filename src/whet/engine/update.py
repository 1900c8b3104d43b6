"""The optimizer of a run, and how a step's gradients reach the weights: clipping, the update, and the weights' mean.

Learning rates may fall with depth (`layerwise_lr_decay`). Weights are updated after the backward pass, or inside it.
Their mean over the last steps is what the run ends with if `weight_averaging_start` asks for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.profiler import record_function

from whet.config.arguments import TrainingArguments
from whet.errors import ConfigError
from whet.kernels.adamw import gradient_norm
from whet.kernels.embedding import rows_in_use
from whet.log import logger
from whet.models import finite
from whet.models.view import ModelView
from whet.optim import registry, schedule
from whet.optim.optimizers.native import NativeAdamW
from whet.store import schema
from whet.store.state import State
from whet.watch.events import Events

if TYPE_CHECKING:
    from whet.optim.in_backward import InBackward

_MOST_NAMED = 3
_ROUNDING = 1e-6
"""Of a rate that an optimizer keeps in a float32 tensor."""
CLIP_EPS = 1e-6
"""Added to the norm when clipping, as in torch.nn.utils.clip_grad_norm_."""
EVENTS_OF_GRADIENTS = ("on_pre_optimizer_step", "on_optimizer_step")
"""Events at which a callback may read the clipped gradient."""


def build_optimizer(
    model: nn.Module, args: TrainingArguments, n_steps: int, given: tuple[Optimizer | None, Any] = (None, None)
) -> tuple[Optimizer, Any]:
    """Return the optimizer and the schedule of a run of `n_steps` steps: those that are given, or as settings say."""
    optimizer, scheduler = given
    if optimizer is None:
        optimizer = registry.build(model, args, rates_by_depth(model, args))
    elif scheduler is None:
        for group in optimizer.param_groups:  # the rates before the schedule of an earlier run
            group["lr"] = group.pop("initial_lr", group["lr"])
    _require_rates(model, args, optimizer)
    if type(optimizer).__module__.startswith("torchao."):
        from whet.optim.optimizers.adamw_packages import make_saveable

        make_saveable(optimizer)
    return optimizer, schedule.build(optimizer, args, n_steps) if scheduler is None else scheduler


def rates_by_depth(model: nn.Module, args: TrainingArguments) -> dict[int, float] | None:
    """Return the share of the learning rate of each parameter by its id; None if all have the same.

    The head has 1, the last block `layerwise_lr_decay`, the block below it the square of that, and so on down to the
    embeddings (Howard and Ruder 2018, arXiv:1801.06146, section 3.2). Raises ConfigError if the depth is not known.
    """
    if args.layerwise_lr_decay == 1:
        return None
    depths = ModelView(model).depths()
    if not depths:
        raise ConfigError(
            what="layerwise_lr_decay does not go with this model",
            got=type(model).__name__,
            why="it needs one stack of blocks with weights of their own: whet cannot tell how deep the weights of this "
            "model are",
            fix="leave --layerwise_lr_decay out; whet.Trainer takes rates of your own as optimizers=(optimizer, None)",
        )
    top = max(depths.values())
    return {name: args.layerwise_lr_decay ** (top - depth) for name, depth in depths.items()}


def _require_rates(model: nn.Module, args: TrainingArguments, optimizer: Optimizer) -> None:
    """Raise ConfigError if an optimizer that whet did not build has other learning rates than were asked for."""
    rates = rates_by_depth(model, args)
    if rates is None:
        return
    for group in optimizer.param_groups:
        found = float(group.get("initial_lr", group["lr"]))
        for parameter in group["params"]:
            wanted = args.learning_rate * rates.get(id(parameter), 1.0)
            if not math.isclose(found, wanted, rel_tol=_ROUNDING):
                raise _other_rates(optimizer, found, wanted)


def _other_rates(optimizer: Optimizer, found: float, wanted: float) -> ConfigError:
    return ConfigError(
        what="layerwise_lr_decay is not carried out by this optimizer",
        got=f"{type(optimizer).__name__} with a learning rate of {found:g} where {wanted:g} was asked for",
        why="an optimizer of your own, or of another package, brings its own groups of parameters",
        fix="leave --layerwise_lr_decay out, or choose one of whet's optimizers with --optim",
    )


class UntrainedParameters:
    """Parameters that get a gradient but are not in the optimizer, as they were unfrozen after it was made."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._frozen = _not_in_optimizer(model, optimizer)
        """Checked after each step; empty in most runs."""

    def warn(self) -> None:
        """Log a warning about them, once for each; transformers' Trainer does not train them either."""
        if not any(parameter.grad is not None for parameter in self._frozen.values()):
            return
        outside = _not_in_optimizer(self._model, self._optimizer)
        found = [name for name, one in self._frozen.items() if one.grad is not None and name in outside]
        self._frozen = {name: one for name, one in self._frozen.items() if one.grad is None}
        if found:
            logger.warning(
                "%d parameters get gradients and are not trained, as they were frozen when the optimizer was made: %s; "
                "their gradients count when clipping; to train them later, freeze them in on_train_begin instead, when "
                "the optimizer has been made",
                len(found), ", ".join(found[:_MOST_NAMED]) + (" ..." if len(found) > _MOST_NAMED else ""),
            )  # fmt: skip


def _not_in_optimizer(model: nn.Module, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    held = {id(one) for group in optimizer.param_groups for one in group["params"]}
    return {name: one for name, one in model.named_parameters() if id(one) not in held}


class Clipping(Protocol):
    """How the clipping factor reaches the weights."""

    def prepare(self, grad_scale: float) -> None:
        """Make the next step of the optimizer use the gradient times `grad_scale`."""
        ...


class ClipInOwnPass:
    """The gradient is multiplied before the optimizer's step."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters

    @record_function("whet::optimizer")
    def prepare(self, grad_scale: float) -> None:
        if grad_scale == 1.0:
            return
        found = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        tracked = [(grad, rows) for grad in found if (rows := rows_in_use(grad)) is not None]
        torch._foreach_mul_(found, grad_scale)  # pyright: ignore[reportPrivateImportUsage] one call per device, not per tensor
        for grad, rows in tracked:  # rows without a gradient stay zero
            rows.put_on(grad)


class ClipInOptimizer:
    """The optimizer scales the gradient as it reads it, unless a hook, or somebody whom `is_read` knows, reads it."""

    def __init__(self, optimizer: NativeAdamW, own_pass: ClipInOwnPass, is_read: Callable[[], bool]) -> None:
        self._optimizer, self._own_pass, self._is_read = optimizer, own_pass, is_read

    def prepare(self, grad_scale: float) -> None:
        watched = self._optimizer.has_step_hooks or self._is_read()
        self._optimizer.grad_scale = 1.0 if watched else grad_scale
        if watched:
            self._own_pass.prepare(grad_scale)


def choose_clipping(optimizer: Optimizer, parameters: Sequence[nn.Parameter], events: Events) -> Clipping:
    """Return how this optimizer clips."""
    own_pass = ClipInOwnPass(parameters)
    if not isinstance(optimizer, NativeAdamW):
        return own_pass
    return ClipInOptimizer(optimizer, own_pass, lambda: any(map(events.has_listener, EVENTS_OF_GRADIENTS)))


@dataclass(frozen=True, kw_only=True)
class OptimizerUpdate:
    """One step of the optimizer over complete gradients."""

    model: nn.Module
    parameters: Sequence[nn.Parameter]
    optimizer: Optimizer
    scheduler: Any
    clipping: Clipping
    untrained: UntrainedParameters
    send: Callable[[str], None]
    """Sends an event to the callbacks."""
    stepping: Callable[[], AbstractContextManager[None]] = nullcontext
    """Put around the optimizer's step: ranks that share the optimizer exchange its results there."""

    def gradient_norm(self) -> float:
        return gradient_norm([one.grad for one in self.parameters if one.grad is not None])

    def apply(self, grad_scale: float) -> None:
        self.clipping.prepare(grad_scale)
        self.send("on_pre_optimizer_step")
        self.untrained.warn()
        with self.stepping():
            self.optimizer.step()
        self.send("on_optimizer_step")

    def clear(self) -> None:
        self.model.zero_grad(set_to_none=True)
        self.optimizer.zero_grad(set_to_none=True)
        schedule.after_step(self.scheduler)


@dataclass(frozen=True)
class UpdateInBackward:
    """Most weights are updated during the backward pass; `rest` updates those whose gradients came another way."""

    hooks: InBackward
    rest: OptimizerUpdate

    def gradient_norm(self) -> float:
        norm, _ = self.hooks.finish()
        return norm

    def apply(self, grad_scale: float) -> None:
        self.rest.apply(grad_scale)

    def clear(self) -> None:
        self.rest.clear()


_AVERAGE = {"n": schema.count, "last": schema.count}


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
        schema.require_all(saved, _AVERAGE, "average")
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
