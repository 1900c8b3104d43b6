"""Weights and optimizer state in and out of folders: safetensors for tensors, JSON for the rest."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor, nn
from torch.optim import Optimizer

from whet.errors import ConfigError
from whet.models import adapters
from whet.models.loading.quiet import quiet
from whet.paths import utf8_name
from whet.train.checkpoint import optimizer_states
from whet.train.resume import kinds as counters

WEIGHTS = "model.safetensors"
_OPTIMIZER = "optimizer"
OPTIMIZER_NUMBERS = f"{_OPTIMIZER}.json"
FILES = (WEIGHTS, f"{WEIGHTS}.index.json", f"{_OPTIMIZER}.safetensors", OPTIMIZER_NUMBERS, "config.json")
"""Names of the files that are written here, beside shards of the weights."""
_SHAPED = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "sum"}
"""State of torch's optimizers that has the parameter's shape."""


def save_weights(model: nn.Module, folder: Path, tensors: Mapping[str, Tensor] | None = None) -> None:
    """Write the model: with its configuration where it is one of transformers', else its weights alone.

    `tensors` are written in place of the model's own state.
    """
    state = dict(model.state_dict() if tensors is None else tensors)
    with utf8_name(folder) as named:
        if hasattr(model, "save_pretrained"):
            with quiet():
                model.save_pretrained(named, state_dict=state)  # pyright: ignore[reportCallIssue]
        else:
            save_model(_State(state), str(named / WEIGHTS))  # pyright: ignore[reportArgumentType]


def has_weights(folder: Path) -> bool:
    """Return whether the folder holds the weights of a model."""
    return (folder / WEIGHTS).exists() or (folder / f"{WEIGHTS}.index.json").exists()


class _State:
    """As much of a module as `save_model` looks at."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def state_dict(self) -> dict[str, Tensor]:
        return self._tensors


def save_processing(processing: Any, folder: Path, taken: Iterable[str] = ()) -> None:
    """Write the files of a tokenizer or processor, if there is one, into sub-folders too; OSError if the disk refuses.

    Raises ConfigError if it has no files, or writes ones that cannot be kept: links, or names that are `taken`.
    """
    if processing is None:
        return
    if not hasattr(processing, "save_pretrained"):
        raise _no_files(processing, "it has no save_pretrained", "a checkpoint holds the tokenizer's files")
    before = set(folder.rglob("*"))
    try:
        with utf8_name(folder) as named:
            processing.save_pretrained(named)
    except Exception as error:
        # tokenizers tells of a full disk in a plain Exception
        if type(error) is not Exception:
            raise
        raise OSError(str(error)) from error
    for path in {*folder.rglob("*")} - before:
        if path.parent == folder and path.name in taken:
            raise _no_files(processing, path.name, "a file of whet's has this name, and one would replace the other")
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise _no_files(processing, path.name, "it is a link or no plain file, and leads out of the folder")


def _no_files(processing: Any, got: str, why: str) -> ConfigError:
    return ConfigError(
        what=f"the files of {type(processing).__name__} cannot be saved",
        got=got,
        why=why,
        fix="change what its save_pretrained writes, or leave processing_class out and save it yourself",
    )


def load_weights(model: nn.Module, folder: Path) -> None:
    """Put the weights of the folder into the model, name by name; those of its adapters, where peft has wrapped it."""
    if adapters.names_of(model):
        adapters.load(model, folder)
        return
    index = folder / f"{WEIGHTS}.index.json"
    if not index.exists():
        with utf8_name(folder) as named:
            _require_floats(model, named / WEIGHTS)
            load_model(model, named / WEIGHTS)
        return
    shards = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    with utf8_name(folder) as named:
        for shard in shards:
            _require_floats(model, named / Path(shard).name)
        tensors = {name: t for shard in shards for name, t in load_file(named / Path(shard).name).items()}
    model.load_state_dict(tensors)


