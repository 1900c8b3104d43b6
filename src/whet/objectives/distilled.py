"""Distillation: a model learns the labels, and to agree with a teacher's probabilities (Hinton et al. 2015).

The loss is (1 - alpha) times that of the labels plus alpha T^2 KL(teacher || student), both softmaxes at temperature T
(arXiv:1503.02531, section 2). Evaluations compute the loss of the labels alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax
from torch.utils.checkpoint import checkpoint

from whet.data.batch import Batch
from whet.data.padding import Padding
from whet.kernels.cross_entropy import chunk_rows, to_rows
from whet.models.experts.routing import unwatched
from whet.models.packable import predicts_next_tokens
from whet.models.packed import PackedModel
from whet.objectives import router_loss
from whet.objectives.base import IGNORED, Objective, Rows
from whet.objectives.next_tokens import PackedNextTokens, head_of, logits_of
from whet.objectives.packed_head import PackedHead
from whet.objectives.span import PackedSpans, SpanObjective

HARD, SOFT = "hard_loss", "soft_loss"
"""The loss of the labels, and T^2 times that of agreeing with the teacher: the two parts of the loss."""
_NO_TOKEN = -1e4
"""A logit whose probability is 0 in float32."""


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """How a teacher takes part in the loss."""

    temperature: float
    """Divides the logits of both: a high one shows what the teacher thinks of the wrong answers."""
    alpha: float
    """The share of the teacher in the loss."""
    teacher: str
    """A checksum of the teacher's weights."""

    def mixed(self, output: Mapping[str, Tensor]) -> Tensor:
        """Return the loss of both parts."""
        return (1 - self.alpha) * output[HARD] + self.alpha * output[SOFT]

    def divergence(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return T^2 KL(teacher || student) of each row of logits (rows, C), () summed."""
        ours, theirs = (log_softmax(one.float() / self.temperature, -1) for one in (student, teacher))
        return self.temperature**2 * kl_div(ours, theirs, reduction="sum", log_target=True)

    @property
    def identity(self) -> dict[str, Any]:
        """What a resumed run must have in common with the checkpoint."""
        return {"kind": "distillation", **vars(self)}


class Distilled:
    """Any objective with logits for rows, tokens or spans, mixed with the agreement with a teacher."""

    is_own_loss = False

    def __init__(self, plain: Objective, student: nn.Module, teacher: Objective, how: Distillation) -> None:
        self.plain, self._student, self._teacher, self._how = plain, student, teacher, how

    @property
    def identity(self) -> dict[str, Any]:
        """What a resumed run must have in common with the checkpoint."""
        return self._how.identity

    @property
    def packed(self) -> bool:
        """Whether batches run without padding."""
        return self.plain.packed

    @property
    def teacher(self) -> nn.Module:
        """The model that computes each batch that is trained on, without gradients."""
        return _model_of(self._teacher)

    @property
    def packed_model(self) -> PackedModel | None:
        """The student, if it reads batches without padding."""
        return self.plain.packed_model

    @property
    def padding(self) -> Padding:
        """That of the student's loss."""
        return self.plain.padding

    @property
    def needs_logits(self) -> bool:
        """That of the student's objective."""
        return getattr(self.plain, "needs_logits", True)

    @needs_logits.setter
    def needs_logits(self, wanted: bool) -> None:
        if hasattr(self.plain, "needs_logits"):
            setattr(self.plain, "needs_logits", wanted)  # noqa: B010

    def batch(self, dataset: Any, rows: Rows, first_slot: int, padded_to: np.ndarray | None = None) -> Batch:
        return self.plain.batch(dataset, rows, first_slot, padded_to)

    def count(self, batch: Batch) -> int:
        return self.plain.count(batch)

    def forward(self, batch: Batch, *, seed: int, step: int) -> Any:
        output = self.plain.forward(batch, seed=seed, step=step)
        if not self._student.training:
            return output
        with torch.no_grad(), unwatched():
            theirs = self._teacher.forward(_for_teacher(batch, self.plain, self._teacher), seed=seed, step=step)
        return {HARD: self.plain.loss_sum(output, batch), SOFT: self._divergence(output, theirs, batch)}

    def loss_sum(self, output: Any, batch: Batch) -> Tensor:
        return self._how.mixed(output) if _is_mixed(output) else self.plain.loss_sum(output, batch)

    def loss_parts(self, output: Any, batch: Batch) -> Mapping[str, Tensor]:
        return _detached(output) if _is_mixed(output) else self.plain.loss_parts(output, batch)

    def logits(self, output: Any, batch: Batch) -> tuple[np.ndarray, ...]:
        return self.plain.logits(output, batch)

    def _divergence(self, ours: Any, theirs: Any, batch: Batch) -> Tensor:
        if isinstance(self.plain, SpanObjective):
            assert isinstance(self._teacher, SpanObjective)
            sides = (side.loss_logits(out, batch) for side, out in ((self.plain, ours), (self._teacher, theirs)))
            student, teacher = (_span_rows(*found) for found in sides)
            both = [self._how.divergence(*pair) for pair in zip(student, teacher, strict=True)]
            return torch.stack(both).sum() / 2  # as the loss of the labels is
        student, teacher = _targets(self.plain, ours, batch), _targets(self._teacher, theirs, batch)
        return self._how.divergence(student, teacher) if self.count(batch) else student.float().sum() * 0.0


class DistilledNextTokens(PackedNextTokens):
    """Next tokens, mixed with the agreement with a teacher; the logits of both exist a chunk at a time."""

    def __init__(self, plain: PackedNextTokens, teacher: PackedNextTokens, how: Distillation) -> None:
        assert plain.packed_model is not None
        super().__init__(plain.model, plain.packed_model, plain.collate, plain.columns)
        self.plain, self._teacher, self._how = plain, teacher, how

    @property
    def identity(self) -> dict[str, Any]:
        """What a resumed run must have in common with the checkpoint."""
        return self._how.identity

    @property
    def teacher(self) -> nn.Module:
        """The model that computes each batch that is trained on, without gradients."""
        return _model_of(self._teacher)

    def forward(self, batch: Batch, *, seed: int, step: int) -> Any:
        if not self.model.training:
            return super().forward(batch, seed=seed, step=step)
        with torch.no_grad(), unwatched():
            theirs = self._teacher.run(batch, lambda states, *_: states, seed=seed, step=step)
        return self.run(batch, partial(self._mixed, theirs), seed=seed, step=step)

    def loss_sum(self, output: Any, batch: Batch) -> Tensor:
        return self._how.mixed(output) if _is_mixed(output) else super().loss_sum(output, batch)

    def loss_parts(self, output: Any, batch: Batch) -> dict[str, Tensor]:
        return _detached(output) if _is_mixed(output) else super().loss_parts(output, batch)

    def _mixed(self, theirs: Tensor, states: Tensor, _: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return the sums of both parts for hidden states (M, D) and those of the teacher (M, E)."""
        assert self._teacher.packed_model is not None
        heads = head_of(self._packed.module), head_of(self._teacher.packed_model.module)
        n_rows = min(chunk_rows(head.weight) for head, _ in heads)
        sums = states.new_zeros(2, dtype=torch.float32)
        for ours, other, labels in zip(*(one.split(n_rows) for one in (states, theirs, targets)), strict=True):
            sums = sums + checkpoint(_chunk_sums, self._how, heads, ours, other, labels, use_reentrant=False)
        return {HARD: sums[0], SOFT: sums[1]}


def without_teacher(objective: Objective) -> Objective:
    """Return the objective whose passes run the student alone: this one, if it has no teacher."""
    return objective.plain if isinstance(objective, Distilled | DistilledNextTokens) else objective


def _model_of(objective: Any) -> nn.Module:
    packed: PackedModel | None = objective.packed_model
    return objective.model if packed is None else packed.module


def _chunk_sums(how: Distillation, heads: Any, states: Tensor, theirs: Tensor, labels: Tensor) -> Tensor:
    """Return the cross entropy and the divergence of a chunk of targets, (2,) float32."""
    logits = logits_of(states, *heads[0]).float()
    with torch.no_grad():
        wanted = logits_of(theirs, *heads[1]).float()
    real, n_words = labels != IGNORED, min(logits.shape[-1], wanted.shape[-1])  # some models pad their vocabulary
    soft = how.divergence(logits[real, :n_words], wanted[real, :n_words])
    return torch.stack([cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum"), soft])


def _is_mixed(output: Any) -> bool:
    return isinstance(output, dict) and SOFT in output


def _detached(output: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: part.detach().float() for name, part in output.items()}


def _for_teacher(batch: Batch, plain: Objective, teacher: Objective) -> Batch:
    """Return the batch as the teacher reads it: families count positions from another number."""
    if not (isinstance(plain, PackedSpans) and isinstance(teacher, PackedSpans)):
        return batch
    moved = batch.inputs["position_ids"] + teacher.model.position_offset - plain.model.position_offset
    read = {name: value for name, value in batch.inputs.items() if name in {*teacher.columns.names, "input_ids"}}
    return replace(batch, inputs={**read, "position_ids": moved})


def _span_rows(start: Tensor, end: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits of starts and of ends as tables (rows, longest); places that are no token have none."""
    first, last = (to_rows(side.float(), cu_seqlens, _NO_TOKEN) for side in (start, end))
    return first, last


def _targets(objective: Objective, output: Any, batch: Batch) -> Tensor:
    """Return the logits (M, C) of the batch's targets: its rows, or its tokens with a label."""
    logits, labels = output["logits"], batch.inputs.get("labels")
    if logits.dim() == 2:
        return logits
    if isinstance(objective, PackedHead) and batch.columns is not None:
        return logits[0]  # it has computed those alone
    assert isinstance(labels, Tensor)
    return logits[labels != IGNORED]


def distilled(plain: Any, student: nn.Module, teacher: Any, how: Distillation) -> Any:
    """Return the objective with a teacher; None if the two do not compute the same kind of logits."""
    router_loss.require_none(student, "distillation")
    if isinstance(plain, PackedNextTokens) or isinstance(teacher, PackedNextTokens):
        both = type(plain) is type(teacher) is PackedNextTokens
        return DistilledNextTokens(plain, teacher, how) if both else None
    if predicts_next_tokens(student):  # the logits of padded rows would have to be moved by one
        return None
    spans = [isinstance(one, SpanObjective) for one in (plain, teacher)]
    if any(spans) and type(plain) is not type(teacher):
        return None
    return Distilled(plain, student, teacher, how)
