"""Weights that every rank has completely, of which each rank updates some rows (ZeRO stage 1)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from whet.dist.group import Group
from whet.dist.shares import RowExchange, Rows, deal, n_rows, rows_in
from whet.kernels.rows_in_use import RowsInUse, rows_in_use


class ReplicatedWeights:
    """The parameters of a model; `kept` are the rows that this rank updates, in the parameters' own memory."""

    def __init__(self, group: Group, parameters: Sequence[nn.Parameter], unit: int | None) -> None:
        for one in parameters:
            one.data = one.data.contiguous()
        self._parameters = list(parameters)
        self.shapes: Sequence[tuple[int, ...]] = [tuple(one.shape) for one in parameters]
        self.rows: Sequence[Sequence[Rows]] = deal(self.shapes, group.n_ranks, unit)
        self._own = [of_rank[group.rank] for of_rank in self.rows]
        self.kept: Sequence[nn.Parameter | None] = [
            _kept(one, rows) for one, rows in zip(self._parameters, self._own, strict=True)
        ]
        self._exchange = RowExchange(group, self._parameters, self.rows)
        self._in_use: dict[int, tuple[RowsInUse, RowsInUse]] = {}

    def take_gradients(self) -> None:
        """Show the optimizer the gradients of the rows that this rank keeps."""
        for number, (parameter, kept) in enumerate(zip(self._parameters, self.kept, strict=True)):
            if kept is None or kept is parameter:
                continue
            kept.data = rows_in(parameter.detach(), self._own[number])  # other code may have moved the parameter
            kept.grad = None
            if parameter.grad is None:
                continue
            kept.grad = gradient = rows_in(parameter.grad, self._own[number])
            if (rows := rows_in_use(parameter.grad)) is not None:
                self._part(number, rows).put_on(gradient)

    def give(self) -> None:
        """Give the updated rows to all ranks."""
        for parameter, kept in zip(self._parameters, self.kept, strict=True):
            if kept is not None and kept is not parameter:
                kept.grad = None
        self._exchange.run(self._parameters)

    def _part(self, number: int, rows: RowsInUse) -> RowsInUse:
        """Return the record of the kept rows, the same one as long as the parameter's record is."""
        found = self._in_use.get(number)
        if found is None or found[0] is not rows:
            found = self._in_use[number] = (rows, rows.part(*self._own[number]))
        return found[1]


def _kept(parameter: nn.Parameter, rows: Rows) -> nn.Parameter | None:
    """Return what the optimizer gets: the parameter itself if this rank keeps all of it, None if it keeps nothing."""
    if not rows[1]:
        return None
    if rows == (0, n_rows(parameter.shape)):
        return parameter
    return nn.Parameter(rows_in(parameter.detach(), rows), requires_grad=parameter.requires_grad)