def _require_floats(model: nn.Module, file: Path) -> None:
    """Refuse whole numbers for weights: torch would convert them without a word."""
    with safe_open(file, framework="pt") as tensors:
        kinds = {name: tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118 (no dict)
    for name, own in model.state_dict().items():
        kind = kinds.get(name)
        if kind is not None and own.is_floating_point() and not kind.startswith(("F", "BF")):
            raise ValueError(f"{name} is stored as {kind}, and weights are floating-point numbers")


def optimizer_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the tensors of the optimizer's state, as `parameter.name`; a dict within adds its own name."""
    tensors: dict[str, Tensor] = {}
    for parameter, values in optimizer.state_dict()["state"].items():
        _take_tensors(values, f"{parameter}", tensors)
    return tensors


def optimizer_numbers(optimizer: Optimizer) -> str:
    """Return the rest of the optimizer's state as JSON text: numbers, and the groups of its parameters."""
    state = optimizer.state_dict()
    numbers = {str(parameter): _take_tensors(values, "", {}) for parameter, values in state["state"].items()}
    rest = {"param_groups": [_plain(group) for group in state["param_groups"]], "state": numbers}
    return json.dumps(rest, indent=2) + "\n"


def save_moments(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write the tensors of an optimizer's state; its numbers are written as `OPTIMIZER_NUMBERS`."""
    with utf8_name(folder) as named:
        save_file(_apart(tensors), named / f"{_OPTIMIZER}.safetensors")


def load_optimizer(optimizer: Optimizer, folder: Path) -> None:
    """Put back the state that was written, into an optimizer over the same parameters; ValueError for any other."""
    rest = json.loads((folder / OPTIMIZER_NUMBERS).read_text("utf-8"))
    state: dict[int, dict[str, Any]] = {int(parameter): dict(values) for parameter, values in rest["state"].items()}
    with utf8_name(folder) as named:
        tensors = load_file(named / f"{_OPTIMIZER}.safetensors")
    for name, tensor in tensors.items():
        parameter, *within, key = name.split(".")
        values = state.setdefault(int(parameter), {})
        for part in within:
            values = values.setdefault(part, {})
            if not isinstance(values, dict):
                raise ValueError(f"the saved state of parameter {parameter} holds {part} twice")
        values[key] = tensor
    _require_shapes(optimizer, state)
    optimizer_states.require_like(optimizer, state)
    _require_all(state)
    _require_steps(state)
    groups = [_restored(group) for group in rest["param_groups"]]
    counters.require_groups(groups, optimizer.param_groups)
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _take_tensors(values: dict[str, Any], place: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return the values without tensors, which are put into `tensors` under their place."""
    rest: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            tensors[f"{place}.{name}"] = value.contiguous()
        else:
            rest[name] = _take_tensors(value, f"{place}.{name}", tensors) if isinstance(value, dict) else value
    return rest


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with copies of those that share memory: safetensors takes each memory once."""
    seen: set[int] = set()
    found = {}
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        found[name] = tensor.clone() if memory in seen else tensor
        seen.add(memory)
    return found


def _require_shapes(optimizer: Optimizer, state: Mapping[int, Mapping[str, Any]]) -> None:
    """Torch checks no shapes here; its optimizers would run over memory that is not theirs."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, values in state.items():
        if not 0 <= index < len(parameters):
            raise ValueError(f"the optimizer has {len(parameters)} parameters, its saved state one of number {index}")
        shape = tuple(parameters[index].shape)
        for name in _SHAPED & values.keys():
            if isinstance(values[name], Tensor) and tuple(values[name].shape) != shape:
                raise ValueError(f"parameter {index} is {shape}, its saved {name} {tuple(values[name].shape)}")
            if isinstance(values[name], Tensor) and not _may_hold_moments(values[name], parameters[index]):
                raise ValueError(f"the saved {name} of parameter {index} holds {values[name].dtype}")


def _may_hold_moments(tensor: Tensor, parameter: Tensor) -> bool:
    wider = tensor.dtype is torch.float64 and parameter.dtype is not torch.float64
    return (tensor.is_floating_point() and not wider) or tensor.dtype is torch.uint8  # the codes of 8-bit moments


def _require_all(state: Mapping[int, Mapping[str, Any]]) -> None:
    """Either no parameter has a state, or each that is named has one."""
    empty = [index for index, values in state.items() if not values]
    if empty and len(empty) < len(state):
        raise ValueError(f"parameter {empty[0]} has no saved state, others have")


def _require_steps(state: Mapping[int, Mapping[str, Any]]) -> None:
    for index, values in state.items():
        step = values.get("step", 0)
        if isinstance(step, Tensor) and (step.is_floating_point() or step.dtype is torch.int64):
            step = step.item() if step.numel() == 1 else math.nan
        if not isinstance(step, int | float) or not 0 <= step < counters.MOST or step != int(step):
            raise ValueError(f"the saved step of parameter {index} is {str(values['step'])[:60]}")


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value.item() if isinstance(value, Tensor) else value for name, value in group.items()}


def _restored(group: dict[str, Any]) -> dict[str, Any]:
    lists = {name: value for name, value in group.items() if isinstance(value, list) and name != "params"}
    return group | {name: tuple(value) for name, value in lists.items()}  # JSON knows no tuples


def count_without_embeddings(model: nn.Module) -> int:
    """Return the count of the model's parameters that take part in matrix products: all but embedding tables."""
    tables = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    return sum(parameter.numel() for name, parameter in model.named_parameters() if name not in tables)


def device_of(use_cpu: bool) -> torch.device:
    """Return the device to train on: the first GPU unless the CPU was asked for or there is none."""
    return torch.device("cuda" if torch.cuda.is_available() and not use_cpu else "cpu")
