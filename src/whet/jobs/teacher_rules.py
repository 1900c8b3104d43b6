"""The rules of a teacher: its settings make sense, and go with those of the training."""

from __future__ import annotations

from whet.config.arguments import TrainingArguments
from whet.config.rules.ranges import Rule, above, only_with
from whet.errors import Problem
from whet.jobs.fields import JobFields


def alpha_is_a_share(job: JobFields) -> Problem | None:
    """With none of it the teacher would compute in vain."""
    if 0 < job.distillation_alpha <= 1:
        return None
    return Problem(
        what="distillation_alpha is not a share of the loss",
        got=job.distillation_alpha,
        why="it is the teacher's share, from above 0 to 1; the labels have the rest",
        fix="use a --distillation_alpha such as 0.5",
    )


def teacher_teaches(job: JobFields, args: TrainingArguments) -> Problem | None:
    """A teacher takes part in the loss of a training."""
    odd = [] if args.do_train else ["no do_train"]
    odd += [f"moe_experts={job.moe_experts}"] if job.moe_experts is not None else []
    odd += [f"label_smoothing_factor={args.label_smoothing_factor}"] if args.label_smoothing_factor else []
    if job.teacher_model is None or not odd:
        return None
    return Problem(
        what="teacher_model does not go with these settings",
        got=", ".join(odd),
        why="it takes part in the loss of a training, next to the loss of the labels as they are",
        fix="use --do_train, without --label_smoothing_factor and --moe_experts",
    )


TEACHER_RULES: tuple[Rule, ...] = (
    above("distillation_temperature", 0, "the logits are divided by it"),
    alpha_is_a_share,
    only_with(
        "teacher_is_there",
        "teacher_model",
        ("distillation_temperature", "distillation_alpha"),
        why="they say how a teacher takes part in the loss",
        fix="add --teacher_model FOLDER, or leave them out",
    ),
)
TEACHER_RUN_RULES: tuple[Rule, ...] = (teacher_teaches,)
