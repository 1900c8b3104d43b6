"""Checks that the arguments of the Trainer fit together."""

from __future__ import annotations

from typing import Any

from whet.config import environment
from whet.errors import ConfigError
from whet.train.compat.public import PublicTrainer


def pad_token_id(trainer: PublicTrainer) -> int:
    """Return the id of padding tokens: the tokenizer's, else the model's, else 0."""
    config = getattr(trainer.model, "config", None)
    found = [getattr(one, "pad_token_id", None) for one in (trainer.processing_class, config)]
    return next((one for one in found if isinstance(one, int)), 0)


def require_consistent(trainer: PublicTrainer) -> None:
    """Raise ConfigError for an environment, or arguments of the Trainer, that cannot be honoured."""
    environment.require_known()
    require_evaluation_set(trainer)


def require_evaluation_set(trainer: PublicTrainer) -> None:
    """Raise ConfigError if a training would evaluate, and there is nothing to evaluate on."""
    if trainer.args.eval_strategy != "no" and trainer.eval_dataset is None and trainer.evaluation is None:
        raise ConfigError(
            what="there is no data set to evaluate on",
            got=f"eval_strategy={trainer.args.eval_strategy}",
            why="evaluation was asked for",
            fix="pass eval_dataset to Trainer, or use --eval_strategy no",
        )


def evaluation_set(trainer: PublicTrainer, given: Any) -> Any:
    """Return the data set to evaluate on: the given one, or the Trainer's."""
    dataset = trainer.eval_dataset if given is None else given
    if dataset is None:
        raise ConfigError(
            what="there is no data set to evaluate on",
            why="it was asked for",
            fix="pass eval_dataset to Trainer, or use --eval_strategy no",
        )
    return dataset
