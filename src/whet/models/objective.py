"""What is minimised: how rows become a batch, and a batch a sum of losses over its targets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from whet.data.batch import Batch, pack, rows_of
from whet.data.columns import Columns, read_by
from whet.data.padding import NO_PADDING, Padding
from whet.data.store import RowStore
from whet.errors import ConfigError, DataError
from whet.kernels.batch_position import Kernel
from whet.kernels.layers.cross_entropy import row_cross_entropy
from whet.kernels.random import stream_key
from whet.kernels.reference.layers import to_rows
from whet.models import attention
from whet.models.bad_batch import explained
from whet.models.families import answers_questions, family_of
from whet.models.loading import implementation
from whet.models.packed import PackedModel, prepare
from whet.models.wrapped import passed_on, unwrapped

SPAN_LABELS = ("start_positions", "end_positions")
IGNORED = -100
_TOKEN_COLUMNS = frozenset({"input_ids", "token_type_ids"})
_NEXT_WORD_HEADS = ("ForCausalLM", "LMHeadModel")
_KERNELS: dict[str | None, Kernel] = {
    None: "auto",
    attention.NAME: "whet",
    implementation.FLASH: "flash_attention_2",
}
"""What packed attention runs on a GPU, by `attn_implementation`; with another one, batches are padded."""
Collate = Callable[[list[Any]], Mapping[str, Any]]
Rows = Sequence[int] | np.ndarray


class Objective(Protocol):
    """One way to train a model on rows."""

    packed: bool
    """Whether batches run without padding."""

    @property
    def packed_model(self) -> PackedModel | None:
        """The model, where it reads batches without padding."""
        ...

    @property
    def padding(self) -> Padding:
        """How a padded run would pad rows, and which of that padding this loss counts."""
        ...

    def batch(self, dataset: Any, rows: Rows, first_slot: int, padded_to: np.ndarray | None = None) -> Batch:
        """Return these rows of the data set as a micro-batch.

        `padded_to` (rows,) is what a padded run would pad each row to; None: these rows are a batch of their own.
        """
        ...

    def count(self, batch: Batch) -> int:
        """Return how many targets the batch's loss is a sum over."""
        ...

    def forward(self, batch: Batch, *, seed: int, step: int) -> Any:
        """Return the model's output for the batch."""
        ...

    def loss_sum(self, output: Any, batch: Batch) -> Tensor:
        """Return the sum of the losses of the batch's targets, () float32."""
        ...

    def logits(self, output: Any, batch: Batch) -> tuple[np.ndarray, ...]:
        """Return the output's predictions as arrays (rows, ...), places that are no token filled with -100."""
        ...


class SpanObjective(ABC):
    """What packed and padded question answering share: cross entropy of each row's start and end.

    The softmax runs over the row's own tokens and, as in transformers' heads, over its padding if `padding` counts any.
    """

    padding: Padding

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
        start, end, cu_seqlens = self.loss_logits(output, batch)
        losses = row_cross_entropy(start, batch.labels["start_positions"], cu_seqlens)
        return (losses + row_cross_entropy(end, batch.labels["end_positions"], cu_seqlens)).sum() / 2

    def logits(self, output: Any, batch: Batch) -> tuple[np.ndarray, ...]:
        start, end, cu_seqlens = self.span_logits(output, batch)
        return tuple(to_rows(side, cu_seqlens, IGNORED).float().cpu().numpy() for side in (start, end))


