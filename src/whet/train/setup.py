"""Prepares a Trainer's model and objective."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.utils.generic import find_labels

from whet.config.methods import method_settings
from whet.data.padding import Padding
from whet.errors import ConfigError
from whet.kernels import allocator
from whet.log import logger
from whet.methods import fuse, order
from whet.methods.seam import Applied
from whet.models import attention
from whet.models.bad_batch import checked
from whet.models.proof import prove
from whet.models.view import ModelView
from whet.objectives.base import Collate, Objective
from whet.objectives.choose import choose
from whet.objectives.own_loss import OwnLoss
from whet.objectives.packed_head import PackedHead
from whet.objectives.span import PackedSpans, PaddedSpans
from whet.own_loop import nested
from whet.precision import formats, policy
from whet.train.checkpoint import weights
from whet.train.compat import collate, constructor, user_loss
from whet.train.compat.public import PublicTrainer
from whet.train.routing import require_whets_loss


def use_model(trainer: PublicTrainer, model: nn.Module) -> None:
    """Make this the Trainer's model: on its device, in float32, with whet's operators; choose the objective."""
    args = trainer.args
    nested.restore_marked(model)
    trainer.model = model = order.restore(model).to(weights.device_of(args.use_cpu))
    formats.require_floating(model)
    formats.raise_to_float32(model)
    trainer.precision = policy.build(args, trainer.device)
    trainer.collate = _collator(trainer)
    if args.attn_implementation in (None, attention.NAME):
        prove.ensure(model)
    if _smooths(trainer):
        require_whets_loss(model)
        trainer.objective = user_loss.smoothed(model, trainer.collate, args)
    else:
        trainer.objective = _objective(trainer)
    if trainer.device.type == "cpu":
        allocator.keep_freed_memory()
    _require_packed_for_budget(trainer)
    _require_spans_for_loss(trainer)
    optimized = isinstance(trainer.objective, user_loss.SmoothedLoss | user_loss.UnpaddedLoss | nested.NestedLoss)
    settings = method_settings(args, operators=None if optimized else "auto")
    _log_methods(trainer, order.apply(ModelView(model), settings))


def _objective(trainer: PublicTrainer) -> Objective:
    """Return how the model trains with its own loss, or whet's of the same values."""
    model, args, by_user = trainer.model, trainer.args, trainer.collator_given
    given = trainer.collate if by_user and not collate.pads_only(trainer.data_collator) else None
    default = trainer.collate if by_user else collate.default_collator(trainer.processing_class, model)
    objective = choose(
        model, given, default, _padding(trainer), attn=args.attn_implementation, span_loss=args.span_loss
    )
    return user_loss.unpadded(objective, args) if type(objective) is OwnLoss else objective


def _padding(trainer: PublicTrainer) -> Padding:
    """Return how a padded run of this Trainer would pad, and how much of that padding its loss counts."""
    return Padding(trainer.args.padding_in_loss, trainer.padded_length, constructor.pad_token_id(trainer))


def _collator(trainer: PublicTrainer) -> Collate:
    if not trainer.args.remove_unused_columns:
        return checked(trainer.data_collator, trainer.model)
    return collate.without_unread(trainer.data_collator, trainer.model, trainer.args.label_names or ())


def _require_packed_for_budget(trainer: PublicTrainer) -> None:
    """Refuse a token budget for batches that run padded."""
    if trainer.args.max_tokens_per_batch is None:
        return
    if isinstance(trainer.objective, nested.NestedLoss):
        raise ConfigError(
            what="max_tokens_per_batch does not go with a module of your own that holds its encoder",
            got=type(_base_model(trainer.model)).__name__,
            why="its loss may compare the rows of a batch with each other: splitting a batch would change it",
            fix="leave --max_tokens_per_batch out, and lower --per_device_train_batch_size instead",
        )
    if trainer.objective.packed_model is not None:
        return
    raise ConfigError(
        what="max_tokens_per_batch goes with packed batches",
        got=f"{type(_base_model(trainer.model)).__name__}, whose batches run padded",
        why="the size of a padded batch does not follow from its tokens",
        fix="leave --max_tokens_per_batch out, and lower --per_device_train_batch_size instead",
    )


def _require_spans_for_loss(trainer: PublicTrainer) -> None:
    """Refuse a span loss for a model, or a loss, that has nothing to do with spans."""
    if trainer.args.span_loss == "independent" or isinstance(trainer.objective, PackedSpans | PaddedSpans):
        return
    raise ConfigError(
        what=f"span_loss {trainer.args.span_loss} does not go with this training",
        got=type(_base_model(trainer.model)).__name__,
        why="whet computes it for question answering models without a data_collator or loss of your own",
        fix="leave --span_loss out",
    )


def _log_methods(trainer: PublicTrainer, done: list[Applied]) -> None:
    """Log whether batches run packed, and what each method did."""
    fused = next((one.text for one in done if one.method == fuse.CARD.name), "operators in plain torch")
    _log_batches(trainer, fused)
    for one in done:
        if one.method != fuse.CARD.name:
            logger.info("%s", one)


def _log_batches(trainer: PublicTrainer, fused: str) -> None:
    """Log whether batches run packed, and why not; `optimize` has logged what it did."""
    model = trainer.model
    name = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if isinstance(trainer.objective, PackedHead | PackedSpans):
        logger.info("batches run without padding (%s), %s", name, fused)
    elif type(trainer.objective) is PaddedSpans:
        user_loss.log_padded(model, user_loss.why_padded(model, trainer.args) or "its head is not known", trainer.args)


def _smooths(trainer: PublicTrainer) -> bool:
    """Return whether the labels are smoothed; raises ConfigError for a model that has none to smooth."""
    if not trainer.args.label_smoothing_factor:
        return False
    inside = _base_model(trainer.model)
    named = trainer.args.label_names
    named = find_labels(type(inside)) if named is None else named
    if "labels" not in named:
        raise ConfigError(
            what="label_smoothing_factor does not go with this model",
            got=type(inside).__name__,
            why=f"it smooths the column labels; this model learns from {', '.join(named) or 'none'}",
            fix="leave --label_smoothing_factor out",
        )
    if getattr(getattr(inside, "config", None), "problem_type", None) == "multi_label_classification":
        logger.warning("label_smoothing_factor has no effect: classification with several labels is not smoothed")
        return False
    return True


def _base_model(model: Any) -> nn.Module:
    """Return the model inside an adapter's wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
