"""The content of a checkpoint, collected at one step, so that training can continue while it is written.

The bytes that a checkpoint takes are known before the first step, and the disk must have room for them.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import TrainerState

from whet.errors import StorageError
from whet.log import logger
from whet.models import adapters
from whet.precision import policy
from whet.store import compare, optimizer, weights
from whet.store.compare import Run
from whet.store.find import STATE, TRAINER_STATE
from whet.store.manifest import MANIFEST
from whet.store.state import Pieces, State, Stateful, in_file_order, split_parts, write_pieces, write_tensors
from whet.strict_json import jsonable

_MANIFEST_ENTRY_BYTES = 130
_ROOM_FOR_SAVES = 2
_MB = 1e6


class Meter(Protocol):
    """Counts the rows of a run: those of this process, and those before it resumed."""

    @property
    def n_rows(self) -> int: ...
    @property
    def n_rows_before(self) -> int: ...
    @property
    def n_steps(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Everything that a checkpoint of the run is made from."""

    run: Run
    counters: TrainerState
    meter: Meter
    optimizer: Optimizer
    precision: policy.Precision
    identity: dict[str, Any]
    """The facts that a resumed run is compared with."""
    parts: Callable[[], Mapping[str, Stateful]]
    """Returns the parts of the run's state besides the model, in the order in which they are restored."""
    to_save: Callable[[], AbstractContextManager[None]] = nullcontext
    """Puts what a checkpoint holds in its place, for a block: the averaged weights, and on rank 0 what ranks share."""
    is_shared: Callable[[], bool] = lambda: False
    """Whether a rank alone has less than a checkpoint holds."""

    @cached_property
    def settings(self) -> str:
        """The settings of the run as a checkpoint holds them, as JSON text."""
        return policy.as_run(self.run.args, self.precision)

    def texts(self, parts: str | None) -> dict[str, str]:
        """Return the small files of a checkpoint; `parts` is the text of `state.json`, None: there is none."""
        return {
            **self.run.files,
            compare.ARGUMENTS: self.settings + "\n",
            compare.FINGERPRINT: json.dumps(self.identity, indent=2) + "\n",
            **({} if parts is None else {STATE: parts}),
            TRAINER_STATE: json.dumps(counters_as_saved(self.counters), indent=2, sort_keys=True) + "\n",
        }


def counters_as_saved(state: TrainerState) -> dict[str, Any]:
    """Return the state as it is saved: with the name of the best checkpoint, not its path, as the folder may move."""
    best = state.best_model_checkpoint
    return jsonable(dataclasses.asdict(state)) | {"best_model_checkpoint": Path(best).name if best else None}


