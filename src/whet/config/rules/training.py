"""Rules about the length of a run, its evaluations, checkpoints, guards and logs."""

from __future__ import annotations

import math
import os
import tempfile
from pathlib import Path

from whet.config.fields import UPLOAD, TrainingFields
from whet.config.rules.ranges import Rule, at_least, broken_if, is_given, only_with, seed, whole_or_share, within
from whet.config.rules.schedule import BY_METRIC, SCHEDULE_RULES
from whet.config.settings import options_of
from whet.config.upload import before_upload, upload_command
from whet.errors import ConfigError, OutputError, Problem

LOCK_NAME = ".whet.lock"
"""The lock file of a run in output_dir. It does not count as content, because a killed run leaves it behind."""
LAUNCH_NAME = ".whet.launch"
"""Which launcher has started the run in output_dir, if it may start it again, and whether that run has ended."""
LOG_NAME, OLDER_LOG_NAME = "run.log", "run.log.1"
"""The messages of the runs in output_dir, and older ones. A run that fails before its first save leaves them behind."""
RECORD_NAME = "run.jsonl"
"""The record of the runs in output_dir, for `whet watch`. A run that fails before its first save leaves it behind."""
REPORT_NAME = "report.html"
"""The page about the run in output_dir. One that fails before its first save leaves it behind."""
OWNER_NAME = "results_of.json"
"""Of which model the results in output_dir are. A run that fails before its first results leaves it behind."""
LAUNCH_LOGS_NAME = "launch-logs"
"""The folder for the output of the ranks that --auto starts, in output_dir; of `whet launch`, in the current folder."""
NOT_COUNTED = frozenset({
    LOCK_NAME, LAUNCH_NAME, LOG_NAME, OLDER_LOG_NAME, RECORD_NAME, REPORT_NAME, OWNER_NAME, LAUNCH_LOGS_NAME
})  # fmt: skip
"""Files that do not count as content of an output_dir."""


def best_model_is_evaluated(args: TrainingFields) -> Problem | None:
    """Without evaluations there is no best model."""
    if args.eval_strategy != "no" or not (args.load_best_model_at_end or args.save_strategy == "best"):
        return None
    return Problem(
        what="the best model is asked for, but nothing is evaluated",
        got=f"eval_strategy={args.eval_strategy}",
        why="the best model is the one with the best evaluation during training",
        fix="use --eval_strategy epoch, or --eval_strategy steps"
        if args.save_strategy == "best"
        else "use --eval_strategy epoch --save_strategy epoch, or steps for both",
    )


def best_model_is_saved(args: TrainingFields) -> Problem | None:
    """The best model can be loaded only if it was saved when it was evaluated."""
    if not args.load_best_model_at_end or args.eval_strategy == "no":
        return None
    if args.save_strategy in ("best", args.eval_strategy):
        return None
    return Problem(
        what="load_best_model_at_end needs a checkpoint at every evaluation",
        got=f"eval_strategy={args.eval_strategy}, save_strategy={args.save_strategy}",
        why="the best model can be loaded again only if it was saved when it was evaluated",
        fix=f"use --save_strategy {args.eval_strategy}, or --save_strategy best",
    )


def saves_are_evaluated(args: TrainingFields) -> Problem | None:
    """With step intervals, each checkpoint must fall on an evaluation."""
    both_by_steps = args.eval_strategy == args.save_strategy == "steps"
    if not (args.load_best_model_at_end and both_by_steps and args.eval_steps and args.save_steps > 0):
        return None
    if (args.eval_steps < 1) == (args.save_steps < 1) and _is_multiple(args.save_steps, args.eval_steps):
        return None
    return Problem(
        what="save_steps is not a multiple of eval_steps",
        got=f"save_steps={args.save_steps}, eval_steps={args.eval_steps}",
        why="load_best_model_at_end compares checkpoints, so each must fall on an evaluation",
        fix=f"use --save_steps {args.eval_steps:g} or a multiple of it",
    )


def _is_multiple(whole: float, part: float) -> bool:
    times = round(whole / part)
    return times >= 1 and math.isclose(times * part, whole)  # shares of the run, such as 0.3 and 0.1, are not exact


