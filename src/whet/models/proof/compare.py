"""How far two results are apart."""

from __future__ import annotations

from torch import Tensor


def gap(found: Tensor, wanted: Tensor) -> float:
    """Return the largest difference, as a share of the largest wanted value; infinite for another shape."""
    if found.shape != wanted.shape:
        return float("inf")
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))