@dataclass
class Buffers:
    """Memory that snapshots are copied into. It is reused: allocating pages costs more than the copy."""

    tensors: dict[str, Tensor] = field(default_factory=dict)

    def copies(self, tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
        """Return copies on the CPU; tensors that are the same share one copy."""
        made: dict[tuple[Any, ...], Tensor] = {}
        return {name: self._copy(f"{prefix}.{name}", tensor, made) for name, tensor in tensors.items()}

    def _copy(self, name: str, tensor: Tensor, made: dict[tuple[Any, ...], Tensor]) -> Tensor:
        memory = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and memory in made:
            return made[memory]
        made[memory] = kept = self._room(name, tensor).copy_(tensor.detach())
        return kept

    def filled(self, tensors: Mapping[str, Tensor], pieces: Pieces, prefix: str) -> dict[str, Tensor]:
        """Return tensors of these shapes on the CPU, with the bytes of the pieces."""
        found = {name: self._room(f"{prefix}.{name}", tensors[name]) for name in in_file_order(tensors)}
        for one in found.values():
            memory, at = one.view(-1).view(torch.uint8), 0
            while at < len(memory):
                piece = next(pieces)
                memory[at : at + len(piece)] = piece
                at += len(piece)
        return found

    def _room(self, name: str, tensor: Tensor) -> Tensor:
        kept = self.tensors.get(name)
        if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
            kept = self.tensors[name] = torch.empty_like(tensor, device="cpu", memory_format=torch.contiguous_format)
        return kept


@dataclass(frozen=True)
class Snapshot:
    """The content of one checkpoint: small files as text, tensors as they are or, with buffers, as copies."""

    texts: Mapping[str, str]
    model: nn.Module
    processing: Any
    weights: Mapping[str, Tensor]
    tensors: Mapping[str, Mapping[str, Tensor]]
    """The tensors of each part of the run's state."""
    incoming: Mapping[str, tuple[Mapping[str, Tensor], Pieces]] = field(default_factory=dict)
    """Of a part whose tensors several ranks hold: their shapes, and their bytes, which come as they are written."""

    def write_texts(self, folder: Path) -> None:
        """Write the small files."""
        weights.save_processing(self.processing, folder, taken={*self.texts, *weights.FILES, MANIFEST})
        for name, text in self.texts.items():
            (folder / name).write_text(text, "utf-8")

    def write_incoming(self, folder: Path) -> None:
        """Write what other ranks hold as well, while they send it; the rest needs this rank alone."""
        for part, (tensors, pieces) in self.incoming.items():
            write_pieces(tensors, pieces, folder, part)

    def drain(self) -> None:
        """Take what is left from the other ranks, which send it whether the disk has room or not."""
        for _, pieces in self.incoming.values():
            exhaust(pieces)

    def write_tensors(self, folder: Path) -> None:
        """Write weights and optimizer state: most of the bytes, and nearly all of the time."""
        weights.save_weights(self.model, folder, self.weights)
        write_tensors(self.tensors, folder)


def take(state: RunState, buffers: Buffers | None = None, *, only_model: bool = False) -> Snapshot:
    """Return the content of a checkpoint at this step; with buffers, later steps do not change it."""
    model, own = state.run.model, adapters.read_by_save(state.run.model)
    text, tensors, incoming = None, {}, {}
    if not only_model:
        parts = state.parts()
        text, tensors = split_parts({name: part.state() for name, part in parts.items()})
        for name, part in parts.items():
            if name in tensors and (pieces := pieces_of(part)) is not None:
                incoming[name] = tensors.pop(name), pieces
    if buffers is not None:
        model = _with_own_config(model)
        own = buffers.copies(own, "weights")
        tensors = {part: buffers.copies(found, part) for part, found in tensors.items()}
        tensors |= {part: buffers.filled(found, pieces, part) for part, (found, pieces) in incoming.items()}
        incoming = {}
    return Snapshot(state.texts(text), model, state.run.processing_class, own, tensors, incoming)


def pieces_of(part: Any) -> Pieces | None:
    """Return the bytes of a part whose tensors several ranks hold, on rank 0; None for any other part.

    On the other ranks nothing comes: as `exhaust` goes through it, they send what they hold.
    """
    return part.pieces() if hasattr(part, "pieces") else None


def exhaust(pieces: Pieces) -> None:
    """Go through what is left of the pieces."""
    deque(pieces, maxlen=0)


def _with_own_config(model: nn.Module) -> nn.Module:
    """Return a shallow copy of the model whose configurations do not follow later changes."""
    other = copy.copy(model)
    for name in ("config", "generation_config"):
        if getattr(model, name, None) is not None:
            setattr(other, name, copy.deepcopy(getattr(model, name)))
    for name, one in vars(model).items():
        if isinstance(one, MethodType) and one.__self__ is model:  # a method of its own, such as a save_pretrained
            setattr(other, name, MethodType(one.__func__, other))
    return other


# ---- room on the disk ----


def require_room(state: RunState, n_saved: int, freed_bytes: int = 0) -> None:
    """Raise StorageError if the disk has no room for the checkpoints that a run needs at the same time.

    These are two: the last one, and the next one while it is written. `n_saved` of them exist already, and so many
    bytes are freed before the first is written.
    """
    run = state.run
    if run.plan.save.strategy == "no":
        return
    size, free = forecast_bytes(state), free_bytes(run.output_dir) + freed_bytes
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


def forecast_bytes(state: RunState) -> int:
    """Return the bytes of one checkpoint of this run; exact except for the log, which grows with the run."""
    model, text, tensors = state.run.model, None, {}
    if not state.run.args.save_only_model:
        text, tensors = split_parts({name: _largest(name, part, state) for name, part in state.parts().items()})
    parts = [
        *(len(text.encode()) for text in state.texts(text).values()),
        *(_tensors_bytes(_untied(file)) for file in adapters.files_of(model)),
        *map(_tensors_bytes, tensors.values()),
        *_model_texts(model, state.run.processing_class),
    ]
    return sum(parts) + _MANIFEST_ENTRY_BYTES * (len(parts) + 2)


def free_bytes(folder: Path) -> int:
    """Return the free bytes for this user in the folder, or in the one where it will be created."""
    place = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    return shutil.disk_usage(place).free


def _largest(name: str, part: Any, state: RunState) -> State:
    """Return the state of a part, as large as it becomes: `largest_state` of a part that grows."""
    if name == "optimizer":
        return optimizer.state_after_a_step(state.optimizer, state.run.model)
    return part.largest_state() if hasattr(part, "largest_state") else part.state()


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
