"""`whet doctor`: what this machine and this installation can do for training."""

from whet.config.command_line import Command
from whet.doctor.arguments import DoctorArguments


def _run(asked: DoctorArguments) -> int:
    from whet.doctor.report import run_doctor

    return run_doctor(asked)


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
    examples=("whet doctor", "whet doctor MODEL", "whet doctor --kernels", "whet doctor --json --no_measure"),
    parts=(DoctorArguments,),
    run=_run,
)
