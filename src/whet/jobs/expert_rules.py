"""The rules of experts: their settings make sense, and go with those of the training."""

import math

from whet.config import recipes
from whet.config.arguments import TrainingArguments
from whet.config.rules.ranges import Rule, at_least, only_with
from whet.errors import Problem
from whet.jobs.fields import JobFields


def top_k_is_1_or_2(job: JobFields) -> Problem | None:
    """With more, a sparse layer costs as much as a wider dense one."""
    if job.moe_top_k in (1, 2):
        return None
    return Problem(
        what="moe_top_k is neither 1 nor 2",
        got=job.moe_top_k,
        why="whet routes a token to its best expert, or to its two best",
        fix="use --moe_top_k 1, or --moe_top_k 2",
    )


def factors_are_numbers(job: JobFields) -> Problem | None:
    """A negative weight would make the balance worse, and no expert can take less than nothing."""
    weights = {name: getattr(job, name) for name in ("moe_aux_loss_coef", "moe_z_loss_coef")}
    wrong = {name: value for name, value in weights.items() if not (math.isfinite(value) and value >= 0)}
    factor = job.moe_capacity_factor
    if factor is not None and not (math.isfinite(factor) and factor > 0):
        wrong["moe_capacity_factor"] = factor
    if not wrong:
        return None
    return Problem(
        what=f"{' and '.join(wrong)} cannot be used",
        got=wrong,
        why="weights of losses are numbers from 0 up, a capacity is larger than 0",
        fix="use --moe_aux_loss_coef 0.01 --moe_z_loss_coef 0.001 --moe_capacity_factor 1.25, or leave them out",
    )


def experts_are_trained(job: JobFields, args: TrainingArguments) -> Problem | None:
    """New experts are all alike."""
    if job.moe_experts is None or args.do_train:
        return None
    return Problem(
        what="moe_experts has nothing to train",
        got=f"moe_experts={job.moe_experts} without do_train",
        why="new experts are copies of one part, and change nothing before they are trained",
        fix="add --do_train; a folder with experts is evaluated without --moe_experts",
    )


def experts_keep_their_blocks(job: JobFields, args: TrainingArguments) -> Problem | None:
    """New weights for the last blocks would not reach their experts."""
    if job.moe_experts is None or not args.reinit_layers or recipes.sets(args, "reinit_layers"):
        return None
    return Problem(
        what="reinit_layers does not go with moe_experts",
        got=f"reinit_layers={args.reinit_layers}, moe_experts={job.moe_experts}",
        why="experts begin as copies of pretrained weights, and reinit_layers drops these",
        fix="leave --reinit_layers or --moe_experts out",
    )


def experts_are_not_compiled(job: JobFields, args: TrainingArguments) -> Problem | None:
    """The number of tokens of an expert is known only when it runs."""
    if job.moe_experts is None or not args.torch_compile:
        return None
    return Problem(
        what="torch_compile does not go with moe_experts",
        got=f"torch_compile={args.torch_compile}, moe_experts={job.moe_experts}",
        why="a graph would be compiled again for each number of tokens that an expert gets",
        fix="leave --torch_compile out: the products of experts are native without it",
    )


def experts_see_all_tokens(job: JobFields, args: TrainingArguments) -> Problem | None:
    """Reported before anything is tokenised; a folder that has experts is found when it is loaded."""
    if job.moe_experts is None or not args.cache_frozen_trunk:
        return None
    return Problem(
        what="cache_frozen_trunk does not go with moe_experts",
        got=f"cache_frozen_trunk=True, moe_experts={job.moe_experts}",
        why="the balance of experts is that of all tokens in all blocks, and frozen blocks would not run",
        fix="leave --cache_frozen_trunk or --moe_experts out",
    )


EXPERT_RULES: tuple[Rule, ...] = (
    at_least("moe_experts", 2, "a token is routed to its best experts of several"),
    at_least("moe_every", 1, "blocks are counted from 1"),
    top_k_is_1_or_2,
    factors_are_numbers,
    only_with(
        "experts_are_asked_for",
        "moe_experts",
        ("moe_top_k", "moe_every", "moe_capacity_factor", "moe_aux_loss_coef", "moe_z_loss_coef"),
        why="they say how experts are used, and none are asked for",
        fix="add --moe_experts 8, or leave them out",
    ),
)
EXPERT_RUN_RULES: tuple[Rule, ...] = (
    experts_are_trained,
    experts_keep_their_blocks,
    experts_are_not_compiled,
    experts_see_all_tokens,
)
