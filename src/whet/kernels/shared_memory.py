"""Which tensors share memory, so that writing one changes another.

Most ties are one parameter under two names, which PyTorch knows. Two parameters over one memory are not: a transposed
view (peft's `ensure_weight_tying`), rows or columns of a larger weight, or `a.data = b.data`. Each has a gradient and a
state of its own. Whatever updates, converts, shares out or saves parameters asks here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import combinations
from math import gcd, prod
from operator import le
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


class Layout(NamedTuple):
    """Where the elements of a tensor lie."""

    device: torch.device
    first: int
    itemsize: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def end(self) -> int:
        """The address behind the last element."""
        last = sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        return self.first + (last + 1) * self.itemsize

    @property
    def is_dense(self) -> bool:
        """Whether the elements fill the memory from the first to the last."""
        return prod(self.shape) * self.itemsize == self.end - self.first


def layout_of(tensor: Tensor) -> Layout | None:
    """Return where the elements lie; None if there are none, or no memory of its own (meta, quantised wrappers)."""
    if not tensor.numel() or is_traceable_wrapper_subclass(tensor) or not (first := tensor.data_ptr()):
        return None
    return Layout(tensor.device, first, tensor.element_size(), tuple(tensor.shape), tensor.stride())


def overlapping(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return the groups of tensors that share elements, by index and in order; others are in no group.

    The answer is that of this moment: setting `.data` changes it. Most models have none, which takes a glance.
    """
    if _are_apart(tensors):
        return []
    layouts = {number: layout for number, tensor in enumerate(tensors) if (layout := layout_of(tensor)) is not None}
    found: list[list[int]] = []
    near: list[int] = []
    end = 0
    for number in sorted(layouts, key=lambda one: layouts[one].first):
        if layouts[number].first >= end:
            found += _groups(layouts, near)
            near = []
        near.append(number)
        end = max(end, layouts[number].end)
    return sorted(found + _groups(layouts, near))


def turns(tensors: Sequence[Tensor]) -> list[int]:
    """Return when each tensor is updated, if all of one turn are updated at once: those that overlap, one by one."""
    found = [0] * len(tensors)
    for group in overlapping(tensors):
        for turn, number in enumerate(group):
            found[number] = turn
    return found


def converted_together(tensors: Sequence[Tensor], dtype: torch.dtype) -> dict[int, Tensor]:
    """Return the tensors that share memory, by index, in another dtype: over new memory that they share as before."""
    found: dict[int, Tensor] = {}
    for group in overlapping(tensors):
        layouts = [layout for number in group if (layout := layout_of(tensors[number])) is not None]
        first, end = min(one.first for one in layouts), max(one.end for one in layouts)
        memory = torch.empty((end - first) // layouts[0].itemsize, dtype=dtype, device=layouts[0].device)
        for number, layout in zip(group, layouts, strict=True):
            at = (layout.first - first) // layout.itemsize
            found[number] = memory.as_strided(layout.shape, layout.stride, at).copy_(tensors[number].detach())
    return found


def holds(one: Tensor, other: Tensor) -> bool:
    """Return whether all elements of the other tensor lie in the memory of the first, which it fills."""
    outer, inner = layout_of(one), layout_of(other)
    if outer is None or inner is None or outer.device != inner.device:
        return False
    return outer == inner or (outer.is_dense and outer.first <= inner.first and inner.end <= outer.end)


def _are_apart(tensors: Sequence[Tensor]) -> bool:
    """Return whether all are contiguous and lie one after the other: less than a microsecond a tensor."""
    try:
        spans = sorted([(one.data_ptr(), one.nbytes) for one in tensors if one.is_contiguous()])
    except RuntimeError:  # a wrapper without memory
        return False
    begins, ends = [first for first, _ in spans], [first + n_bytes for first, n_bytes in spans]
    return len(spans) == len(tensors) and all(map(le, ends, begins[1:]))


def _groups(layouts: Mapping[int, Layout], near: Sequence[int]) -> list[list[int]]:
    """Return the groups among tensors whose spans of memory overlap."""
    leader = {number: number for number in sorted(near)}
    for one, other in combinations(leader, 2):
        if leader[one] != leader[other] and _overlap(layouts[one], layouts[other]):
            first, second = sorted((leader[one], leader[other]))
            leader = {number: first if known == second else known for number, known in leader.items()}
    groups: dict[int, list[int]] = {}
    for number, known in leader.items():
        groups.setdefault(known, []).append(number)
    return [group for group in groups.values() if len(group) > 1]


def _overlap(one: Layout, other: Layout) -> bool:
    """Return whether two tensors share an element: columns side by side in one matrix do not."""
    if one.first >= other.end or other.first >= one.end or one.device != other.device:
        return False
    if one.is_dense and other.is_dense:
        return True
    first = min(one.first, other.first)
    return _meet(one._replace(first=one.first - first), other._replace(first=other.first - first))


@lru_cache(maxsize=256)
def _meet(one: Layout, other: Layout) -> bool:
    """Return whether two layouts share an element, by marking those of the first."""
    unit = gcd(one.itemsize, other.itemsize, one.first, other.first)
    marks = torch.zeros(max(one.end, other.end) // unit, dtype=torch.bool, device="cpu")
    _units(marks, one, unit).fill_(True)
    return bool(_units(marks, other, unit).any())


def _units(marks: Tensor, layout: Layout, unit: int) -> Tensor:
    shape = (*layout.shape, layout.itemsize // unit)
    stride = (*(step * layout.itemsize // unit for step in layout.stride), 1)
    return marks.as_strided(shape, stride, layout.first // unit)
