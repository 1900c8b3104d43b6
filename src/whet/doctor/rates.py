"""Rates of products and copies on this machine, with the threads that training would use."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from whet.doctor.findings import Rates

SHAPE = (1024, 768, 3072)
"""A thousand tokens through the wider linear layer of a BERT-base-size block."""
_COPY_BYTES = 128 * 2**20
_MOST_S = 0.3
"""Repetitions of each product; the best one counts, because other work only slows them down."""


def measure(*, has_native: bool) -> Rates:
    """Return the rates; takes about two seconds. `has_native`: whether the native operators can be used."""
    import torch

    from whet.kernels.matrix import is_widened, widened_product

    began_s = time.perf_counter()
    n, inputs, outputs = SHAPE
    with torch.no_grad():
        x, w, bias = torch.randn(n, inputs), torch.randn(outputs, inputs), torch.zeros(outputs)
        x16, w16, bias16 = x.bfloat16(), w.bfloat16(), bias.bfloat16()
        x8, w8 = ((one * 20).clamp(-127, 127).to(torch.int8) for one in (x, w))
        return Rates(
            shape=SHAPE,
            fp32_mm_gflops=_gflops(lambda: torch.mm(x, w.T)) or 0.0,
            fp32_onednn_gflops=_gflops(lambda: _onednn(x, w, bias)),
            bf16_mm_gflops=_gflops(lambda: torch.mm(x16, w16.T)),
            bf16_onednn_gflops=_gflops(lambda: _onednn(x16, w16, bias16)),
            bf16_widened_gflops=_gflops(lambda: widened_product(x16, w, bias)) if has_native and is_widened() else None,
            int8_gops=_gflops(lambda: torch.ops.aten._int_mm(x8, w8.T)),
            copy_gb_per_s=_copy_gb_per_s(),
            seconds=round(time.perf_counter() - began_s, 2),
        )


def _onednn(x: Any, w: Any, bias: Any) -> Any:
    """The same product in oneDNN; torch.mm uses MKL in fp32."""
    import torch

    return torch.ops.mkldnn._linear_pointwise(x, w, bias, "none", [], "")


def _gflops(product: Callable[[], Any]) -> float | None:
    try:
        best_s = _best_s(product)
    except (RuntimeError, NotImplementedError, AttributeError):  # missing in this torch or on this processor
        return None
    n, inputs, outputs = SHAPE
    return round(2 * n * inputs * outputs / best_s / 1e9, 1)


def _copy_gb_per_s() -> float:
    import torch

    source, target = torch.ones(_COPY_BYTES // 4), torch.zeros(_COPY_BYTES // 4)
    return round(2 * _COPY_BYTES / _best_s(lambda: target.copy_(source)) / 1e9, 1)


def _best_s(work: Callable[[], Any]) -> float:
    """Return the shortest time of one call, after a warm-up call; a long warm-up is the only call, and counts."""
    began_s, best_s = time.perf_counter(), float("inf")
    for number in range(20):
        start_s = time.perf_counter()
        work()
        end_s = time.perf_counter()
        long = end_s - start_s > _MOST_S
        if number or long:
            best_s = min(best_s, end_s - start_s)
        if (number and end_s - began_s > _MOST_S) or long:
            break
    return best_s
