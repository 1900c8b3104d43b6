"""Which rows make which micro-batch, and which of them this rank computes."""

from __future__ import annotations

from typing import Any

import numpy as np

from whet.data import budget, deal
from whet.data.prefetch import Piece
from whet.train.run import Run


def pieces_of(run: Run, dataset: Any, rows: np.ndarray, micro_rows: int) -> list[Piece]:
    """Return this rank's micro-batches of a step: rows, position of the first in the step, padded lengths, is_extra.

    `rows` are those of all ranks, `micro_rows` the most of one rank. A micro-batch is cut into one share for each rank;
    a rank without rows computes the first one again, for nothing.
    """
    args, n_ranks, rank = run.args, run.place.n_ranks, run.place.rank
    budgeted = args.max_tokens_per_batch
    cuts = budget.cuts(dataset, rows, micro_rows * n_ranks, None if budgeted is None else budgeted * n_ranks)
    if n_ranks > 1:
        cuts = _dealt(run, dataset, rows, cuts)
    lengths = budget.padded_to(dataset, rows, cuts, args.per_device_train_batch_size, run.objective.padding)
    return [_piece(run, rows, cuts[n], lengths[n], cuts[n - rank]) for n in range(rank, len(cuts), n_ranks)]


def _dealt(run: Run, dataset: Any, rows: np.ndarray, cuts: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the shares of all ranks in each micro-batch, in order."""
    found: list[tuple[int, int]] = []
    n_ranks, most = run.place.n_ranks, run.args.max_tokens_per_batch
    packed = run.objective.packed
    left = list(reversed(cuts))
    while left:
        first, last = left.pop()
        weights = deal.weights_of(dataset, rows[first:last], packed=packed)
        shares = deal.shares(weights, n_ranks)
        if most and last - first > n_ranks and max(int(weights[a:b].sum()) for a, b in shares) > most:
            middle = (first + last) // 2  # the rows fit together, but not in shares of complete rows
            left += [(middle, last), (first, middle)]
            continue
        found += [(first + start, first + end) for start, end in shares]
    return found


def _piece(
    run: Run, rows: np.ndarray, cut: tuple[int, int], padded_to: np.ndarray | None, of_first: tuple[int, int]
) -> Piece:
    first, last = cut
    if first < last:
        return rows[first:last], first, padded_to, False
    again = of_first[0]
    return rows[again : again + 1], again, None, True
