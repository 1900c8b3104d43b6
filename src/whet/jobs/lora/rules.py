"""The rules of frozen weights in few bits: what they need, and what they do not go with."""

from __future__ import annotations

from whet.config.arguments import TrainingArguments
from whet.config.rules.ranges import Rule, only_with
from whet.errors import Problem
from whet.jobs.fields import JobFields


def rounded_weights_stay_as_they_are(job: JobFields) -> Problem | None:
    """DoRA reads the lengths of exact columns, and experts are weights of their own kind."""
    odd = {"use_dora": job.use_dora or None, "moe_experts": job.moe_experts}
    given = {name: value for name, value in odd.items() if value is not None}
    if not job.load_in_8bit or not given:
        return None
    return Problem(
        what=f"load_in_8bit does not go with {' and '.join(given)}",
        got=given,
        why="DoRA measures the columns of the exact weights in each step, and new experts are trained completely",
        fix=f"leave --load_in_8bit out, or {' and '.join(f'--{name}' for name in given)}",
    )


def rounded_weights_have_plain_products(job: JobFields, args: TrainingArguments) -> Problem | None:
    """Weights of 8 bits are read by whet's own products, and every rank holds them completely."""
    odd = {
        "zero_stage": args.zero_stage or None,
        "fsdp": args.fsdp,
        "deepspeed": args.deepspeed,
        "torch_compile": args.torch_compile or None,
        "precision": args.precision if args.precision == "int8" else None,
        "activation_offload": args.activation_offload or None,
    }
    given = {name: value for name, value in odd.items() if value}
    if not job.load_in_8bit or not given:
        return None
    return Problem(
        what=f"load_in_8bit does not go with {' and '.join(given)}",
        got=given,
        why="the frozen weights are read by whet's own products, in fp32 or bf16, and each rank holds all of them",
        fix=f"leave {' and '.join(f'--{name}' for name in given)} out, or --load_in_8bit",
    )


LORA_RULES: tuple[Rule, ...] = (
    only_with(
        "rounded_weights_are_frozen",
        "lora_r",
        ("load_in_8bit",),
        why="weights of 8 bits cannot be trained: a step is smaller than the distance between two codes",
        fix="add --lora_r 16, which trains pairs next to the frozen weights, or leave --load_in_8bit out",
    ),
    rounded_weights_stay_as_they_are,
)
LORA_RUN_RULES: tuple[Rule, ...] = (rounded_weights_have_plain_products,)