class PackedSpans(SpanObjective):
    """Extractive question answering without padding."""

    packed = True

    def __init__(self, model: PackedModel, columns: Iterable[str], padding: Padding = NO_PADDING) -> None:
        self.model = self.packed_model = model
        self.padding = padding
        self.columns = Columns(["attention_mask", *SPAN_LABELS, *columns])

    def batch(self, dataset: Any, rows: Rows, first_slot: int, padded_to: np.ndarray | None = None) -> Batch:
        found = rows_of(dataset, rows, self.columns)
        read = {name: column for name, column in found.tokens.items() if name in self.columns.names}
        found = replace(found, tokens=read)  # a RowStore has the columns that it has
        _require_answers(found, rows)
        has_loss = found.labels.keys() >= set(SPAN_LABELS)
        return pack(
            found,
            first_slot=first_slot,
            position_offset=self.model.position_offset,
            padding=self.padding if has_loss else replace(self.padding, in_loss="none"),
            padded_to=padded_to,
        )

    def forward(self, batch: Batch, *, seed: int, step: int) -> Any:
        return self.model(batch, seed=seed, step=step)

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

    def __init__(self, model: nn.Module, collate: Collate, padding: Padding = NO_PADDING) -> None:
        self.model = model
        self.collate = collate
        self.padding = padding

    def batch(self, dataset: Any, rows: Rows, first_slot: int, padded_to: np.ndarray | None = None) -> Batch:
        taken = [dataset[int(row)] for row in rows]
        found = rows_of(taken, range(len(taken)))  # refuses what packed batches refuse
        batch = _collated(self.collate, taken, first_slot, SPAN_LABELS)
        if self.padding.in_loss == "none":
            return batch
        return _widened(batch, found, self.padding, padded_to)

    def forward(self, batch: Batch, *, seed: int, step: int) -> Any:
        return _seeded(self.model, batch, seed, step)

    def span_logits(self, output: Any, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        mask = _mask(batch)
        cu_seqlens = torch.cat([mask.new_zeros(1, dtype=torch.int32), mask.sum(1, dtype=torch.int32).cumsum(0)])
        return output.start_logits[mask], output.end_logits[mask], cu_seqlens

    def loss_logits(self, output: Any, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        if self.padding.in_loss == "none":
            return self.span_logits(output, batch)
        order = _mask(batch).logical_not().int().argsort(dim=1, stable=True)  # labels count a row's own tokens
        start, end = (side.gather(1, order) for side in (output.start_logits, output.end_logits))
        cu_seqlens = torch.arange(len(start) + 1, dtype=torch.int32, device=start.device) * start.shape[1]
        return start.flatten(), end.flatten(), cu_seqlens


class OwnLoss:
    """Any module that returns its own mean loss, on batches that a collator pads."""

    packed = False
    packed_model = None
    padding = NO_PADDING

    def __init__(self, model: nn.Module, collate: Collate) -> None:
        self.model = model
        self.collate = collate

    def batch(self, dataset: Any, rows: Rows, first_slot: int, padded_to: np.ndarray | None = None) -> Batch:
        return _collated(self.collate, [dataset[int(row)] for row in rows], first_slot, ())

    def count(self, batch: Batch) -> int:
        """Return the targets that the model's mean runs over: token labels other than -100, or else the rows.

        A model of next words compares each token with the label after it: a row's first label is no target.
        """
        labels = batch.inputs.get("labels")
        if isinstance(labels, Tensor) and not labels.is_floating_point() and labels.dim() > 1:
            first = 1 if type(self.model).__name__.endswith(_NEXT_WORD_HEADS) else 0
            return int((labels[:, first:] != IGNORED).sum())
        return batch.n_rows

    def forward(self, batch: Batch, *, seed: int, step: int) -> Any:
        return _seeded(self.model, batch, seed, step)

    def loss_sum(self, output: Any, batch: Batch) -> Tensor:
        return loss_of(output).float() * self.count(batch)

    def logits(self, output: Any, batch: Batch) -> tuple[np.ndarray, ...]:
        if isinstance(output, Mapping):
            found = [value for name, value in output.items() if name != "loss"]
        else:
            found = list(output) if isinstance(output, tuple | list) else [output]
        return tuple(
            value.detach().float().cpu().numpy()
            for value in found
            if isinstance(value, Tensor) and value.dim() > 0 and len(value) == batch.n_rows
        )


def _require_answers(found: RowStore, indices: Sequence[int] | np.ndarray) -> None:
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


def _seeded(model: nn.Module, batch: Batch, seed: int, step: int) -> Any:
    """Run the model with torch's generator set from the place in the run: a resumed run draws the same masks."""
    low, high = stream_key(seed, step, batch.first_slot)
    torch.manual_seed(low | (high >> 1) << 32)
    with explained(model, batch.inputs):
        return model(**batch.inputs)


def _collated(collate: Collate, rows: list[Any], first_slot: int, label_names: Sequence[str]) -> Batch:
    inputs = dict(collate(rows))
    labels = {name: inputs.pop(name) for name in label_names if name in inputs}
    tokens, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    n_computed = tokens.numel() if isinstance(tokens, Tensor) else 0
    return Batch(
        inputs=inputs,
        labels=labels,
        n_rows=len(rows),
        first_slot=first_slot,
        n_tokens=int(mask.sum()) if isinstance(mask, Tensor) else n_computed,
        n_computed=n_computed,
        n_padded=n_computed,
    )


def _mask(batch: Batch) -> Tensor:
    """Return which places of a padded batch are tokens; rows of one length may come without a mask."""
    mask = batch.inputs.get("attention_mask")
    return torch.ones_like(batch.inputs["input_ids"], dtype=torch.bool) if mask is None else mask.bool()


def _widened(batch: Batch, rows: RowStore, padding: Padding, padded_to: np.ndarray | None) -> Batch:
    """Return a padded micro-batch with as much padding as its rows have in the batch that it is a part of."""
    if padded_to is None:
        padded_to = padding.lengths(rows.lengths_with_padding, len(rows))
    ids = batch.inputs["input_ids"]
    inputs = {"attention_mask": torch.ones_like(ids), **batch.inputs}
    more = max(int(padded_to.max()) - ids.shape[1], 0)
    wide = {
        name: nn.functional.pad(value, (0, more), value=padding.fill(name)) if value.shape == ids.shape else value
        for name, value in inputs.items()
    }
    return replace(batch, inputs=wide, n_computed=wide["input_ids"].numel(), n_padded=wide["input_ids"].numel())


def loss_of(output: Any) -> Tensor:
    """Return the one number in a module's output that it wants minimised."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None and isinstance(output, tuple | list) and output:
        loss = output[0]
    if isinstance(output, Tensor):
        loss = output
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ConfigError(
            what="the model returned no loss",
            got=type(output).__name__,
            why="training needs one number to minimise: output.loss, output['loss'], output[0] or the output itself",
            fix="give rows with labels, or a model whose forward returns a loss",
        )
    return loss


def choose(
    model: nn.Module,
    collate: Collate | None,
    default_collate: Collate,
    padding: Padding = NO_PADDING,
    attn: str | None = None,
) -> Objective:
    """Return how this model trains: without padding wherever its family and its head are known.

    A collator of the user's own is honoured: its batches are padded, and the model's own loss is used. So is the code
    that is to compute attention, `attn`: with transformers' eager or sdpa, batches are padded.
    """
    spans = collate is None and answers_questions(model)
    if spans and attn == implementation.FLASH and family_of(model) is not None:
        implementation.require_kernels(next(model.parameters()).device)
    packed = prepare(model, _KERNELS[attn]) if spans and attn in _KERNELS else None
    if packed is None and attn not in (None, attention.NAME):
        implementation.use(unwrapped(model), attn)
    if attn == attention.NAME and packed is None:
        raise implementation.not_known(model)
    if not spans:
        return OwnLoss(model, collate or default_collate)
    if packed is None:
        return PaddedSpans(model, default_collate, padding)
    read = read_by(packed.module) or _TOKEN_COLUMNS
    return PackedSpans(packed, passed_on(model, read & _TOKEN_COLUMNS), padding)
