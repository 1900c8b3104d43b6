"""Who keeps which rows of which tensor when ranks share tensors, and how the others get rows that one rank changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import gcd, prod

import torch
from torch import Tensor

from whet.dist.group import Group

Rows = tuple[int, int]
"""The first row of a tensor that a rank keeps, and the number of rows."""
Shape = Sequence[int]
_BUCKET_BYTES = 8 << 20
"""Bytes that each rank sends at a time: enough for a network, little next to a model."""


def deal(shapes: Sequence[Shape], n_ranks: int, unit: int | None) -> list[list[Rows]]:
    """Return the rows of each tensor that each rank keeps, about the same number of elements on all.

    Every tensor is cut by rows, as torch's `fully_shard` cuts it, with a multiple of `unit` elements before each cut.
    None: complete tensors, the next largest goes to the rank with the fewest elements.
    """
    if unit is not None:
        return [_cut(shape, n_ranks, unit) for shape in shapes]
    n_held, found = [0] * n_ranks, [[(0, 0)] * n_ranks for _ in shapes]
    for number in sorted(range(len(shapes)), key=lambda one: -prod(shapes[one])):
        rank = n_held.index(min(n_held))
        n_held[rank] += prod(shapes[number])
        found[number][rank] = (0, n_rows(shapes[number]))
    return found


def n_rows(shape: Shape) -> int:
    """Return the number of rows: a tensor without dims has one."""
    return shape[0] if shape else 1


def rows_in(tensor: Tensor, rows: Rows) -> Tensor:
    """Return these rows of a tensor, which share its memory."""
    return tensor.narrow(0, *rows) if tensor.dim() else tensor


def _cut(shape: Shape, n_ranks: int, unit: int) -> list[Rows]:
    width = max(prod(shape[1:]), 1)
    step = unit // gcd(unit, width)
    each = -(-n_rows(shape) // (n_ranks * step)) * step
    edges = [min(rank * each, n_rows(shape)) for rank in range(n_ranks + 1)]
    return [(first, last - first) for first, last in pairwise(edges)]


class RowExchange:
    """Gives every rank the rows of contiguous tensors that the others keep."""

    def __init__(self, group: Group, tensors: Sequence[Tensor], rows: Sequence[Sequence[Rows]]) -> None:
        self._group = group
        sent = [[(number, of_rank[rank]) for number, of_rank in enumerate(rows)] for rank in range(group.n_ranks)]
        buckets = [list(_buckets(tensors, kept)) for kept in sent]
        most = max(map(len, buckets), default=0)
        self._buckets = [[of_rank[n] if n < len(of_rank) else [] for of_rank in buckets] for n in range(most)]
        """For each exchange, what each rank sends: (number of the tensor, first byte, number of bytes)."""

    def run(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite the rows of the other ranks, in place, with what these ranks have."""
        memory = [tensor.detach().view(-1).view(torch.uint8) for tensor in tensors]
        for bucket in self._buckets:
            most = max(sum(n for _, _, n in part) for part in bucket)
            own = [memory[number][first : first + n] for number, first, n in bucket[self._group.rank]]
            sent = torch.cat([*own, memory[0].new_empty(most - sum(map(len, own)))])
            for rank, received in enumerate(self._group.gather_rows(sent, most)):
                if rank != self._group.rank:
                    _spread(received, bucket[rank], memory)


_Bucket = list[tuple[int, int, int]]


def _buckets(tensors: Sequence[Tensor], kept: Sequence[tuple[int, Rows]]) -> Iterator[_Bucket]:
    """Yield the bytes of the kept rows in lists of at most _BUCKET_BYTES."""
    bucket: _Bucket = []
    room = _BUCKET_BYTES
    for number, (first_row, count) in kept:
        tensor = tensors[number]
        per_row = tensor.numel() * tensor.element_size() // max(n_rows(tensor.shape), 1)
        first, left = first_row * per_row, count * per_row
        while left:
            taken = min(left, room)
            bucket.append((number, first, taken))
            first, left, room = first + taken, left - taken, room - taken
            if not room:
                yield bucket
                bucket, room = [], _BUCKET_BYTES
    if bucket:
        yield bucket


def _spread(received: Tensor, bucket: _Bucket, memory: Sequence[Tensor]) -> None:
    at = 0
    for number, first, n in bucket:
        memory[number][first : first + n] = received[at : at + n]
        at += n
