"""Rules about checkpoints: when they are written, and what may differ when a run resumes from one."""

from __future__ import annotations

import math

from whet.config.fields import TrainingFields
from whet.config.rules.ranges import Rule
from whet.errors import Problem

CURVE_FIELDS = (
    "seed", "train_sampling_strategy", "dataloader_drop_last", "learning_rate", "lr_scheduler_type",
    "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "optim", "adam_beta1", "adam_beta2", "adam_epsilon",
    "weight_decay", "max_grad_norm", "tf32", "attn_implementation", "optim_args", "padding_in_loss",
    "label_smoothing_factor", "layerwise_lr_decay", "reinit_layers", "weight_averaging_start", "span_loss",
    "freeze_layers",
)  # fmt: skip
"""Settings that change the loss curve; its length may change."""

METRIC_FIELDS = ("metric_for_best_model", "greater_is_better")
"""Settings that define the best evaluation; compared if both runs have a metric for it."""

EVALUATION_FIELDS = ("eval_strategy", "eval_steps", "eval_delay", *METRIC_FIELDS)
"""Settings that change the curve if the learning rate follows the evaluations."""

CURVE_FACTS = (
    "precision", "methods", "data_seed", "rows_per_step", "per_device_train_batch_size", "model", "data",
    "evaluation_data", "order", "dtype", "loss",
)  # fmt: skip
"""Other facts that change the curve and do not follow from a single setting."""


def interval_is_a_time(args: TrainingFields) -> Problem | None:
    """An interval of 0 seconds would leave no time to train, and one of NaN would never end."""
    if args.save_strategy != "time" or (args.save_interval_s > 0 and math.isfinite(args.save_interval_s)):
        return None
    return Problem(
        what="save_interval_s is not a time between checkpoints",
        got=args.save_interval_s,
        why="save_strategy time writes a checkpoint after each interval of so many seconds",
        fix="use --save_interval_s 600 for one every ten minutes, or --save_strategy no",
    )


def allowed_changes_are_known(args: TrainingFields) -> Problem | None:
    """A name that is never compared cannot be allowed to change."""
    known = (*CURVE_FIELDS, *CURVE_FACTS, *EVALUATION_FIELDS)
    strange = [name for name in args.resume_allow_changes if name not in known]
    if not strange:
        return None
    return Problem(
        what="resume_allow_changes names what is not compared",
        got=strange,
        why=f"a run that resumes is compared in {', '.join(known)}",
        fix="use some of these in --resume_allow_changes; anything else may change without it",
    )


def some_saves_to_delay(args: TrainingFields) -> Problem | None:
    """Without checkpoints there is nothing to write in the background."""
    if not args.save_async or args.save_strategy != "no":
        return None
    return Problem(
        what="save_async is on, but nothing is saved",
        got=f"save_strategy={args.save_strategy}",
        why="it says how checkpoints are written, and there will be none",
        fix="leave --save_async out, or choose another --save_strategy",
    )


SAVING_RULES: tuple[Rule, ...] = (interval_is_a_time, allowed_changes_are_known, some_saves_to_delay)
