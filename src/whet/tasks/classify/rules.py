"""The rules of text classification: what a run needs to make sense."""

from whet.config.arguments import TrainingArguments
from whet.config.rules.ranges import Rule, at_least
from whet.config.settings import broken
from whet.errors import Problem
from whet.jobs.rules import JOB_RULES, JOB_RUN_RULES, spans_are_of_answers, windows_move_on
from whet.tasks.classify.fields import ClassifyFields

METRICS = {
    "single_label_classification": ("accuracy", "f1_macro", "matthews_correlation"),
    "multi_label_classification": ("f1_micro", "f1_macro", "accuracy"),
    "regression": ("pearson", "spearmanr", "mse"),
}
"""Metrics of an evaluation, by what labels are."""
LOWER_IS_BETTER = ("mse", "loss")
_ALL = tuple(dict.fromkeys(name for names in METRICS.values() for name in names))


def metric_is_known(job: ClassifyFields) -> Problem | None:
    """Reported before the training, not at its first evaluation."""
    known = _known(job)
    if job.metric_name is None or job.metric_name in (*known, "loss"):
        return None
    return Problem(
        what="metric_name names no metric",
        got=job.metric_name,
        why=f"an evaluation computes {', '.join(known)}",
        fix=f"use one of these in --metric_name, such as {known[0]}",
    )


def _known(job: ClassifyFields) -> tuple[str, ...]:
    """Return the metrics of this run's evaluations, or those of all if only the data says what labels are."""
    kind = job.problem_type or ("regression" if job.do_regression else None)
    return METRICS[kind] if kind else _ALL


def labels_are_one_thing(job: ClassifyFields) -> Problem | None:
    """do_regression and problem_type answer the same question."""
    if job.problem_type is None or job.do_regression is None:
        return None
    if job.do_regression == (job.problem_type == "regression"):
        return None
    return Problem(
        what="do_regression and problem_type contradict each other",
        got=f"do_regression={job.do_regression}, problem_type={job.problem_type}",
        why="both say what the labels are",
        fix="keep one of --do_regression and --problem_type",
    )


def delimiter_is_a_character(job: ClassifyFields) -> Problem | None:
    """The csv module takes one character."""
    if job.csv_delimiter is None or len(job.csv_delimiter) == 1:
        return None
    return Problem(
        what="csv_delimiter is not one character",
        got=job.csv_delimiter,
        why="one character stands between two columns",
        fix="use one character, such as --csv_delimiter ';' (a tab: --csv_delimiter $'\\t')",
    )


def threshold_is_a_probability(job: ClassifyFields) -> Problem | None:
    """A probability is compared with it."""
    if 0 < job.threshold < 1:
        return None
    return Problem(
        what="threshold is not a probability",
        got=job.threshold,
        why="a label is predicted if its probability reaches the threshold",
        fix="use a --threshold between 0 and 1, such as 0.5",
    )


def best_metric_is_known(job: ClassifyFields, args: TrainingArguments) -> Problem | None:
    """Reported before the training, not at its first evaluation; one from metric_name is checked there."""
    wanted, known = args.metric_for_best_model, _known(job)
    if wanted is None or wanted == job.metric_name or wanted.removeprefix("eval_") in (*known, "loss"):
        return None
    return Problem(
        what="metric_for_best_model names no metric",
        got=wanted,
        why=f"an evaluation computes {', '.join(known)} and loss",
        fix=f"use one of these in --metric_for_best_model, such as {known[0]}",
    )


def check_run(job: ClassifyFields, args: TrainingArguments) -> list[Problem]:
    """Return what is wrong between the options of the task and those of the training."""
    return broken(RUN_RULES, job, args)


CLASSIFY_RULES: tuple[Rule, ...] = (
    *JOB_RULES,
    metric_is_known,
    labels_are_one_thing,
    delimiter_is_a_character,
    threshold_is_a_probability,
    at_least("max_seq_length", 1, "a row holds tokens"),
    at_least("doc_stride", 0, "windows cannot share fewer than no tokens"),
    windows_move_on,
    at_least("shuffle_seed", 0, "numpy's generators take no negative seed"),
)
RUN_RULES: tuple[Rule, ...] = (*JOB_RUN_RULES, best_metric_is_known, spans_are_of_answers)
