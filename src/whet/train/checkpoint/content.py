"""The files of a checkpoint: how the state of a run is written and read.

`state.json` holds the plain values of all parts, `<part>.safetensors` the tensors of one part. `trainer_state.json`
holds the counters and the log as transformers writes them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from whet.errors import ConfigError
from whet.paths import utf8_name
from whet.train.state import State, join, split

STATE, TRAINER_STATE = "state.json", "trainer_state.json"


def split_parts(parts: Mapping[str, State]) -> tuple[str, dict[str, dict[str, Tensor]]]:
    """Return the text of `state.json`, and the tensors of each part that has any."""
    plain, tensors = {}, {}
    for name, state in parts.items():
        plain[name], found = split(state)
        if found:
            tensors[name] = found
    return _text(plain), tensors


def write_tensors(tensors: Mapping[str, Mapping[str, Tensor]], folder: Path) -> None:
    """Write the tensors of each part into its file."""
    with utf8_name(folder) as named:
        for part, found in tensors.items():
            save_file(_without_shared_memory(found), named / f"{part}.safetensors")


def read(folder: Path) -> dict[str, State]:
    """Return the states of the parts; raises ValueError if tensors and text do not match."""
    plain = json.loads((folder / STATE).read_text("utf-8"))
    if not isinstance(plain, dict):
        raise ValueError(f"{STATE} holds no object")
    states = {}
    for part, state in plain.items():
        file = f"{part}.safetensors"
        if not part.isidentifier():
            raise ValueError(f"{str(part)[:60]!r} in {STATE} is not a part of a run")
        with utf8_name(folder) as named:
            tensors = load_file(named / file) if (folder / file).is_file() else {}
        states[part] = join(state, tensors)
    return states


def _text(values: Any) -> str:
    try:
        return json.dumps(values, indent=1) + "\n"
    except TypeError as error:
        raise ConfigError(
            what="the state of the run cannot be written",
            got=str(error),
            why="checkpoints hold plain numbers and texts: they can be read without running code",
            fix="change what the optimizer or the callback exports as its state, or use --save_strategy no",
        ) from error


def _without_shared_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous tensors, those that share memory as copies: safetensors writes each memory once."""
    seen: set[int] = set()
    found = {}
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        found[name] = tensor.clone(memory_format=torch.contiguous_format) if memory in seen else tensor.contiguous()
        seen.add(memory)
    return found
