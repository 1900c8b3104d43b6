"""Checks before the first step that the disk has room for the checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from whet.errors import StorageError
from whet.log import logger
from whet.train.checkpoint import content, optimizer_state, optimizer_template, snapshot
from whet.train.checkpoint.optimizer_state import OptimizerState
from whet.train.checkpoint.snapshot import RunState
from whet.train.few_samples.weight_average import WeightAverage
from whet.train.state import State, collect_states

_MANIFEST_ENTRY_BYTES = 130
_ROOM_FOR_SAVES = 2
_MB = 1e6


def forecast_bytes(state: RunState) -> int:
    """Return the bytes of one checkpoint of this run; exact except for the log, which grows with the run."""
    model = state.run.model
    if state.run.args.save_only_model:
        return _total_bytes(state, None, {})
    parts = dict(state.parts())
    largest = {"optimizer": _optimizer_state(state.optimizer, model)}
    if isinstance(average := parts.get("average"), WeightAverage):
        largest["average"] = average.largest_state()
    states = {**collect_states({name: part for name, part in parts.items() if name not in largest}), **largest}
    return _total_bytes(state, *content.split_parts(states))


def _total_bytes(state: RunState, text: str | None, tensors: Mapping[str, Mapping[str, Tensor]]) -> int:
    model = state.run.model
    parts = [
        *(len(text.encode()) for text in snapshot.texts(state, text).values()),
        _tensors_bytes(_untied(model.state_dict())),
        *map(_tensors_bytes, tensors.values()),
        *_model_texts(model, state.run.processing_class),
    ]
    return sum(parts) + _MANIFEST_ENTRY_BYTES * (len(parts) + 2)


def check(state: RunState, n_saved: int) -> None:
    """Raise StorageError if the disk has no room for the checkpoints that a run needs at the same time.

    These are two: the last one, and the next one while it is written. `n_saved` of them exist already.
    """
    run = state.run
    if run.plan.save.strategy == "no":
        return
    size, free = forecast_bytes(state), free_bytes(run.output_dir)
    n_needed = max(1, _ROOM_FOR_SAVES - n_saved)
    figures = f"{size / _MB:,.1f} MB a checkpoint, {free / _MB:,.1f} MB free"
    if free < n_needed * size:
        raise StorageError(
            what=f"the disk has no room for {n_needed} checkpoints",
            got=f"{figures} in {run.output_dir}",
            why="a checkpoint is only deleted when the next one is complete, so both exist for a moment",
            fix="free space there, name another disk in --output_dir, or use --save_strategy no",
        )
    n_steps, every = run.plan.n_steps - state.counters.global_step, run.plan.save.every
    planned = n_steps // every if every else 0
    if run.args.save_total_limit is None and planned * size > free:
        logger.warning("%d checkpoints are planned, %s: --save_total_limit 2 would keep the newest", planned, figures)


def free_bytes(folder: Path) -> int:
    """Return the free bytes for this user in the folder, or in the one where it will be created."""
    place = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    return shutil.disk_usage(place).free


def _optimizer_state(optimizer: Optimizer, model: nn.Module) -> State:
    """Return the optimizer's state after a step: its own, or that of an equal one; two moments if that is unknown."""
    names = optimizer_state.names_in(optimizer, model)
    own = OptimizerState(optimizer, names).state()
    if own["state"]:
        return own
    parameters = {
        name: parameter
        for name, parameter in zip(names, optimizer_state.parameters_of(optimizer), strict=True)
        if parameter.requires_grad
    }
    try:
        return OptimizerState(optimizer_template.after_a_step(optimizer), list(parameters)).state()
    except Exception:  # an optimizer that does not run without data
        moments = {name: torch.empty_like(parameter, device="meta") for name, parameter in parameters.items()}
        return own | {"state": {name: {"first": one, "second": one} for name, one in moments.items()}}


def _untied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors, each memory only once."""
    places = {
        (tensor.data_ptr(), tuple(tensor.shape), tensor.stride()) if tensor.numel() else name: name
        for name, tensor in tensors.items()
    }
    return {name: tensors[name] for name in places.values()}


def _tensors_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Return the bytes of a safetensors file: length, header with one entry a tensor, data."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [begin, end]}  # pyright: ignore[reportArgumentType]
    return 8 + len(json.dumps(header, separators=(",", ":"))) + end


def _model_texts(model: nn.Module, processing: Any) -> Iterable[int]:
    """Yield the sizes of the configuration and the tokenizer."""
    for holder in (getattr(model, "config", None), getattr(model, "generation_config", None)):
        if hasattr(holder, "to_json_string"):
            yield len(holder.to_json_string().encode())  # pyright: ignore[reportOptionalMemberAccess]
    backend = getattr(processing, "backend_tokenizer", None)
    if backend is not None:
        yield len(backend.to_str(pretty=True).encode())
