"""Which code computes a model's attention where it is not whet's, and whether the machine has it."""

from __future__ import annotations

import importlib.util

import torch
from torch import nn
from transformers import PreTrainedModel

from whet.errors import ConfigError
from whet.kernels import gpu_attention as attention_path
from whet.log import logger

FLASH = "flash_attention_2"


def use(model: nn.Module, name: str) -> None:
    """Make the model compute attention with transformers' implementation of this name.

    Raises ConfigError if the model or the machine cannot.
    """
    if name == FLASH:
        _require_flash()
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            what=f"attn_implementation {name} cannot be used here",
            got=type(model).__name__,
            why="only models of transformers have a choice of attention",
            fix="leave --attn_implementation out",
        )
    try:
        model.set_attn_implementation(name)
    except (ValueError, ImportError) as error:
        raise _refused(name, type(model).__name__, " ".join(str(error).split())[:500]) from error
    found = model.config._attn_implementation
    if found != name:
        raise _refused(name, type(model).__name__, f"transformers kept {found} for this model")
    logger.info("attention: transformers' own %s, asked for by attn_implementation", name)


def require_kernels(device: torch.device) -> None:
    """Raise ConfigError if packed batches find no flash kernels on this device."""
    if attention_path.have(device) != attention_path.Have():
        return
    if not torch.cuda.is_available():
        got = "no GPU that torch can use"
    elif device.type != "cuda":
        got = f"the model is on the device {device}"
    else:
        got = f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, no package flash-attn"
    raise _refused(
        FLASH, got, "flash kernels run on NVIDIA GPUs since Ampere, by a torch built with them or flash-attn"
    )


def not_known(model: nn.Module) -> ConfigError:
    """Return the error for a model that whet's own attention is asked of, and that whet does not know."""
    return ConfigError(
        what="whet's attention does not serve this model",
        got=type(model).__name__,
        why="it serves models of the families that whet knows, with a head of transformers that runs without padding",
        fix="leave --attn_implementation out: the model then runs padded, with its own attention",
    )


def _require_flash() -> None:
    missing = [] if torch.cuda.is_available() else ["GPU that torch can use"]
    if importlib.util.find_spec("flash_attn") is None:
        missing.append("package flash-attn")
    if missing:
        raise _refused(FLASH, f"no {' and no '.join(missing)}", "its kernels come in a package for GPUs")


def _refused(name: str, got: str, why: str) -> ConfigError:
    others = " or ".join(other for other in ("sdpa", "eager") if other != name)
    return ConfigError(
        what=f"attn_implementation {name} cannot be used here",
        got=got,
        why=why,
        fix=f"use --attn_implementation {others}, or leave it out",
    )