output_dir_has_a_name = is_given(
    "output_dir_has_a_name",
    "output_dir",
    what="output_dir is empty",
    why="checkpoints and results need their own folder",
    fix="name one: --output_dir out",
)


def check_output_dir(path: str | Path, overwrite: bool) -> Problem | None:
    """Return why a run may not write to this folder: it is not empty, or it cannot be written.

    Nothing is created. Pass `overwrite` as true for a run that resumes, too.
    """
    folder = Path(path)
    if problem := _unwritable(folder):
        return problem
    if overwrite or not os.path.isdir(folder) or not {*os.listdir(folder)} - NOT_COUNTED:  # noqa: PTH112, PTH208
        return None
    return Problem(
        what="output_dir is not empty",
        got=str(folder),
        why="a run would mix its files with those of another",
        fix="use another --output_dir, add --overwrite_output_dir (not with --max_restarts), or resume with "
        "--resume_from_checkpoint auto",
    )


def require_output_dir(path: str | Path, overwrite: bool) -> Path:
    """Create the folder, test it with a file and return it; OutputError on failure, ConfigError if it is not empty."""
    folder = Path(path)
    problem = check_output_dir(folder, overwrite)
    if problem is not None:
        raise (OutputError if _unwritable(folder) else ConfigError).of([problem])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, ValueError) as error:
        raise OutputError.of([_no_output(folder, str(error))]) from error


def _unwritable(folder: Path) -> Problem | None:
    # Path.is_dir raises for a name that no disk can store; os.path returns False.
    nearest = next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place))
    if not nearest.is_dir():
        return _no_output(folder, f"{nearest} is not a folder")
    if not os.access(nearest, os.W_OK | os.X_OK | (os.R_OK if nearest == folder else 0)):
        return _no_output(folder, f"this user may not write in {nearest}")
    return None


def _no_output(folder: Path, why: str) -> Problem:
    fix = "name a folder on a disk that you may write to in --output_dir"
    return Problem(what="output_dir cannot be written", got=str(folder), why=why, fix=fix)


def some_model_to_upload(args: TrainingFields) -> Problem | None:
    """A run uploads what it has trained."""
    if not args.push_to_hub or args.do_train:
        return None
    command = before_upload(args.output_dir) + upload_command(args.output_dir, args.hub_model_id, args.hub_revision)
    return Problem(
        what="push_to_hub is on, but nothing is trained",
        got=args.push_to_hub,
        why="the trained model is what it uploads",
        fix=f"add --do_train, or upload the model of the folder: {command}",
    )


