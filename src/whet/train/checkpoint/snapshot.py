"""What a checkpoint will hold, gathered at one step: training may go on, and the files stay those of that step."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from whet.precision import policy
from whet.train.checkpoint import best, content, weights
from whet.train.checkpoint.manifest import MANIFEST
from whet.train.compat import overrides
from whet.train.resume import compare
from whet.train.state import gather

if TYPE_CHECKING:
    from whet.train.loop import Fit


@dataclass
class Buffers:
    """Memory that snapshots are copied into, kept from one to the next: fresh pages cost more than the copying."""

    tensors: dict[str, Tensor] = field(default_factory=dict)

    def copies(self, tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
        """Return copies on the CPU; names of one tensor are names of one copy."""
        made: dict[tuple[Any, ...], Tensor] = {}
        return {name: self._copy(f"{prefix}.{name}", tensor, made) for name, tensor in tensors.items()}

    def _copy(self, name: str, tensor: Tensor, made: dict[tuple[Any, ...], Tensor]) -> Tensor:
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and place in made:
            return made[place]
        kept = self.tensors.get(name)
        if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
            kept = self.tensors[name] = torch.empty_like(tensor, device="cpu", memory_format=torch.contiguous_format)
        made[place] = kept.copy_(tensor.detach())
        return kept


@dataclass(frozen=True)
class Snapshot:
    """The content of one checkpoint: small files as text, tensors as they are or, with buffers, as copies."""

    texts: Mapping[str, str]
    model: nn.Module
    processing: Any
    weights: Mapping[str, Tensor]
    tensors: Mapping[str, Mapping[str, Tensor]]
    """Those of each part of the run's state."""
    save_model: Callable[[Path], None] | None = None
    """The user's own `save_model`; what it writes is the checkpoint's model."""

    def write_texts(self, folder: Path) -> None:
        """Write the small files, and what a user's own `save_model` writes."""
        if self.save_model is not None:
            self.save_model(folder)
        weights.save_processing(self.processing, folder, taken={*self.texts, *weights.FILES, MANIFEST})
        for name, text in self.texts.items():
            (folder / name).write_text(text, "utf-8")

    def write_tensors(self, folder: Path) -> None:
        """Write weights and optimizer state: most of the bytes, and nearly all of the time."""
        if self.save_model is None or not weights.has_weights(folder):
            weights.save_weights(self.model, folder, self.weights)
        content.write_tensors(self.tensors, folder)


def take(fit: Fit, buffers: Buffers | None = None) -> Snapshot:
    """Return what the run's checkpoint would hold now; with buffers it stays so whatever the run does next."""
    model, state = fit.trainer.model, fit.trainer.model.state_dict()
    text, tensors = content.divided(gather(fit.parts()))
    if buffers is not None:
        model = _with_own_config(model)
        state = buffers.copies(state, "weights")
        tensors = {part: buffers.copies(found, part) for part, found in tensors.items()}
    return Snapshot(texts(fit, text), model, fit.trainer.processing_class, state, tensors, _by_user(fit))


def texts(fit: Fit, state: str) -> dict[str, str]:
    """Return the small files of a checkpoint around the text of its state."""
    return {
        compare.ARGUMENTS: policy.as_run(fit.args, fit.trainer.precision) + "\n",
        compare.FINGERPRINT: json.dumps(fit.saver.identity, indent=2) + "\n",
        content.STATE: state,
        content.TRAINER_STATE: json.dumps(best.as_saved(fit.state), indent=2, sort_keys=True) + "\n",
    }


def _by_user(fit: Fit) -> Callable[[Path], None] | None:
    """Return the overridden `save_model` of the Trainer, which transformers calls for each checkpoint too."""
    save_model = fit.trainer.save_model
    if not overrides.changed(fit.trainer, "save_model"):
        return None
    return lambda folder: save_model(str(folder), **overrides.given(save_model, _internal_call=True))


def _with_own_config(model: nn.Module) -> nn.Module:
    """Return the model under another name, with configurations that later changes do not reach."""
    other = copy.copy(model)
    for name in ("config", "generation_config"):
        if getattr(model, name, None) is not None:
            setattr(other, name, copy.deepcopy(getattr(model, name)))
    return other
