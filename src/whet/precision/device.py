"""Which number formats this machine computes in: what a GPU has, what products in 8 bits need of a CPU."""

import torch

from whet.config import environment
from whet.errors import ConfigError, Problem
from whet.hardware import cpu
from whet.kernels.library import choice, library
from whet.kernels.matrix import is_widened

INT8_CHOICE = "WHET_INT8"
"""Environment variable: forward keeps the gradient of the input in fp32, both computes it in 8 bits as well. Either
also runs int8 where bf16 is faster."""
INSTEAD_OF_INT8 = "use --precision auto, which takes the faster one of fp32 and bf16"
"""The fix if this machine has no products in 8 bits."""
_AMPERE = 8
"""Major compute capability of the first GPUs with bf16 and TF32."""


def has_bf16(device: torch.device) -> bool:
    """Return whether products in bf16 can be faster: a CPU may emulate them, which only a measurement shows."""
    return device.type == "cpu" or _is_ampere(device) or (_is_rocm(device) and torch.cuda.is_bf16_supported())


def require(precision: str, tf32: bool | None, device: torch.device) -> None:
    """Raise ConfigError for everything that this device cannot do."""
    problems = []
    if precision == "bf16" and not has_bf16(device):
        problems.append(_no_bf16(device))
    if precision == "fp16" and not torch.amp.is_autocast_available(device.type):
        problems.append(_no_fp16(device))
    if tf32 and not _is_ampere(device):
        problems.append(_no_tf32(device))
    if problems:
        raise ConfigError.of(problems)


def int8_backward_too() -> bool:
    """Return whether the gradient of the input is computed in 8 bits too."""
    return environment.value(INT8_CHOICE) != "forward"


def require_int8(device: torch.device) -> None:
    """Raise ConfigError if products in 8 bits cannot run, or would be slower than fp32 or bf16."""
    problem = _no_int8(device)
    if problem is not None:
        raise ConfigError.of([problem])


def set_tf32(wanted: bool, device: torch.device) -> None:
    """Switch TF32 on or off for the products and convolutions of this process; a CPU has no TF32."""
    if device.type != "cuda":
        return
    torch.backends.cuda.matmul.fp32_precision = "tf32" if wanted else "ieee"
    torch.backends.cudnn.conv.fp32_precision = "tf32" if wanted else "ieee"  # pyright: ignore[reportAttributeAccessIssue]


def uses_tf32(device: torch.device) -> bool:
    """Return whether fp32 products on this device run in TF32."""
    return _is_ampere(device) and torch.backends.cuda.matmul.fp32_precision == "tf32"


def _is_ampere(device: torch.device) -> bool:
    """Return whether it is an NVIDIA GPU since Ampere."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_properties(device).major >= _AMPERE


def _is_rocm(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is not None


def _no_bf16(device: torch.device) -> Problem:
    return Problem(
        what="bf16 is asked for, and this GPU does not have it",
        got=_name(device),
        why="bf16 products came with NVIDIA's Ampere (compute capability 8.0); before, they are emulated and slow",
        fix="use --precision fp16, which this GPU has, or --precision fp32, in place of bf16",
    )


def _no_fp16(device: torch.device) -> Problem:
    return Problem(
        what="fp16 is asked for, and torch has no mixed precision on this device",
        got=_name(device),
        why="products in fp16 with weights in float32 run through torch's autocast",
        fix="use --precision fp32 in place of fp16",
    )


def _no_tf32(device: torch.device) -> Problem:
    return Problem(
        what="tf32 is asked for, and this device does not have it",
        got=_name(device),
        why="TF32 is a format of NVIDIA's GPUs since Ampere (compute capability 8.0), and would do nothing here",
        fix="leave --tf32 out; --precision auto measures whether bf16 is faster here",
    )


def _no_int8(device: torch.device) -> Problem | None:
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
            fix=f"unset WHET_KERNELS; or {INSTEAD_OF_INT8}",
        )
    native = library()
    if native is None:
        return Problem(
            what="int8 is asked for, and the native operators are not there",
            got="plain torch",
            why="torch quantises and scales in separate passes, which cost more than 8 bits gain",
            fix=f"run: python -m whet.kernels.build; or {INSTEAD_OF_INT8}",
        )
    from whet.kernels.int8 import has_vnni

    if not has_vnni():
        return Problem(
            what="int8 is asked for, and this processor has no fast products of 8 bits",
            got=f"neither AVX-512 VNNI nor AVX-VNNI in the instruction set in use ({native.isa})",
            why="without these instructions a product in 8 bits is no faster than one in fp32, and less exact",
            fix=INSTEAD_OF_INT8,
        )
    if not is_widened() and environment.value(INT8_CHOICE) is None:
        return Problem(
            what="int8 is asked for, and bf16 is the faster format on this processor",
            got=f"{cpu.model_name()}, with fast products of bf16 (AMX, or AVX-512 BF16 that is not Intel's)",
            why="a step in 8 bits takes longer here than one in bf16, and is less exact; int8 is for processors with "
            "VNNI and without fast products of bf16",
            fix=f"use --precision bf16; or set {INT8_CHOICE}=both, which runs int8 all the same",
        )
    return None


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"the {device.type.upper()}"
