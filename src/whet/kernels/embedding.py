"""The sum of embeddings, LayerNorm and dropout as one native operator; its gradient touches only the rows in use.

A vocabulary is large, and the texts of a fine-tuning use a small part of it: XQuAD uses 20 % of BERT's vocabulary, and
one language uses far less of XLM-R's. Gradients and moments of other rows are zero and need not be read: AdamW without
decay does not change a row that never had a gradient.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional

from whet.kernels.batch_position import Drop
from whet.kernels.dropout import dropped, mask_of
from whet.kernels.norm import Norm, normalised
from whet.kernels.operator import (
    DTYPES,
    call,
    float32,
    floats,
    kept_table,
    misfit,
    native_for,
    once_differentiable,
    wide,
)

_MOST_TABLES = 3
_ADDING = Lock()
"""Two threads may run backward passes of one model: like autograd, we add their gradients one after the other."""
_REFERENCES, _USES = 2, 2
"""Python's references to a buffer that nobody else has, while they are counted, and the tensors of its storage."""
_ATTRIBUTE = "whet_rows_in_use"
_SAMPLED = 1024
"""Rows of a table in which a number is looked at: some microseconds."""
_MOST_UNMERGED = 64
"""Backward passes whose rows are kept as they came: a gradient may be zeroed and never dropped, in a training of any
length."""
TAKES_THE_REST = "whet_takes_the_rest"
"""Attribute of hooks on a table's gradient that may be skipped: their owner handles the remaining gradient."""


@dataclass(frozen=True)
class Tables:
    """Embedding tables (entries, D) to sum. The row `padding_ids[i]` of table i, None: no row, gets no gradient."""

    tables: tuple[Tensor, ...]
    padding_ids: tuple[int | None, ...]


class RowsInUse:
    """The rows of a table (entries, D) whose gradient may be nonzero, now or in any earlier step.

    The record is an attribute of the gradient tensor. A tensor that replaces it has no record, and any write to the
    tensor, also by autograd, invalidates it. Writes that torch does not count, through `gradient.data` or NumPy, show
    in a sample of the other rows, unless they are to a few rows.
    """

    def __init__(self, table: Tensor) -> None:
        self.bytes = torch.zeros(table.shape[0], dtype=torch.uint8, device=table.device)
        """(entries,): 1 for a row in use. Rows are only added."""
        self.width = table.shape[1]

    def include(self, rows: Tensor) -> None:
        """Add rows, by number (any,) int64 or by a mask (entries,) bool."""
        self.bytes[rows] = 1

    def part(self, first: int, n: int) -> RowsInUse:
        """Return the record of n rows from `first` on; it shares the memory of this one."""
        found = copy(self)
        found.bytes = self.bytes[first : first + n]
        return found

    def holds(self, gradient: Tensor) -> bool:
        """Return whether a sample of the other rows of the table's gradient is zero."""
        return _is_zero_in(gradient, self.bytes == 0)

    def put_on(self, gradient: Tensor) -> None:
        """Record on this tensor, the table's gradient, that it is zero in all other rows now."""
        setattr(gradient, _ATTRIBUTE, (self, gradient._version))


