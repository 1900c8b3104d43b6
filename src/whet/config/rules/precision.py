"""Rules about number formats: `precision`, and the ecosystem's `bf16`, `fp16` and `tf32`."""

from collections.abc import Mapping
from typing import Any

from whet.config.fields import TrainingFields
from whet.config.rules.ranges import Rule
from whet.errors import Problem

_SWITCHES = ("bf16", "fp16")


def resolve_precision(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return precision, bf16 and fp16, each filled in from the others; the rules report contradictions.

    bf16 false without a precision means fp32, because auto could choose bf16 otherwise.
    """
    on = [name for name in _SWITCHES if values[name]]
    precision = values["precision"]
    if precision == "auto" and len(on) == 1:
        precision = on[0]
    elif precision == "auto" and not on and values["bf16"] is False:
        precision = "fp32"
    decided = precision != "auto"
    filled = {name: precision == name if decided and values[name] is None else values[name] for name in _SWITCHES}
    return {"precision": precision, **filled}


def one_half_precision(args: TrainingFields) -> Problem | None:
    """A product computes in one format."""
    if not (args.bf16 and args.fp16):
        return None
    return Problem(
        what="bf16 and fp16 are both asked for",
        got="bf16=True, fp16=True",
        why="the products of a run compute in one number format",
        fix="keep --bf16, which needs no loss scaling, or --fp16",
    )


def switch_agrees(name: str) -> Rule:
    """Return the rule that the ecosystem's switch of a format agrees with precision."""

    def rule(args: TrainingFields) -> Problem | None:
        said = getattr(args, name)
        if args.precision == "auto" or said is None or said == (args.precision == name):
            return None
        return Problem(
            what=f"precision and {name} contradict each other",
            got=f"precision={args.precision}, {name}={said}",
            why=f"--{name} means --precision {name}, and a run computes in one precision",
            fix=f"keep --precision alone, or --{name} alone; for dataclasses.replace: {name}=None and a new precision",
        )

    rule.__name__ = f"{name}_agrees_with_precision"
    return rule


def tf32_has_a_gpu(args: TrainingFields) -> Problem | None:
    """Checked before torch is loaded; whether the GPU has TF32 is checked later."""
    if not (args.tf32 and args.use_cpu):
        return None
    return Problem(
        what="tf32 is asked for on the CPU",
        got="tf32=True, use_cpu=True",
        why="TF32 is a format of the tensor cores of NVIDIA's GPUs, and would do nothing here",
        fix="leave out one of --tf32 and --use_cpu",
    )


def int8_is_not_compiled(args: TrainingFields) -> Problem | None:
    """A compiled graph contains its own products."""
    if not (args.precision == "int8" and args.torch_compile):
        return None
    return Problem(
        what="int8 does not work with torch_compile",
        got="precision=int8, torch_compile=true",
        why="the compiler cannot look into whet's products of 8 bits, and would run its own in fp32",
        fix="leave --torch_compile out, or use --precision fp32",
    )


PRECISION_RULES: tuple[Rule, ...] = (
    one_half_precision,
    switch_agrees("bf16"),
    switch_agrees("fp16"),
    tf32_has_a_gpu,
    int8_is_not_compiled,
)
