"""The rules of token classification: what a run needs to make sense."""

from whet.config.arguments import TrainingArguments
from whet.config.rules.ranges import Rule, at_least
from whet.config.settings import broken
from whet.errors import Problem
from whet.jobs.rules import JOB_RULES, JOB_RUN_RULES, spans_are_of_answers, windows_move_on
from whet.tasks.tag.fields import TagFields

METRICS = ("accuracy", "f1", "precision", "recall", "f1_macro", "loss")


def best_metric_is_known(job: TagFields, args: TrainingArguments) -> Problem | None:
    """Reported before the training, not at its first evaluation."""
    wanted = args.metric_for_best_model
    if wanted is None or wanted.removeprefix("eval_") in METRICS:
        return None
    return Problem(
        what="metric_for_best_model names no metric",
        got=wanted,
        why=f"an evaluation computes {', '.join(METRICS)} (f1 of entities, f1_macro of plain tags)",
        fix="use one of these in --metric_for_best_model, such as f1 for entities or accuracy for plain tags",
    )


def check_run(job: TagFields, args: TrainingArguments) -> list[Problem]:
    """Return what is wrong between the options of the task and those of the training."""
    return broken(RUN_RULES, job, args)


TAG_RULES: tuple[Rule, ...] = (
    *JOB_RULES,
    at_least("max_seq_length", 3, "a row holds a word and special tokens"),
    at_least("doc_stride", 0, "windows cannot share fewer than no tokens"),
    windows_move_on,
)
RUN_RULES: tuple[Rule, ...] = (*JOB_RUN_RULES, best_metric_is_known, spans_are_of_answers)
