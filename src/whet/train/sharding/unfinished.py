"""Models of which a training that failed left each rank its share alone (ZeRO stages 2 and 3)."""

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
            why="with zero_stage 2 and 3 the ranks bring the weights together at the end of a "
            "training, and an error of one rank ends it before that",
            fix="build a new model and trainer, and call train(resume_from_checkpoint=True) or load the newest "
            "checkpoint of the run; zero_stage 1 leaves each rank the complete weights",
        )
