"""What becomes of the weights when ranks that stepped alone meet: their mean, or a step towards it with a momentum."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from whet.config.ranks import Place
from whet.dist.averages import averaged
from whet.dist.group import Group
from whet.train.resume import schema
from whet.train.state import State, Stateful

if TYPE_CHECKING:
    from whet.config.arguments import TrainingArguments


def n_copies(args: TrainingArguments, place: Place) -> int:
    """Return how many copies of the trained weights an outer step holds on each rank: 0 if there is no such step."""
    if place.n_ranks == 1 or not args.local_sgd_steps or is_mean(args):
        return 0
    return 2 if args.outer_momentum else 1


def is_mean(args: TrainingArguments) -> bool:
    """Return whether ranks that meet take the plain mean of their weights."""
    return (args.outer_learning_rate, args.outer_momentum) == (1.0, 0.0)


class Meeting(Protocol):
    """Gives all ranks the same weights."""

    def remember(self) -> None:
        """Note the weights, which are those of all ranks now."""
        ...

    def meet(self) -> None:
        """Replace the weights of each rank by common ones. All ranks call it."""
        ...

    def parts(self) -> Mapping[str, Stateful]:
        """Return what a checkpoint holds of it."""
        ...


class Mean:
    """The mean of the weights (local SGD)."""

    def __init__(self, group: Group, weights: Sequence[nn.Parameter]) -> None:
        self._group, self._weights = group, weights

    def remember(self) -> None:
        pass

    @torch.no_grad()
    def meet(self) -> None:
        for weight, mean in zip(self._weights, averaged(self._group, self._weights), strict=True):
            weight.copy_(mean)

    def parts(self) -> Mapping[str, Stateful]:
        return {}


class OuterStep:
    """A step of SGD with Nesterov's momentum from the last common weights to those of the ranks.

    Its gradient is the last common weights minus the mean of the ranks' weights: Douillard et al. 2023 (DiLoCo),
    arXiv:2311.08105, algorithm 1. A rate of 1 without momentum leads to the mean. A copy of the weights is kept, and
    the momentum; the sum over the ranks and the momentum are float32.
    """

    def __init__(
        self, group: Group, weights: Mapping[str, nn.Parameter], *, learning_rate: float, momentum: float
    ) -> None:
        self._group, self._weights, self._learning_rate = group, weights, learning_rate
        self._momentum = momentum
        self._common = [weight.detach().clone() for weight in weights.values()]
        self._buffers = {name: torch.zeros_like(one, dtype=torch.float32) for name, one in weights.items()}
        if not momentum:
            self._buffers = {}

    @torch.no_grad()
    def remember(self) -> None:
        for kept, weight in zip(self._common, self._weights.values(), strict=True):
            kept.copy_(weight)

    @torch.no_grad()
    def meet(self) -> None:
        for (name, weight), kept, gradient in zip(
            self._weights.items(), self._common, averaged(self._group, self._gradients()), strict=True
        ):
            step = gradient
            if (buffer := self._buffers.get(name)) is not None:
                buffer.mul_(self._momentum).add_(gradient)
                step = gradient.add_(buffer, alpha=self._momentum)
            weight.copy_(torch.sub(kept.float(), step, alpha=self._learning_rate))

    def _gradients(self) -> Iterator[Tensor]:
        """Yield this rank's share of the outer gradient of each weight, float32."""
        for kept, weight in zip(self._common, self._weights.values(), strict=True):
            yield kept.float() - weight.detach().float()

    def parts(self) -> Mapping[str, Stateful]:
        return {"outer": self}

    def state(self) -> State:
        """Return the momentum by names of weights. The common weights are the checkpoint's model."""
        return {"momentum": dict(self._buffers)}

    @torch.no_grad()
    def load_state(self, saved: State) -> None:
        """Take over the momentum; without one, or before there was one, it starts from zero."""
        schema.require_all(saved, {"momentum": schema.json_object}, "outer")
        found: Mapping[str, Any] = saved["momentum"]
        if not found or not self._buffers:
            return
        if found.keys() != self._buffers.keys():
            raise ValueError("the momentum of the outer step is not of this model's weights")
        for name, buffer in self._buffers.items():
            value = found[name]
            if not isinstance(value, Tensor) or value.shape != buffer.shape or value.dtype != buffer.dtype:
                raise ValueError(f"the momentum of the outer step has another {name}")
            if not bool(value.isfinite().all()):
                raise ValueError(f"the momentum of the outer step of {name} is not finite")
            buffer.copy_(value)
