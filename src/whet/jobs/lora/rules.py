"""The rules of frozen weights in few bits: what they need, and what they do not go with."""

from __future__ import annotations

from whet.config.arguments import TrainingArguments
from whet.config.rules.ranges import Rule, only_with
from whet.errors import Problem
from whet.jobs.fields import JobFields


def one_number_of_bits(job: JobFields) -> Problem | None:
    """A weight has one form."""
    if not (job.load_in_8bit and job.load_in_4bit):
        return None
    return Problem(
        what="load_in_8bit and load_in_4bit are both asked for",
        got="load_in_8bit=True, load_in_4bit=True",
        why="a frozen weight is kept in one form",
        fix="keep --load_in_8bit, which is more exact, or --load_in_4bit, which takes less memory",
    )


def rounded_weights_stay_as_they_are(job: JobFields) -> Problem | None:
    """DoRA reads the lengths of exact columns, and experts are weights of their own kind."""
    odd = {"use_dora": job.use_dora or None, "moe_experts": job.moe_experts}
    given = {name: value for name, value in odd.items() if value is not None}
    if (asked := _asked(job)) is None or not given:
        return None
    return Problem(
        what=f"{asked} does not go with {' and '.join(given)}",
        got=given,
        why="DoRA measures the columns of the exact weights in each step, and new experts are trained completely",
        fix=f"leave --{asked} out, or {' and '.join(f'--{name}' for name in given)}",
    )


def rounded_weights_have_plain_products(job: JobFields, args: TrainingArguments) -> Problem | None:
    """Rounded weights are read by whet's own products, and every rank holds them completely."""
    odd = {
        "zero_stage": args.zero_stage or None,
        "fsdp": args.fsdp,
        "deepspeed": args.deepspeed,
        "torch_compile": args.torch_compile or None,
        "precision": args.precision if args.precision == "int8" else None,
        "activation_offload": args.activation_offload or None,
    }
    given = {name: value for name, value in odd.items() if value}
    if (asked := _asked(job)) is None or not given:
        return None
    return Problem(
        what=f"{asked} does not go with {' and '.join(given)}",
        got=given,
        why="the frozen weights are read by whet's own products, in fp32 or bf16, and each rank holds all of them",
        fix=f"leave {' and '.join(f'--{name}' for name in given)} out, or --{asked}",
    )


def _asked(job: JobFields) -> str | None:
    """Return the setting that asks for rounded weights."""
    return next((name for name in ("load_in_8bit", "load_in_4bit") if getattr(job, name)), None)


LORA_RULES: tuple[Rule, ...] = (
    one_number_of_bits,
    only_with(
        "rounded_weights_are_frozen",
        "lora_r",
        ("load_in_8bit", "load_in_4bit"),
        why="weights of 8 or 4 bits cannot be trained: a step is smaller than the distance between two codes",
        fix="add --lora_r 16, which trains pairs next to the frozen weights, or leave it out",
    ),
    rounded_weights_stay_as_they_are,
)
LORA_RUN_RULES: tuple[Rule, ...] = (rounded_weights_have_plain_products,)
