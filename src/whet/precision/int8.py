"""What products in 8 bits need: the processor's instructions and the native operators."""

import torch

from whet.config import environment
from whet.errors import ConfigError, Problem
from whet.kernels.int8 import has_vnni
from whet.kernels.library import choice, library

CHOICE = "WHET_INT8"
"""Environment variable: forward keeps the gradient of the input in fp32, both computes it in 8 bits as well."""
INSTEAD = "use --precision auto, which takes the faster one of fp32 and bf16"
"""The fix if they are missing."""


def backward_too() -> bool:
    """Return whether the gradient of the input is computed in 8 bits too."""
    return environment.value(CHOICE) != "forward"


def require(device: torch.device) -> None:
    """Raise ConfigError if products in 8 bits cannot run, or would be slower than fp32."""
    problem = _missing(device)
    if problem is not None:
        raise ConfigError.of([problem])


def _missing(device: torch.device) -> Problem | None:
    if device.type != "cpu":
        return Problem(
            what="int8 is asked for on a GPU",
            got=f"the {device.type.upper()}",
            why="whet's products in 8 bits are for CPUs; GPUs compute bf16 and fp16 faster than fp32",
            fix="add --use_cpu, or use --precision bf16",
        )
    if choice() == "reference":
        return Problem(
            what="int8 is asked for, and the native operators are turned off",
            got="WHET_KERNELS=reference",
            why="torch quantises and scales in separate passes, which cost more than 8 bits gain",
            fix=f"unset WHET_KERNELS; or {INSTEAD}",
        )
    if library() is None:
        return Problem(
            what="int8 is asked for, and the native operators are not there",
            got="plain torch",
            why="torch quantises and scales in separate passes, which cost more than 8 bits gain",
            fix=f"run: python -m whet.kernels.build; or {INSTEAD}",
        )
    if not has_vnni():
        return Problem(
            what="int8 is asked for, and this processor has no fast products of 8 bits",
            got=f"neither AVX-512 VNNI nor AVX-VNNI in the instruction set in use ({_isa()})",
            why="without these instructions a product in 8 bits is no faster than one in fp32, and less exact",
            fix=INSTEAD,
        )
    return None


def _isa() -> str:
    native = library()
    return "none" if native is None else native.isa
