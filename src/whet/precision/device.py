"""Which number formats a device has."""

import torch

from whet.errors import ConfigError, Problem

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


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"the {device.type.upper()}"
