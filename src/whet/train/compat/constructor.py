"""Checks that the arguments of the Trainer fit together."""

from __future__ import annotations

from typing import Any

from torch import nn

from whet.config import environment
from whet.errors import ConfigError
from whet.train.compat import overrides
from whet.train.compat.public import PublicTrainer


def processing_class(given: Any, tokenizer: Any) -> Any:
    """Return the tokenizer or processor: `tokenizer` is the older name of the argument."""
    if given is not None and tokenizer is not None and given is not tokenizer:
        raise ConfigError(
            what="processing_class and tokenizer contradict each other",
            why="tokenizer is the older name of processing_class",
            fix="pass one of them",
        )
    return tokenizer if given is None else given


def pad_token_id(trainer: PublicTrainer) -> int:
    """Return the id of padding tokens: the tokenizer's, else the model's, else 0."""
    config = getattr(trainer.model, "config", None)
    found = [getattr(one, "pad_token_id", None) for one in (trainer.processing_class, config)]
    return next((one for one in found if isinstance(one, int)), 0)


def require_consistent(trainer: PublicTrainer, model: Any) -> None:
    """Raise ConfigError for arguments of the Trainer that contradict each other."""
    environment.require_known()
    _require_one_model(trainer, model)
    optimizers = any(one is not None for one in trainer.given_optimizers)
    if trainer.model_init is not None and optimizers:
        raise ConfigError(
            what="optimizers and model_init exclude each other",
            why="each training starts from a new model, and a given optimizer holds the weights of another one",
            fix="override create_optimizer, or pass optimizer_cls_and_kwargs",
        )
    if trainer.optimizer_cls_and_kwargs is not None and trainer.given_optimizers[0] is not None:
        raise ConfigError(
            what="optimizers and optimizer_cls_and_kwargs exclude each other",
            why="both name the optimizer",
            fix="pass one of them",
        )
    if not callable(trainer.data_collator):
        raise ConfigError(
            what="data_collator is not a function",
            got=type(trainer.data_collator).__name__,
            why="it is called with a list of rows and returns a batch",
            fix="pass a function, or an object with __call__",
        )
    require_evaluation_set(trainer)


def _require_one_model(trainer: PublicTrainer, model: Any) -> None:
    if (model is None) == (trainer.model_init is None):
        raise ConfigError(
            what="Trainer needs a model" if model is None else "model and model_init exclude each other",
            why="it trains the model that it is given, or one that model_init returns",
            fix="pass model or model_init, one of them",
        )
    if model is not None and not isinstance(model, nn.Module):
        raise ConfigError(
            what="model is not a torch module",
            got=model if isinstance(model, str) else type(model).__name__,
            why="Trainer trains a torch.nn.Module",
            fix="load it first: AutoModelForSequenceClassification.from_pretrained(name)",
        )


def require_evaluation_set(trainer: PublicTrainer) -> None:
    """Raise ConfigError if a training would evaluate, and there is nothing to evaluate on."""
    by_user = trainer.evaluation is not None or overrides.changed(trainer, "evaluate", "get_eval_dataloader")
    if trainer.args.eval_strategy != "no" and trainer.eval_dataset is None and not by_user:
        raise ConfigError(
            what="there is no data set to evaluate on",
            got=f"eval_strategy={trainer.args.eval_strategy}",
            why="evaluation was asked for",
            fix="pass eval_dataset to Trainer, or use --eval_strategy no",
        )