CURVE_FIELDS = (
    "seed", "train_sampling_strategy", "dataloader_drop_last", "learning_rate", "lr_scheduler_type",
    "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "optim", "adam_beta1", "adam_beta2", "adam_epsilon",
    "weight_decay", "max_grad_norm", "tf32", "attn_implementation", "optim_args", "padding_in_loss",
    "label_smoothing_factor", "layerwise_lr_decay", "reinit_layers", "weight_averaging_start", "span_loss",
    "freeze_layers", "max_loss_spike",
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


_WITH_NAMES = ("wandb", "mlflow", "trackio")


def run_name_is_read(args: TrainingFields) -> Problem | None:
    """TensorBoard has no names of runs, only folders."""
    if args.run_name is None or set(_WITH_NAMES) & set(args.report_to):
        return None
    return Problem(
        what="run_name is given, but no tracker reads it",
        got=f"run_name={args.run_name}, report_to={','.join(args.report_to) or 'none'}",
        why=f"of the trackers, {', '.join(_WITH_NAMES)} give their runs a name; TensorBoard has folders",
        fix="add one of them to --report_to, or leave --run_name out; --logging_dir is TensorBoard's folder",
    )


_READ_BY = {
    "eval_steps": ("eval_strategy", "steps"),
    "save_steps": ("save_strategy", "steps"),
    "save_interval_s": ("save_strategy", "time"),
    "logging_steps": ("logging_strategy", "steps"),
}
"""Field -> the only strategy that reads it."""


def unread(args: TrainingFields) -> list[str]:
    """Return a note for each field that was changed from its default and has no effect in this run."""
    notes = []
    for name, (strategy, needed) in _READ_BY.items():
        is_now = getattr(args, strategy)
        if is_now != needed and _is_set(args, name) and not _also_evaluates(args, name):
            shown = getattr(args, name)
            notes.append(f"{name}={shown} has no effect with {strategy} {is_now}: set {strategy} {needed} to use it")
    if args.save_strategy == "no" and _is_set(args, "save_total_limit"):
        notes.append(
            f"save_total_limit={args.save_total_limit} counts only checkpoints that a signal or a callback asks for: "
            "save_strategy is no"
        )
    return [*notes, *_about_order(args), *_about_schedule(args)]


def _about_order(args: TrainingFields) -> list[str]:
    """Return notes for settings without effect on the order of rows, by transformers' rules."""
    notes, strategy = [], args.train_sampling_strategy
    by_length = ("group_by_length", "batch_rebalance")
    if strategy not in by_length and _is_set(args, "length_column_name"):
        notes.append(
            f"length_column_name={args.length_column_name} has no effect: it is for train_sampling_strategy "
            f"{' and '.join(by_length)}, and train_sampling_strategy is {strategy}"
        )
    if strategy == "batch_rebalance" and args.data_seed is None and _is_set(args, "seed"):
        notes.append(
            f"seed={args.seed} has no effect on the order of rows: batch_rebalance shuffles with seed 42, as in "
            "transformers; data_seed changes it"
        )
    return notes


def _about_schedule(args: TrainingFields) -> list[str]:
    """Return notes for a schedule that follows a metric: its mode is min by default."""
    kwargs = args.lr_scheduler_kwargs or {}
    if args.lr_scheduler_type not in BY_METRIC or "mode" in kwargs or not args.greater_is_better:
        return []
    return [
        f"{args.lr_scheduler_type} treats a smaller {args.metric_for_best_model} as better, as in transformers; "
        'to change that, use lr_scheduler_kwargs {"mode": "max"}'
    ]


def _is_set(args: TrainingFields, name: str) -> bool:
    return getattr(args, name) != options_of(type(args))[name].default


def _also_evaluates(args: TrainingFields, name: str) -> bool:
    """Evaluations run every logging_steps if eval_steps is not given."""
    return name == "logging_steps" and args.eval_strategy == "steps" and args.eval_steps == args.logging_steps


TRAINING_RULES: tuple[Rule, ...] = (
    output_dir_has_a_name,
    at_least("per_device_train_batch_size", 1, "a forward pass needs at least one row"),
    at_least("per_device_eval_batch_size", 1, "a forward pass needs at least one row"),
    at_least("gradient_accumulation_steps", 1, "an optimizer step needs a batch"),
    at_least("ddp_timeout", 1, "ranks need time to answer each other"),
    at_least("ddp_bucket_cap_mb", 1, "a bucket holds something"),
    at_least("learning_rate", 0, "a negative learning rate would increase the loss"),
    at_least("weight_decay", 0, "a negative decay would grow the weights"),
    within("adam_beta1", "[0, 1)", "it is the share of a running mean that each step keeps", 0.9),
    within("adam_beta2", "[0, 1)", "it is the share of a running mean that each step keeps", 0.9),
    at_least("adam_epsilon", 0, "it is added to a root to avoid a division by zero"),
    at_least("eval_delay", 0, "evaluations cannot begin before the training does"),
    within("label_smoothing_factor", "[0, 1]", "it is the share of each label that goes to all classes", 0.1),
    at_least("max_grad_norm", 0, "a norm is never negative; 0 disables clipping"),
    broken_if(
        "max_steps_off_or_positive",
        ("max_steps",),
        lambda args: args.max_steps != -1 and args.max_steps < 1,
        what="max_steps asks for no training",
        why="it is -1, which leaves the length to num_train_epochs, or at least one optimizer step",
        fix="use --max_steps 1 or more, or leave it out",
    ),
    broken_if(
        "some_epochs",
        ("num_train_epochs",),
        lambda args: args.max_steps == -1 and args.num_train_epochs <= 0,
        what="num_train_epochs is not positive",
        why="without --max_steps it is the length of the run",
        fix="use a --num_train_epochs above 0, such as 0.5 or 3",
    ),
    at_least("warmup_steps", 0, "a warm-up cannot end before the first step"),
    broken_if(
        "warmup_steps_whole_or_share",
        ("warmup_steps",),
        lambda args: args.warmup_steps >= 1 and args.warmup_steps != int(args.warmup_steps),
        what="warmup_steps is neither steps nor a share",
        why="from 1 on it counts optimizer steps, which are whole numbers; below 1 it is a share of the run",
        fix="use --warmup_steps 500, or --warmup_steps 0.1 for a tenth of the run",
    ),
    within("warmup_ratio", "[0, 1]", "it is the share of the run over which the learning rate rises", 0.1),
    broken_if(
        "one_warmup",
        ("warmup_steps", "warmup_ratio"),
        lambda args: args.warmup_steps and args.warmup_ratio,
        what="the warm-up is given twice",
        why="both set how long the learning rate rises, and only one can apply",
        fix="keep one of --warmup_steps and --warmup_ratio",
    ),
    *SCHEDULE_RULES,
    seed("seed"),
    seed("data_seed"),
    whole_or_share("logging_steps", "logging_strategy"),
    whole_or_share("eval_steps", "eval_strategy"),
    whole_or_share("save_steps", "save_strategy"),
    at_least("save_total_limit", 1, "a run that keeps no checkpoint cannot be resumed; --save_strategy no saves none"),
    best_model_is_evaluated,
    best_model_is_saved,
    saves_are_evaluated,
    broken_if(
        "best_needs_a_metric",
        ("save_strategy", "metric_for_best_model"),
        lambda args: args.save_strategy == "best" and not args.metric_for_best_model,
        what="save_strategy best has no metric",
        why="it needs the number of the evaluation that defines the best model",
        fix="name it: --metric_for_best_model loss, for example, or f1 in whet qa",
    ),
    broken_if(
        "trackers_or_none",
        ("report_to",),
        lambda args: {"none", "all"} & set(args.report_to),
        what="report_to mixes none or all with names",
        why="none means no tracker, and all means every installed one; neither can be combined with a name",
        fix="use --report_to none, --report_to all, or only names",
    ),
    broken_if(
        "logging_dir_is_read",
        ("logging_dir",),
        lambda args: args.logging_dir is not None and "tensorboard" not in args.report_to,
        what="logging_dir is given, but nothing is written there",
        why="it is the folder of TensorBoard's files, and TensorBoard is not among --report_to",
        fix="add --report_to tensorboard, or leave --logging_dir out",
    ),
    at_least("max_nonfinite_steps", 1, "the run ends when as many steps in a row were not finite"),
    broken_if(
        "spike_is_above_the_median",
        ("max_loss_spike",),
        lambda args: args.max_loss_spike is not None and args.max_loss_spike <= 1,
        what="max_loss_spike is not above 1",
        why="it is the largest loss of a step as a multiple of the usual one: at 1 every other step would be skipped",
        fix="use --max_loss_spike 5, for example, or leave it out",
    ),
    at_least("memory_limit_gb", 0, "it is an amount of memory; 0 switches the guard off"),
)

SAVING_RULES: tuple[Rule, ...] = (
    broken_if(
        "interval_is_a_time",
        ("save_interval_s",),
        lambda args: (
            args.save_strategy == "time" and (args.save_interval_s <= 0 or not math.isfinite(args.save_interval_s))
        ),
        what="save_interval_s is not a time between checkpoints",
        why="save_strategy time writes a checkpoint after each interval of so many seconds",
        fix="use --save_interval_s 600 for one every ten minutes, or --save_strategy no",
    ),
    allowed_changes_are_known,
    broken_if(
        "some_saves_to_delay",
        ("save_strategy",),
        lambda args: args.save_async and args.save_strategy == "no",
        what="save_async is on, but nothing is saved",
        why="it says how checkpoints are written, and there will be none",
        fix="leave --save_async out, or choose another --save_strategy",
    ),
    only_with(
        "settings_of_an_upload",
        "push_to_hub",
        UPLOAD[1:],
        is_on=lambda args: args.push_to_hub,
        why="nothing is uploaded",
        fix="add --push_to_hub, or leave them out",
    ),
    some_model_to_upload,
)

LOGGING_RULES: tuple[Rule, ...] = (run_name_is_read,)
