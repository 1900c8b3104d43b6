"""Weights and optimizer state in and out of folders: safetensors for tensors, JSON for the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor, nn
from torch.optim import Optimizer

from whet.models.quiet import quiet

WEIGHTS = "model.safetensors"
_OPTIMIZER = "optimizer"


def save_weights(model: nn.Module, folder: Path) -> None:
    """Write the model: with its configuration where it is one of transformers', else its weights alone."""
    if hasattr(model, "save_pretrained"):
        with quiet():
            model.save_pretrained(folder)  # pyright: ignore[reportCallIssue]
    else:
        save_model(model, str(folder / WEIGHTS))


def load_weights(model: nn.Module, folder: Path) -> None:
    """Put the weights of the folder into the model, name by name."""
    index = folder / f"{WEIGHTS}.index.json"
    if not index.exists():
        load_model(model, folder / WEIGHTS)
        return
    shards = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    tensors = {name: t for shard in shards for name, t in load_file(folder / Path(shard).name).items()}
    model.load_state_dict(tensors)


def save_optimizer(optimizer: Optimizer, folder: Path) -> None:
    """Write the optimizer's state: tensors to safetensors, numbers to JSON."""
    state = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    numbers = {
        str(parameter): _take_tensors(values, f"{parameter}", tensors) for parameter, values in state["state"].items()
    }
    save_file(_apart(tensors), folder / f"{_OPTIMIZER}.safetensors")
    rest = {"param_groups": [_plain(group) for group in state["param_groups"]], "state": numbers}
    (folder / f"{_OPTIMIZER}.json").write_text(json.dumps(rest, indent=2) + "\n", "utf-8")


def load_optimizer(optimizer: Optimizer, folder: Path) -> None:
    """Put back the state that `save_optimizer` wrote, into an optimizer over the same parameters."""
    rest = json.loads((folder / f"{_OPTIMIZER}.json").read_text("utf-8"))
    state: dict[int, dict[str, Any]] = {int(parameter): dict(values) for parameter, values in rest["state"].items()}
    for name, tensor in load_file(folder / f"{_OPTIMIZER}.safetensors").items():
        parameter, *within, key = name.split(".")
        values = state.setdefault(int(parameter), {})
        for part in within:
            values = values.setdefault(part, {})
        values[key] = tensor
    groups = [_restored(group) for group in rest["param_groups"]]
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


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with copies of those that share memory: safetensors takes each memory once."""
    seen: set[int] = set()
    found = {}
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        found[name] = tensor.clone() if memory in seen else tensor
        seen.add(memory)
    return found


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
