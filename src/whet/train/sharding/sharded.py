"""Weights and gradients that the ranks share, as the optimizer and the step see them (ZeRO stages 2 and 3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from whet.dist.group import Group
from whet.dist.sharded_model import ShardedModel
from whet.dist.shares import Rows, deal
from whet.errors import ConfigError


class ShardedWeights:
    """One rank's rows of a model's parameters, and the sum of their gradients.

    `trained` are the optimizer's parameters, in the order of its groups.
    """

    def __init__(self, group: Group, sharded: ShardedModel, trained: Sequence[nn.Parameter]) -> None:
        self._group, self._sharded = group, sharded
        own = {id(one): _share(sharded, one) for one in sharded.parameters}
        self.shapes: Sequence[tuple[int, ...]] = [sharded.shape_of(one) for one in trained]
        self.rows: Sequence[Sequence[Rows]] = deal(self.shapes, group.n_ranks, 1)
        self.kept: Sequence[nn.Parameter | None] = [own[id(one)] for one in trained]
        self._pairs = [(one, share) for one in sharded.parameters if (share := own[id(one)]) is not None]
        self.parameters = [share for _, share in self._pairs]
        """This rank's rows of all parameters."""
        self._watched = False

    # ---- the optimizer ----

    def take_gradients(self) -> None:
        for parameter, share in self._pairs:
            share.data = self._sharded.share_of(parameter)  # torch may have moved it

    def give(self) -> None:
        """Do nothing: the other ranks get the rows when they need them."""

    # ---- gradients ----

    def compute(self, work: Callable[[], Any]) -> Any:
        return self._sharded.compute(work)

    def watch(self, loss: Tensor) -> Tensor:
        self._watched = True
        return loss

    def finish(self, others: Sequence[nn.Parameter] = ()) -> bool:
        """Show the gradients of this rank's rows; return whether a loss was watched."""
        watched, self._watched = self._watched, False
        if any(self._sharded.has_hooks(one) for one in self._sharded.parameters):
            raise _unseen("a weight has hooks on its gradient", "register_hook of a parameter")
        for parameter, share in self._pairs:
            if share.requires_grad != self._sharded.is_trained(parameter):
                raise _unseen("weights were frozen or unfrozen", "a change of requires_grad during the training")
            gradient = self._sharded.gradient_of(parameter)
            share.grad = gradient if gradient is None or watched else gradient.mul_(1 / self._group.n_ranks)
        return watched


def _share(sharded: ShardedModel, parameter: nn.Parameter) -> nn.Parameter | None:
    own = sharded.share_of(parameter)
    return nn.Parameter(own, requires_grad=parameter.requires_grad) if own.numel() else None


def _unseen(what: str, got: str) -> ConfigError:
    return ConfigError(
        what=f"{what} while ranks share the weights",
        got=got,
        why="torch's fully_shard puts tensors of its own in the place of parameters when the training begins",
        fix="use --zero_stage 1, which leaves parameters as they are, without --fsdp and --deepspeed; or freeze "
        "weights before train(), and change gradients in the loss",
    )
