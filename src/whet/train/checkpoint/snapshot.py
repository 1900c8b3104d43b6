"""The content of a checkpoint, collected at one step, so that training can continue while it is written."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import TrainerState

from whet.precision import policy
from whet.precision.policy import Precision
from whet.train.checkpoint import best, content, weights
from whet.train.checkpoint.manifest import MANIFEST
from whet.train.meter import Meter
from whet.train.resume import compare
from whet.train.run import Run
from whet.train.state import Stateful, collect_states


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
        kept = self.tensors.get(name)
        if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
            kept = self.tensors[name] = torch.empty_like(tensor, device="cpu", memory_format=torch.contiguous_format)
        made[memory] = kept.copy_(tensor.detach())
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

    def write_texts(self, folder: Path) -> None:
        """Write the small files."""
        weights.save_processing(self.processing, folder, taken={*self.texts, *weights.FILES, MANIFEST})
        for name, text in self.texts.items():
            (folder / name).write_text(text, "utf-8")

    def write_tensors(self, folder: Path) -> None:
        """Write weights and optimizer state: most of the bytes, and nearly all of the time."""
        weights.save_weights(self.model, folder, self.weights)
        content.write_tensors(self.tensors, folder)


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Everything that a checkpoint of the run is made from."""

    run: Run
    counters: TrainerState
    meter: Meter
    optimizer: Optimizer
    precision: Precision
    identity: dict[str, Any]
    """The facts that a resumed run is compared with."""
    parts: Callable[[], Mapping[str, Stateful]]
    """Returns the parts of the run's state besides the model, in the order in which they are restored."""
    to_save: Callable[[], AbstractContextManager[None]] = nullcontext
    """Puts what a checkpoint holds in its place, for a block: the averaged weights, and on rank 0 what ranks share."""
    is_shared: Callable[[], bool] = lambda: False
    """Whether a rank alone has less than a checkpoint holds."""


def take(state: RunState, buffers: Buffers | None = None, *, only_model: bool = False) -> Snapshot:
    """Return the content of a checkpoint at this step; with buffers, later steps do not change it."""
    model, processing = state.run.model, state.run.processing_class
    weights = dict(model.state_dict())
    text, tensors = (None, {}) if only_model else content.split_parts(collect_states(state.parts()))
    if buffers is not None:
        model = _with_own_config(model)
        weights = buffers.copies(weights, "weights")
        tensors = {part: buffers.copies(found, part) for part, found in tensors.items()}
    return Snapshot(texts(state, text), model, processing, weights, tensors)


def texts(state: RunState, parts: str | None) -> dict[str, str]:
    """Return the small files of a checkpoint; `parts` is the text of `state.json`, None: there is none."""
    return {
        compare.ARGUMENTS: policy.as_run(state.run.args, state.precision) + "\n",
        compare.FINGERPRINT: json.dumps(state.identity, indent=2) + "\n",
        **({} if parts is None else {content.STATE: parts}),
        content.TRAINER_STATE: json.dumps(best.as_saved(state.counters), indent=2, sort_keys=True) + "\n",
    }


def _with_own_config(model: nn.Module) -> nn.Module:
    """Return a shallow copy of the model whose configurations do not follow later changes."""
    other = copy.copy(model)
    for name in ("config", "generation_config"):
        if getattr(model, name, None) is not None:
            setattr(other, name, copy.deepcopy(getattr(model, name)))
    return other
