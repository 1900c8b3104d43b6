"""The results of a block's products with weights, kept from its forward pass for its recomputation.

torch's own selective contexts count every operator, and autocast casts a weight once in a forward pass but again in a
recomputation; these count products alone.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from whet.kernels import grouped, matrix

_PRODUCTS = frozenset({"aten::mm", "aten::addmm", "mkldnn::_linear_pointwise", grouped.NAME, matrix.WIDENED})
"""Products with weights. Those of attention grow with the square of the row, and are little work in comparison."""


@dataclass(frozen=True)
class _Kept:
    result: Tensor
    version: int


def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of a block's forward pass, and of its recomputation, which runs all else again."""
    kept: list[_Kept] = []
    return _Keeping(kept), _Giving(kept)


class _Keeping(TorchDispatchMode):
    def __init__(self, kept: list[_Kept]) -> None:
        super().__init__()
        self._kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if _is_product(func):
            self._kept.append(_Kept(out.detach(), out._version))
        return out


class _Giving(TorchDispatchMode):
    def __init__(self, kept: list[_Kept]) -> None:
        super().__init__()
        self._kept = kept
        self._next = 0

    def __enter__(self) -> Any:
        self._next = 0
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _is_product(func):
            return func(*args, **(kwargs or {}))
        kept = self._kept[self._next]
        self._next += 1
        if kept.result._version != kept.version:
            raise RuntimeError("a product was changed in place after it was kept for backward")
        return kept.result.detach()


def _is_product(operator: Any) -> bool:
    return operator.name().partition(".")[0] in _PRODUCTS
