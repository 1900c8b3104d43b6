"""AdamW of other packages: bitsandbytes and torchao, with moments of 8 or 4 bits, and apex.

torchao compiles its step at the first one. Its state is made of tensor subclasses; whet saves their parts.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from whet.log import logger
from whet.optim.entry import STEP_BYTES, Entry, Options, Request, Shapes, keep_dtypes
from whet.optional import extra, require

_SAVEABLE = "_whet_saveable"
_MIN_8BIT_SIZE = 4096
"""Parameters with fewer elements keep wide moments, in both packages."""
_BLOCKS = {8: 256, 4: 128}
_BITSANDBYTES_BLOCK = 256
_MAP_BYTES = 4 * 256


def build_bitsandbytes(request: Request) -> Optimizer:
    """Return bitsandbytes' AdamW; parameters with fewer than min_8bit_size elements keep 32-bit moments."""
    package = require("bitsandbytes", needed_for=f"--optim {request.args.optim}", install=extra("bitsandbytes"))
    smallest = int(request.options.get("min_8bit_size", _MIN_8BIT_SIZE))
    logger.info("optim adamw_bnb_8bit: parameters with fewer than %d elements keep 32-bit moments", smallest)
    return package.optim.AdamW(request.groups, **request.adam, optim_bits=8, min_8bit_size=smallest)


def build_torchao(request: Request) -> Optimizer:
    """Return torchao's AdamW with moments of the bits that its name says."""
    package = require("torchao.optim", needed_for=f"--optim {request.args.optim}", install=extra("torchao"))
    kind = {"adamw_torch_8bit": "AdamW8bit", "adamw_torch_4bit": "AdamW4bit"}[request.args.optim]
    return make_saveable(getattr(package, kind)(request.groups, **request.adam, **request.options))


def build_apex(request: Request) -> Optimizer:
    """Return apex's fused AdamW."""
    package = require("apex.optimizers", needed_for=f"--optim {request.args.optim}", install="apex")
    return package.FusedAdam(request.groups, **request.adam, adam_w_mode=True)


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


def state_bytes_bitsandbytes(shapes: Shapes, options: Options, _itemsize: int) -> int:
    """Two codes per element, two scales per block, one pair of maps for all; small parameters: two fp32 moments."""
    smallest = int(options.get("min_8bit_size", _MIN_8BIT_SIZE))
    sizes = [prod(shape) for shape in shapes]
    large = [size for size in sizes if size >= smallest]
    codes = sum(2 * size + 8 * -(-size // _BITSANDBYTES_BLOCK) for size in large)
    return codes + (2 * _MAP_BYTES if large else 0) + sum(8 * size for size in sizes if size < smallest)


def state_bytes_apex(shapes: Shapes, _options: Options, _itemsize: int) -> int:
    """Two moments in fp32; the group counts the steps."""
    return sum(8 * prod(shape) for shape in shapes)


def _state_bytes_torchao(shapes: Shapes, options: Options, itemsize: int, bits: int) -> int:
    """Codes, scales and map of two moments, and the step; small and odd sizes: two moments as wide as the parameter."""
    block = int(options.get("block_size", _BLOCKS[bits]))

    def moments(size: int) -> int:
        if size < _MIN_8BIT_SIZE or size % block:
            return 2 * itemsize * size
        return 2 * (size * bits // 8 + 4 * size // block + 4 * 2**bits)

    return sum(moments(prod(shape)) + STEP_BYTES for shape in shapes)


OPTIMIZERS = (
    Entry(
        name="adamw_bnb_8bit",
        rule="AdamW",
        does="AdamW of bitsandbytes with moments of 8 bits; small parameters keep 32 bits",
        source="Dettmers et al. 2022, arXiv:2110.02861",
        aliases={"adamw_8bit": ""},
        options={"min_8bit_size": "int"},
        betas=True,
        epsilon=True,
        package="bitsandbytes",
        installed_by="bitsandbytes",
        instead="adamw_whet_8bit",
        claim="2 bytes per parameter (6 GB for 3 billion)",
        build=build_bitsandbytes,
        state_bytes=state_bytes_bitsandbytes,
    ),
    Entry(
        name="adamw_torch_8bit",
        rule="AdamW",
        does="AdamW of torchao with moments of 8 bits; compiled at the first step, which takes minutes on a CPU",
        source="Dettmers et al. 2022, arXiv:2110.02861",
        options={"block_size": "int", "bf16_stochastic_round": "bool"},
        betas=True,
        epsilon=True,
        package="torchao",
        installed_by="torchao",
        instead="adamw_whet_8bit",
        claim="less memory than 32-bit states",
        build=build_torchao,
        state_bytes=lambda shapes, options, itemsize: _state_bytes_torchao(shapes, options, itemsize, 8),
    ),
    Entry(
        name="adamw_torch_4bit",
        rule="AdamW",
        does="AdamW of torchao with moments of 4 bits; compiled as well",
        source="Li et al. 2023, arXiv:2309.01507",
        options={"block_size": "int", "bf16_stochastic_round": "bool"},
        betas=True,
        epsilon=True,
        package="torchao",
        installed_by="torchao",
        instead="adamw_whet_8bit",
        claim="less memory than 8-bit states",
        build=build_torchao,
        state_bytes=lambda shapes, options, itemsize: _state_bytes_torchao(shapes, options, itemsize, 4),
    ),
    Entry(
        name="adamw_apex_fused",
        rule="AdamW",
        does="AdamW of apex, on a GPU; adamw_torch_fused is equal",
        source="Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2",
        betas=True,
        epsilon=True,
        package="apex",
        instead="adamw_torch_fused",
        claim="faster than adamw_torch, on a GPU",
        build=build_apex,
        state_bytes=state_bytes_apex,
    ),
)
