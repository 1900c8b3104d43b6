"""Models of which a training that failed left each rank its share alone (ZeRO stages 2 and 3, local steps)."""

from __future__ import annotations

from weakref import WeakSet

from torch import nn

from whet.errors import ConfigError

_left: WeakSet[nn.Module] = WeakSet()


def leave(model: nn.Module) -> None:
    """Note that this model stays without the rows of the other ranks, which may be gone."""
    _left.add(model)


def require_whole(model: nn.Module) -> None:
    """Raise ConfigError if a training has left the model with the weights of this rank alone."""
    if model in _left:
        raise ConfigError(
            what="the model has only this rank's share of the weights",
            got="a model whose training failed",
            why="with zero_stage 2 and 3 or local_sgd_steps the ranks bring the weights together at the end of a "
            "training, and an error of one rank ends it before that",
            fix="build a new model and trainer, and call train(resume_from_checkpoint=True) or load the newest "
            "checkpoint of the run; zero_stage 1 leaves each rank the complete weights",
        )


def require_averaged(weights_differ: bool) -> None:
    """Raise ConfigError if this rank has stepped alone since the ranks averaged their weights."""
    if weights_differ:
        raise ConfigError(
            what="the model cannot be saved here",
            got="weights of this rank alone",
            why="with local_sgd_steps the ranks have different weights until they are averaged",
            fix="set control.should_save in the callback, which averages first, or save after train()",
        )