@kept_table
def _sample(n_rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Return rows (n,) all over a table, at most _SAMPLED and a few, and a column (n,) of each."""
    rows = torch.arange(0, n_rows, max(n_rows // _SAMPLED, 1))
    return rows, torch.arange(len(rows)) % width


def _is_zero_in(gradient: Tensor, others: Tensor) -> bool:
    """Return whether a sample of the rows that are `others` (entries,) bool is zero."""
    rows, columns = _sample(*gradient.shape)
    return not bool(((gradient[rows, columns] != 0) & others[rows]).any())


def rows_in_use(gradient: Tensor) -> RowsInUse | None:
    """Return the record of this gradient; None: every row may be nonzero."""
    return rows_in_use_of([gradient])[0]


def rows_in_use_of(gradients: Sequence[Tensor]) -> list[RowsInUse | None]:
    """Return the record of each of these gradients; None: every row of it may be nonzero."""
    records = [(one, getattr(one, _ATTRIBUTE, None)) for one in gradients]
    return [
        known[0] if known is not None and one._version == known[1] and known[0].holds(one) else None
        for one, known in records
    ]


def forget_rows(gradient: Tensor) -> None:
    """Remove the record: every row of the gradient may be nonzero."""
    setattr(gradient, _ATTRIBUTE, None)


class RowGradient:
    """The gradient (entries, D) of one table, kept between steps: only rows that were touched are zeroed again.

    With it, backward sets or adds to `table.grad` directly, and hooks on the table's gradient do not run. If other code
    writes to it, such as autograd for a second use of the table, all of it is zeroed before the next step. Code that
    writes to a few rows without torch's knowledge must call `forget`. Whoever keeps the gradient of a step, such as an
    optimizer or a callback, keeps that: the next step's is then another tensor.
    """

    def __init__(self, table: Tensor) -> None:
        self.table = table
        self.buffer = torch.zeros_like(table, requires_grad=False)
        self.rows = RowsInUse(table)
        """Rows in which this gradient was nonzero in any step."""
        self.rows.put_on(self.buffer)
        self._touched: list[Tensor] = []

    def _leave_to_others(self) -> None:
        """Take a new buffer if somebody still holds the one of the step before, or a view of it."""
        alone = sys.getrefcount(self.buffer) == _REFERENCES
        if alone and torch._C._storage_Use_Count(self.buffer.untyped_storage()._cdata) == _USES:
            return
        self.buffer = torch.zeros_like(self.table, requires_grad=False)
        self.rows.put_on(self.buffer)
        self._touched = []

    def forget(self) -> None:
        """Make the next step start from an all-zero buffer."""
        self.buffer.zero_()
        self.rows.put_on(self.buffer)
        self._touched = []

    def rows_now(self) -> Tensor | None:
        """Return the rows (n,) that this step's gradient touched; None if the table's gradient is another tensor."""
        held, rows = self.table.grad, self._touched_rows()
        if held is None or held.data_ptr() != self.buffer.data_ptr() or self._is_written_elsewhere(rows):
            return None
        return rows

    def _touched_rows(self) -> Tensor:
        """Return the rows (n,), each once, in which the buffer is nonzero."""
        return torch.cat(self._touched).unique() if self._touched else torch.empty(0, dtype=torch.int64)

    def _is_written_elsewhere(self, touched: Tensor) -> bool:
        """Return whether other code has written to the buffer, and maybe to other rows than these."""
        if rows_in_use(self.buffer) is None:
            return True
        others = torch.ones(len(self.buffer), dtype=torch.bool, device=self.buffer.device)
        others[touched] = False
        return not _is_zero_in(self.buffer, others)

    def replace(self, rows: Tensor, values: Tensor) -> None:
        """Set the table's gradient to `values` (n, D) in these rows (n,), each named once, and to zero elsewhere."""
        if self.table.grad is None:
            self._leave_to_others()
        if self.rows_now() is None:
            self.forget()
        elif self._touched:
            self.buffer[torch.cat(self._touched)] = 0
        self.buffer[rows] = values
        self._touched = [rows]
        self.rows.include(rows)
        self.rows.put_on(self.buffer)
        self.table.grad = self.buffer

    def add(self, ids: Tensor, values: Tensor, padding_id: int | None) -> None:
        """Add values (N, D) to the rows `ids` of the table's gradient, one backward pass at a time."""
        with _ADDING:
            self._add(ids, values, padding_id)

    def _add(self, ids: Tensor, values: Tensor, padding_id: int | None) -> None:
        held = self.table.grad
        if held is not None and held.data_ptr() != self.buffer.data_ptr():
            forget_rows(held)
            _scatter(held, ids, values, padding_id)
            return
        clear = None
        if held is None:
            self._leave_to_others()
            clear = self._touched_rows()
            if self._is_written_elsewhere(clear):  # in the step before
                self.forget()
                clear = None
        self._touched = [ids] if held is None else [*self._touched, ids]
        if len(self._touched) > _MOST_UNMERGED:
            self._touched = [self._touched_rows()]
        self.rows.include(ids)
        _scatter(self.buffer, ids, values, padding_id, clear)
        self.table.grad = self.buffer


@dataclass(frozen=True)
class _Spec:
    eps: float
    drop: Drop | None
    padding_ids: tuple[int | None, ...]
    gradients: tuple[RowGradient | None, ...]


def embed(
    ids: Sequence[Tensor],
    tables: Tables,
    norm: Norm,
    *,
    drop: Drop | None = None,
    gradients: Sequence[RowGradient | None] | None = None,
) -> Tensor:
    """Return dropout(LayerNorm(sum of the embeddings)) (N, D) for ids (N,) int64, one per table, at most three.

    `gradients` holds the tables' gradients between steps; None: each backward makes new ones.
    """
    native = native_for(*tables.tables) is not None and tables.tables[0].dtype == torch.float32
    if not native or norm.rms or norm.bias is None or len(ids) > _MOST_TABLES:
        return embed_reference(ids, tables, norm, drop=drop)
    for table_ids, table in zip(ids, tables.tables, strict=True):
        _check(table_ids, table)
    width = tables.tables[0].shape[1]
    fits = all(one.shape == ids[0].shape for one in ids) and all(one.shape[1] == width for one in tables.tables)
    if not (fits and norm.weight.numel() == norm.bias.numel() == width):
        raise misfit("embed", *ids, *tables.tables, norm.weight)
    kept = tuple(gradients) if gradients is not None else (None,) * len(ids)
    spec = _Spec(norm.eps, drop, tables.padding_ids, kept)
    return _Embed.apply(spec, norm.weight, norm.bias, *(i.contiguous() for i in ids), *tables.tables)


def embed_reference(ids: Sequence[Tensor], tables: Tables, norm: Norm, *, drop: Drop | None = None) -> Tensor:
    """Return `embed` in plain torch, also in float64."""
    parts = [
        functional.embedding(i, table, padding_idx=padding)
        for i, table, padding in zip(ids, tables.tables, tables.padding_ids, strict=True)
    ]
    y = normalised(wide(torch.stack(parts).sum(0)), norm)
    return (y if drop is None else dropped(y, drop)).to(parts[0].dtype)


class _Embed(Function):
    @staticmethod
    def forward(ctx: Any, spec: _Spec, weight: Tensor, bias: Tensor, *rest: Tensor) -> Tensor:
        ids, tables = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        rows, width = ids[0].numel(), tables[0].shape[1]
        y = floats(rows, width)
        mean, rstd = floats(2, rows).unbind()
        w, b = float32(weight), float32(bias)
        how = {
            "rows": rows,
            "width": width,
            "dtype": DTYPES[y.dtype],
            "eps": spec.eps,
            "mask": mask_of(spec.drop, rows),
        }
        call("embed", **how, **_arrays(ids, tables), weight=w, bias=b, y=y, mean=mean, rstd=rstd)
        ctx.spec = spec
        ctx.save_for_backward(weight, mean, rstd, *rest)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        weight, mean, rstd, *rest = ctx.saved_tensors
        ids, tables = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        dy, w = grads[0].contiguous(), float32(weight)
        rows, width = dy.shape
        dsum = floats(rows, width)
        dweight, dbias = floats(2, width).unbind()
        how = {"rows": rows, "width": width, "dtype": DTYPES[dy.dtype], "mask": mask_of(ctx.spec.drop, rows)}
        given = {"weight": w, "mean": mean, "rstd": rstd, "dy": dy}
        call("embed_backward", **how, **_arrays(ids, tables), **given, dsum=dsum, dweight=dweight, dbias=dbias)
        table_grads = _table_gradients(ctx, ids, tables, dsum)
        return None, dweight.to(weight.dtype), dbias.to(weight.dtype), *(None for _ in ids), *table_grads


def _table_gradients(ctx: Any, ids: Sequence[Tensor], tables: Sequence[Tensor], dsum: Tensor) -> list[Tensor | None]:
    """Return the tables' dense gradients; None for those in a RowGradient and those that need none."""
    found: list[Tensor | None] = []
    wanted = ctx.needs_input_grad[-len(tables) :]
    spec = ctx.spec
    for i, (table_ids, table) in enumerate(zip(ids, tables, strict=True)):
        row_gradient, padding = spec.gradients[i], spec.padding_ids[i]
        if not wanted[i] or (row_gradient is not None and _goes_to_grad(table)):
            found.append(None)
            if wanted[i] and row_gradient is not None:
                row_gradient.add(table_ids, dsum, padding)
            continue
        dense = torch.zeros_like(table)
        _scatter(dense, table_ids, dsum, padding)
        found.append(dense)
    return found


def _goes_to_grad(table: Tensor) -> bool:
    """Return whether the running backward pass adds to `table.grad`; False: for torch.autograd.grad, or not at all."""
    with torch.enable_grad():
        node = get_gradient_edge(table).node
    try:
        return torch._C._will_engine_execute_node(node)  # pyright: ignore[reportAttributeAccessIssue]
    except RuntimeError:  # torch.autograd.grad, which returns gradients
        return False


def _scatter(
    table_grad: Tensor, ids: Tensor, values: Tensor, padding_id: int | None, clear: Tensor | None = None
) -> None:
    """Zero the rows `clear` of table_grad, then add values (N, D) to its rows `ids`."""
    assert table_grad.is_contiguous()
    if values.shape != (ids.numel(), table_grad.shape[1]):
        raise misfit("scatter", table_grad, ids, values)
    order = ids.argsort(stable=True)
    rows = {"rows": ids.numel(), "width": values.shape[1], "padding_id": -1 if padding_id is None else padding_id}
    cleared = {"clear": clear, "n_clear": 0 if clear is None else clear.numel()}
    call("scatter", **rows, ids=ids, values=values, table_grad=table_grad, order=order, **cleared)


def _arrays(ids: Sequence[Tensor], tables: Sequence[Tensor]) -> dict[str, Tensor]:
    found = {f"ids[{i}]": one for i, one in enumerate(ids)}
    return found | {f"tables[{i}]": one for i, one in enumerate(tables)}


def _check(ids: Tensor, table: Tensor) -> None:
    """Refuse ids outside of the table; the native operator does not check them."""
    assert ids.dtype == torch.int64
    assert table.is_contiguous()
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < table.shape[0]:
        raise IndexError(f"an id is outside of the table's {table.shape[0]} entries")
