"""The cross entropy of start and end together, among the spans that end at or after their start."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from whet.config.fields import SpanLoss
from whet.data.batch import Batch, pack, rows_of
from whet.data.columns import Columns
from whet.data.padding import NO_PADDING, Padding
from whet.data.store import RowStore
from whet.errors import DataError
from whet.kernels.cross_entropy import row_cross_entropy, to_rows
from whet.models.packed import PackedModel, other_shape
from whet.objectives.base import IGNORED, Collate, Rows
from whet.objectives.collated import collated, real_places, run_seeded, widened

_NOWHERE = -1e30
"""The logit of a place that is no token: finite, so that differences of such logits are no NaN."""


def joint_cross_entropy(start: Tensor, end: Tensor, labels: tuple[Tensor, Tensor], cu_seqlens: Tensor) -> Tensor:
    """Return -log P(first, last) of each row, (rows,) fp32, for rows that are packed in the logits (N,).

    P(i, j) is proportional to exp(start_i + end_j) for i <= j within the row, and 0 for other pairs. It is the joint
    part of the compound loss of Fajcik et al. 2021 (arXiv:2008.12804, section 3), with a sum as the score of a pair,
    which needs no weights of its own. `labels` are first and last (rows,) int64, positions within their row. Time and
    memory are linear in the tokens: sums over starts are cumulative.
    """
    starts, ends = (to_rows(side.float(), cu_seqlens, _NOWHERE) for side in (start, end))
    first, last = labels
    until = starts.logcumsumexp(dim=1)
    normaliser = (until + ends).logsumexp(dim=1)
    scores = starts.gather(1, first[:, None]) + ends.gather(1, last[:, None])
    return normaliser - scores.squeeze(1)


SPAN_LABELS = ("start_positions", "end_positions")


class SpanObjective(ABC):
    """What packed and padded question answering share: cross entropy of each row's start and end.

    The softmax runs over the row's own tokens and, as in transformers' heads, over its padding if `padding` counts any.
    """

    is_own_loss = False
    padding: Padding
    kind: SpanLoss
    """independent: half the sum of both cross entropies. compound: half the sum of these and of the joint one."""

    def count(self, batch: Batch) -> int:
        missing = [name for name in SPAN_LABELS if name not in batch.labels]
        if missing:
            raise DataError(
                what="the rows hold no answer positions",
                got=sorted(batch.labels),
                why="a question answering model learns from start_positions and end_positions",
                fix=f"add the columns {' and '.join(missing)} to the data set",
            )
        return batch.n_rows

    @abstractmethod
    def span_logits(self, output: Any, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return start and end logits (N,) of the real tokens, rows end to end, and where rows begin (rows + 1,)."""

    @abstractmethod
    def loss_logits(self, output: Any, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return the same of all that the loss counts; a padding token's logits stand for all that it represents."""

    def loss_sum(self, output: Any, batch: Batch) -> Tensor:
        return reduce(torch.add, self._losses(output, batch).values()).sum() / 2

    def loss_parts(self, output: Any, batch: Batch) -> dict[str, Tensor]:
        if self.kind == "independent":
            return {}
        with torch.no_grad():
            return {f"{name}_loss": losses.sum() for name, losses in self._losses(output, batch).items()}

    def _losses(self, output: Any, batch: Batch) -> dict[str, Tensor]:
        """Return the cross entropies of each row, (rows,), by what they are of."""
        start, end, cu_seqlens = self.loss_logits(output, batch)
        first, last = (batch.labels[name] for name in SPAN_LABELS)
        losses = {
            "start": row_cross_entropy(start, first, cu_seqlens),
            "end": row_cross_entropy(end, last, cu_seqlens),
        }
        if self.kind == "compound":  # spans lie among the real tokens, whatever padding the softmaxes count
            start, end, cu_seqlens = self.span_logits(output, batch)
            losses["joint"] = joint_cross_entropy(start, end, (first, last), cu_seqlens)
        return losses

    def logits(self, output: Any, batch: Batch) -> tuple[np.ndarray, ...]:
        start, end, cu_seqlens = self.span_logits(output, batch)
        return tuple(to_rows(side, cu_seqlens, IGNORED).float().cpu().numpy() for side in (start, end))


class PackedSpans(SpanObjective):
    """Extractive question answering without padding."""

    packed = True

    def __init__(
        self, model: PackedModel, columns: Iterable[str], padding: Padding = NO_PADDING, kind: SpanLoss = "independent"
    ) -> None:
        self.model = self.packed_model = model
        self.padding, self.kind = padding, kind
        self.columns = Columns(["attention_mask", *SPAN_LABELS, *columns])

    def batch(self, dataset: Any, rows: Rows, first_slot: int, padded_to: np.ndarray | None = None) -> Batch:
        found = rows_of(dataset, rows, self.columns)
        read = {name: column for name, column in found.tokens.items() if name in self.columns.names}
        found = replace(found, tokens=read)  # a RowStore has the columns that it has
        _require_answers(found, rows)
        if self.kind == "compound":
            _require_order(found, rows)
        has_loss = found.labels.keys() >= set(SPAN_LABELS)
        return pack(
            found,
            first_slot=first_slot,
            position_offset=self.model.position_offset,
            unnumbered=self.model.unnumbered,
            padding=self.padding if has_loss else replace(self.padding, in_loss="none"),
            padded_to=padded_to,
        )

    def forward(self, batch: Batch, *, seed: int, step: int) -> Any:
        output: Any = self.model(batch, seed=seed, step=step)
        if output.start_logits.shape != (1, batch.n_computed):
            raise other_shape(output.start_logits, batch.n_computed)
        return output

    def span_logits(self, output: Any, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        start, end, cu_seqlens = self._row_logits(output, batch)
        padding = batch.padding
        if padding is None:
            return start, end, cu_seqlens
        return start[padding.real], end[padding.real], padding.real_starts

    def loss_logits(self, output: Any, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        start, end, cu_seqlens = self._row_logits(output, batch)
        if batch.padding is None:
            return start, end, cu_seqlens
        return start + batch.padding.log_sizes, end + batch.padding.log_sizes, cu_seqlens

    def _row_logits(self, output: Any, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        assert batch.cu_seqlens is not None
        return output.start_logits[0, : batch.n_in_rows], output.end_logits[0, : batch.n_in_rows], batch.cu_seqlens


class PaddedSpans(SpanObjective):
    """Extractive question answering for models that only know padded batches.

    All padding is computed there: the loss counts all of it, or none.
    """

    packed = False
    packed_model = None

    def __init__(
        self, model: nn.Module, collate: Collate, padding: Padding = NO_PADDING, kind: SpanLoss = "independent"
    ) -> None:
        self.model = model
        self.collate = collate
        self.padding, self.kind = padding, kind

    def batch(self, dataset: Any, rows: Rows, first_slot: int, padded_to: np.ndarray | None = None) -> Batch:
        taken = [dataset[int(row)] for row in rows]
        found = rows_of(taken, range(len(taken)))  # refuses what packed batches refuse
        if self.kind == "compound":
            _require_order(found, rows)
        batch = collated(self.collate, taken, first_slot, SPAN_LABELS)
        if self.padding.in_loss == "none":
            return batch
        return widened(batch, found, self.padding, padded_to)

    def forward(self, batch: Batch, *, seed: int, step: int) -> Any:
        return run_seeded(self.model, batch, seed, step)

    def span_logits(self, output: Any, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        mask = real_places(batch)
        cu_seqlens = torch.cat([mask.new_zeros(1, dtype=torch.int32), mask.sum(1, dtype=torch.int32).cumsum(0)])
        return output.start_logits[mask], output.end_logits[mask], cu_seqlens

    def loss_logits(self, output: Any, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        if self.padding.in_loss == "none":
            return self.span_logits(output, batch)
        order = real_places(batch).logical_not().int().argsort(dim=1, stable=True)  # labels count a row's own tokens
        start, end = (side.gather(1, order) for side in (output.start_logits, output.end_logits))
        cu_seqlens = torch.arange(len(start) + 1, dtype=torch.int32, device=start.device) * start.shape[1]
        return start.flatten(), end.flatten(), cu_seqlens


def _require_answers(found: RowStore, indices: Rows) -> None:
    """Raise DataError for a row whose answer does not begin and end at tokens of its own: its loss would be NaN."""
    for name in SPAN_LABELS:
        places = found.labels.get(name)
        if places is None:
            continue
        (bad,) = np.nonzero((places < 0) | (places >= found.lengths))
        if len(bad):
            raise DataError(
                what=f"row {indices[bad[0]]} of the data set has no answer in it",
                got=f"{name} {places[bad[0]]} in a row of {found.lengths[bad[0]]} tokens",
                why="an answer begins and ends at a token of its row",
                fix=f"correct {name}; a row without an answer points at its first token",
            )


def _require_order(found: RowStore, indices: Rows) -> None:
    """Raise DataError for a row whose answer ends before it begins: it is none of the spans of a joint loss."""
    if not found.labels.keys() >= set(SPAN_LABELS):
        return
    first, last = (found.labels[name] for name in SPAN_LABELS)
    (bad,) = np.nonzero(last < first)
    if len(bad):
        raise DataError(
            what=f"the answer in row {indices[bad[0]]} of the data set ends before it begins",
            got=f"start_positions {first[bad[0]]}, end_positions {last[bad[0]]}",
            why="span_loss compound learns spans, which end at or after their start",
            fix="correct the row, or use --span_loss independent",
        )
