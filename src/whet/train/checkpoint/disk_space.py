"""Whether the disk has room: the size of a checkpoint, worked out before the first step is taken."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from whet.errors import StorageError
from whet.log import logger
from whet.train.checkpoint import content, optimizer_state, optimizer_template, snapshot
from whet.train.checkpoint.optimizer_state import OptimizerState
from whet.train.state import State, gather

if TYPE_CHECKING:
    from whet.train.loop import Fit

_MANIFEST_ENTRY_BYTES = 130
_ROOM_FOR_SAVES = 2
_MB = 1e6


def forecast_bytes(fit: Fit) -> int:
    """Return the bytes of one checkpoint of this run; exact but for the log history, which grows with the run."""
    model = fit.trainer.model
    others = {name: part for name, part in fit.parts().items() if name != "optimizer"}
    text, tensors = content.divided({**gather(others), "optimizer": _optimizer_state(fit)})
    parts = [
        *(len(text.encode()) for text in snapshot.texts(fit, text).values()),
        _tensors_bytes(_untied(model.state_dict())),
        *map(_tensors_bytes, tensors.values()),
        *_model_texts(model, fit.trainer.processing_class),
    ]
    return sum(parts) + _MANIFEST_ENTRY_BYTES * (len(parts) + 2)


def check(fit: Fit) -> None:
    """Raise StorageError where the disk has no room for the saves that a run needs at the same time.

    That is two, the one that is there and the one that takes its place; a run that goes on has the first already.
    """
    save, args = fit.plan.save, fit.args
    if save.strategy == "no":
        return
    output_dir = Path(args.output_dir)
    size, free = forecast_bytes(fit), free_bytes(output_dir)
    there = len(fit.saver.folders)
    needed = max(1, _ROOM_FOR_SAVES - there) * size
    figures = f"{size / _MB:,.1f} MB a checkpoint, {free / _MB:,.1f} MB free"
    if free < needed:
        raise StorageError(
            what=f"the disk has no room for {max(1, _ROOM_FOR_SAVES - there)} checkpoints",
            got=f"{figures} in {output_dir}",
            why="a checkpoint is only deleted when the next one is complete, so both exist for a moment",
            fix="free space there, name another disk in --output_dir, or use --save_strategy no",
        )
    planned = (fit.plan.n_steps - fit.state.global_step) // save.every if save.every else 0
    if args.save_total_limit is None and planned * size > free:
        logger.warning("%d checkpoints are planned, %s: --save_total_limit 2 would keep the newest", planned, figures)


def free_bytes(folder: Path) -> int:
    """Return what this user may still write in the folder, or where it will be made."""
    place = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    return shutil.disk_usage(place).free


def _optimizer_state(fit: Fit) -> State:
    """Return the optimizer's state after a step: its own, or that of one like it; two moments if that is unknown."""
    optimizer, names = fit.optimizer, optimizer_state.names_in(fit.optimizer, fit.trainer.model)
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
    except Exception:  # an optimizer that cannot work without data
        moments = {name: torch.empty_like(parameter, device="meta") for name, parameter in parameters.items()}
        return own | {"state": {name: {"first": one, "second": one} for name, one in moments.items()}}


def _untied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors without the second names of one memory."""
    places = {
        (tensor.data_ptr(), tuple(tensor.shape)) if tensor.numel() else name: name for name, tensor in tensors.items()
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
