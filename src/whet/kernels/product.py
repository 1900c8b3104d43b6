"""Matrix products of linear layers, by the faster of the two libraries that torch carries for them on a CPU.

torch multiplies fp32 matrices with MKL. On processors that are not Intel's, MKL keeps to AVX2, and oneDNN, which torch
carries as well, is twice as fast where there is AVX-512 (`python benchmarks/cpu/products.py`). bf16 goes to oneDNN in
torch itself.
"""

import os
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from whet.hardware.processor import vendor

_SMALL = 1 << 20
"""Multiplications below which the way into oneDNN costs more than it saves."""
CHOICE = "WHET_PRODUCTS"
"""Environment variable: mkl or onednn, instead of what suits the processor."""


@cache
def by_onednn() -> bool:
    """Return whether fp32 products of linear layers go to oneDNN in this process."""
    if not torch.backends.mkldnn.is_available():
        return False
    asked = os.environ.get(CHOICE)
    if asked in ("mkl", "onednn"):
        return asked == "onednn"
    capable = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return capable and vendor() not in ("GenuineIntel", "")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x (..., K) @ weight (M, K) transposed + bias (M,), to rounding what torch's own linear gives."""
    if not _suits(x, weight):
        return functional.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias)


def _suits(x: Tensor, weight: Tensor) -> bool:
    if x.dtype != torch.float32 or weight.dtype != torch.float32 or x.device.type != "cpu":
        return False
    if torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return False
    return x.numel() * weight.shape[0] >= _SMALL and by_onednn()


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return _times_transposed(x.flatten(0, -2), weight, bias).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        rows, grad = x.flatten(0, -2), grads[0].flatten(0, -2)
        need_x, need_weight, _ = ctx.needs_input_grad
        dx = _times_transposed(grad, weight.t()).view(x.shape) if need_x else None
        dweight = _times_transposed(grad.t(), rows.t()) if need_weight else None
        return dx, dweight, grad.sum(0) if ctx.has_bias else None


def _times_transposed(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return a (N, K) @ b (M, K) transposed + bias (M,), through oneDNN; a and b may be transposed views."""
    return torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")
