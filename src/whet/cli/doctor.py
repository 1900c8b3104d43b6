"""`whet doctor`: what this machine and this installation can do for training."""

from dataclasses import dataclass

from whet.config.command_line import Command
from whet.config.rules.ranges import broken_if
from whet.config.settings import checked

_RULES = (
    broken_if(
        "kernels_are_not_measured",
        ("kernels", "measure"),
        lambda asked: asked.kernels and not asked.measure,
        what="no_measure has no effect here",
        why="with --kernels nothing is measured anyway",
        fix="leave --no_measure out",
    ),
    broken_if(
        "a_model_comes_alone",
        ("model", "kernels"),
        lambda asked: asked.model and asked.kernels,
        what="the doctor examines a model or the native operators",
        why="each has a report of its own",
        fix="give two commands: whet doctor MODEL, and whet doctor --kernels",
    ),
    broken_if(
        "rates_are_the_machines",
        ("model", "kernels", "rates"),
        lambda asked: asked.rates and (asked.model or asked.kernels),
        what="rates are a part of the report on the machine",
        why="a report on a model, or on the native operators alone, has none",
        fix="give two commands, one of them: whet doctor --rates",
    ),
)


@checked(headings={"model": "Doctor"}, rules=_RULES)
@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorArguments:
    """What is examined, and how it is printed."""

    model: str = ""
    """Examine only this model, a folder or a name on the hub: whether it trains without padding, why not, and which of
    its parts run fused."""
    kernels: bool = False
    """Examine only the native operators: the library, its instruction set, or why there is none."""
    measure: bool = True
    """Measure the rates of matrix products and of memory, for a few seconds. --no_measure skips it."""
    rates: bool = False
    """Measure how fast the parts of a training run here, for about ten seconds the first time. `whet plan --hardware`
    reads the JSON report and forecasts for this machine elsewhere."""


def _run(asked: DoctorArguments) -> int:
    from whet.doctor.report import run_doctor

    return run_doctor(asked.model, kernels=asked.kernels, measure=asked.measure, training=asked.rates)


COMMAND = Command(
    name="whet doctor",
    summary=(
        "Show what this machine and this installation can do for training: cores, instruction sets, memory, threads,"
        " native operators, rates of matrix products. What could be better comes as advice with a command. The exit"
        " code is 1 if something is broken: torch cannot compute, transformers is missing, or the library of native"
        " operators is there and cannot be used. With the name of a model it says whether that model trains without"
        " padding, why not, and which of its parts run fused."
    ),
    usage="[MODEL] [--OPTION VALUE ...]",
    lone="model",
    examples=(
        "whet doctor",
        "whet doctor MODEL",
        "whet doctor --kernels",
        "whet doctor --json --no_measure",
        "whet doctor --rates --json > report.json",
    ),
    parts=(DoctorArguments,),
    run=_run,
)
