"""The code that computes packed attention on a GPU, chosen by the settings, the tensors and the installation."""

import importlib.util
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from whet.errors import ConfigError
from whet.kernels.batch_position import Kernel
from whet.log import logger

Path = Literal["torch", "package", "padded"]
"""torch: torch's flash kernels. package: flash-attn's. padded: rows padded for one call of plain torch."""
_HALF = (torch.float16, torch.bfloat16)
_WIDEST, _WIDTH_STEP = 256, 8
_AMPERE = (8, 0)
_NAMES: dict[Path, str] = {
    "torch": "torch's flash kernels for rows of any length",
    "package": "the flash-attn package's kernels for rows of any length",
    "padded": "rows padded for one call of torch",
}


@dataclass(frozen=True)
class Have:
    """The flash kernels that a device can run."""

    torch: bool = False
    package: bool = False


@dataclass(frozen=True)
class Call:
    """The properties of a call of attention that decide."""

    dtype: torch.dtype
    width: int
    """Width of a head."""
    dropping: bool
    """Whether attention weights are dropped."""
    biased: bool = False
    """Whether a bias by distance is added to the scores."""

    @property
    def fits(self) -> bool:
        """Whether flash kernels support it."""
        return not self.biased and self.dtype in _HALF and self.width % _WIDTH_STEP == 0 and self.width <= _WIDEST


def choose(kernel: Kernel, call: Call, have: Have) -> Path:
    """Return the path of this call; ConfigError if flash_attention_2 was requested and cannot run.

    whet's dropout masks are a function of every weight's position, and no flash kernel takes a mask: with whet's masks,
    rows are padded. flash_attention_2 runs the flash-attn package if it is installed.
    """
    if kernel == "flash_attention_2" and not (call.fits and (have.torch or have.package)):
        raise _no_flash(call)
    if not call.fits or (kernel == "whet" and call.dropping):
        return "padded"
    if have.package and (kernel == "flash_attention_2" or not have.torch):
        return "package"
    return "torch" if have.torch else "padded"


@cache
def have(device: torch.device) -> Have:
    """Return what this device can run: NVIDIA GPUs since Ampere, depending on torch's build and installed packages."""
    if device.type != "cuda" or torch.version.cuda is None or torch.cuda.get_device_capability(device) < _AMPERE:
        return Have()
    package = importlib.util.find_spec("flash_attn") is not None
    return Have(torch.backends.cuda.is_flash_attention_available(), package)


@cache
def tell(path: Path, *, dropping: bool) -> None:
    """Log once which code computes attention, and what that means for its dropout."""
    if not dropping:
        logger.info("attention: %s", _NAMES[path])
    elif path != "padded":
        logger.info(
            "attention: %s draw their own dropout masks, which depend on the split into micro-batches "
            "(--attn_implementation whet keeps whet's masks, which no split changes, and is slower)",
            _NAMES[path],
        )


def _no_flash(call: Call) -> ConfigError:
    dtype = str(call.dtype).removeprefix("torch.")
    return ConfigError(
        what="flash_attention_2 cannot compute this model's attention",
        got=f"{dtype}, heads of width {call.width}{', a bias by distance' if call.biased else ''}",
        why=f"its kernels take float16 and bfloat16, and widths that are multiples of {_WIDTH_STEP} up to {_WIDEST}, "
        "and add no bias to the scores",
        fix="leave --attn_implementation out" + ("" if call.biased else ", or use --bf16 if the dtype is float32"),
    )
