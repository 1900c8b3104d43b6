"""The options of `whet doctor`."""

from dataclasses import dataclass

from whet.config.rules.ranges import Rule
from whet.config.settings import checked
from whet.errors import Problem


def kernels_are_not_measured(asked: "DoctorArguments") -> Problem | None:
    """The report about the native operators contains no rates."""
    if not asked.kernels or asked.measure:
        return None
    return Problem(
        what="no_measure has no effect here",
        got="kernels and no_measure",
        why="with --kernels nothing is measured anyway",
        fix="leave --no_measure out",
    )


def a_model_comes_alone(asked: "DoctorArguments") -> Problem | None:
    """The report about a model contains nothing else."""
    if not asked.model or not asked.kernels:
        return None
    return Problem(
        what="the doctor examines a model or the native operators",
        got=f"model {asked.model} and kernels",
        why="each has a report of its own",
        fix=f"give two commands: whet doctor {asked.model}, and whet doctor --kernels",
    )


_RULES: tuple[Rule, ...] = (kernels_are_not_measured, a_model_comes_alone)


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
    json: bool = False
    """Print one JSON object with everything, for machines."""
