"""Frees what earlier runs of this process hold, before a new one begins.

A trainer and the parts of its run refer to each other, so Python frees them only when it looks for such cycles. It does
so by the number of new objects, and a model with its optimizer's state is few objects of many bytes.
"""

from __future__ import annotations

import gc
import weakref

from torch import nn

_LARGE_BYTES = 32 << 20
"""Smaller models are left to Python: a search takes 0.2 s."""
_trained: list[weakref.ref[nn.Module]] = []


def free(model: nn.Module) -> None:
    """Free the large models that earlier runs trained, unless they are still in use; note that `model` is next."""
    if any(found is not None and found is not model for found in (one() for one in _trained)):
        gc.collect()
    _trained[:] = [one for one in _trained if one() is not None]
    is_large = sum(one.numel() * one.element_size() for one in model.parameters()) >= _LARGE_BYTES
    if is_large and not any(one() is model for one in _trained):
        _trained.append(weakref.ref(model))
