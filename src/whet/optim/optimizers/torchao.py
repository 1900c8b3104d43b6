"""torchao's AdamW with 8-bit or 4-bit moments, compiled by torch at the first step."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from whet.optim.entry import STEP_BYTES, Entry, Options, Request, Shapes, keep_dtypes
from whet.optional import extra, require

_SMALLEST = 4096
_SAVEABLE = "_whet_saveable"
_BLOCKS = {8: 256, 4: 128}


def build_8bit(request: Request) -> Optimizer:
    """Return torchao's AdamW with 8-bit moments."""
    return _build(request, "AdamW8bit", "adamw_torch_8bit")


def build_4bit(request: Request) -> Optimizer:
    """Return torchao's AdamW with 4-bit moments."""
    return _build(request, "AdamW4bit", "adamw_torch_4bit")


def _build(request: Request, kind: str, name: str) -> Optimizer:
    package = require("torchao.optim", needed_for=f"--optim {name}", install=extra("torchao"))
    return make_saveable(getattr(package, kind)(request.groups, **request.adam, **request.options))


def make_saveable(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer; if it is torchao's, its state is now saved and loaded as plain tensors."""
    if type(optimizer).__module__.partition(".")[0] != "torchao" or getattr(optimizer, _SAVEABLE, False):
        return optimizer
    setattr(optimizer, _SAVEABLE, True)
    optimizer.register_state_dict_post_hook(_in_parts)
    optimizer.register_load_state_dict_pre_hook(_from_parts)
    keep_dtypes(optimizer)
    optimizer.register_load_state_dict_post_hook(_rates_as_tensors)
    return optimizer


def _in_parts(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the state with codes, scales and map of each moment as plain tensors, which can be saved."""
    state = {
        name: {key: _parts(value) if is_traceable_wrapper_subclass(value) else value for key, value in values.items()}
        for name, values in state_dict["state"].items()
    }
    return state_dict | {"state": state}


def _parts(value: Any) -> dict[str, Tensor]:
    return {name: getattr(value, name) for name in value.__tensor_flatten__()[0]}


def _from_parts(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the state in torchao's form, from the parts that `_in_parts` made."""
    names = [name for group in state_dict["param_groups"] for name in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {name: dict(values) for name, values in state_dict["state"].items()}
    for name, parameter in zip(names, parameters, strict=True):
        for key, parts in state.get(name, {}).items():
            if isinstance(parts, dict):
                whole = optimizer._new_buffer(parameter, signed=key == "exp_avg")
                for part, tensor in parts.items():
                    getattr(whole, part).copy_(tensor)
                state[name][key] = whole
    return state_dict | {"state": state}


def _rates_as_tensors(optimizer: Optimizer) -> None:
    """Convert learning rates to tensors, as torchao requires; files contain numbers."""
    for group in optimizer.param_groups:
        if not isinstance(group["lr"], Tensor):
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float32)


def _state_bytes(shapes: Shapes, options: Options, itemsize: int, bits: int) -> int:
    block = int(options.get("block_size", _BLOCKS[bits]))
    return sum(_one(prod(shape), block, itemsize, bits) + STEP_BYTES for shape in shapes)


def _one(size: int, block: int, itemsize: int, bits: int) -> int:
    if size < _SMALLEST or size % block:
        return 2 * itemsize * size
    return 2 * (size * bits // 8 + 4 * size // block + 4 * 2**bits)


ENTRY_8BIT = Entry(build=build_8bit, state_bytes=lambda s, o, i: _state_bytes(s, o, i, 8))
ENTRY_4BIT = Entry(build=build_4bit, state_bytes=lambda s, o, i: _state_bytes(s, o, i, 4))
