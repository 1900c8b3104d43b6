"""Matrix products without gradients of their own, each in the fastest library on this CPU.

torch multiplies fp32 matrices with MKL. On processors that are not Intel's, MKL uses only AVX2; with AVX-512, oneDNN,
which torch contains too, is twice as fast. The gradient of a weight, whose product runs over the rows of both
matrices, is faster still as a native operator (`python benchmarks/cpu/products.py`).

torch multiplies bf16 in oneDNN, and without AVX-512 in loops of its own. If the processor has no instructions for it,
or slow ones, that takes 1.8 to 100 times as long as fp32: there bf16 factors are widened to fp32, multiplied, and the
result is rounded to bf16. Sums are of fp32 either way. AMX and Arm's bf16 are fast, and so are pairs of AVX-512 BF16
except Intel's, which multiply them at half the rate of fp32 (decision 26).
"""

import ctypes
from functools import cache

import torch
from torch import Tensor
from torch.library import custom_op, register_fake
from torch.nn import functional

from whet.card import Card
from whet.config import environment
from whet.hardware.cpu import features, vendor
from whet.kernels.library import library
from whet.kernels.operator import DTYPES, call, is_followed, misfit, native_for

CARD = Card(
    name="matrix library",
    asked_by="default",
    does="Products run in the processor's fastest library; bf16 is widened where fp32 is faster.",
    improves="speed",
    same_result="yes",
    hurts="When the choice is wrong: WHET_PRODUCTS changes it, and WHET_ISA for bf16 with AVX-512 BF16 and no AMX.",
    source="decision 4 of whet",
    page="speed.md#matrix-products",
)

_SMALL = 1 << 20
"""Multiplications below which the call of oneDNN costs more than it saves."""
_WIDENED_ROWS = 2048
"""Rows that exist in both formats at a time: enough for full speed on many cores."""
_WIDENED_NUMBERS = 1 << 24
"""Numbers of a weight in bf16 that exist in both formats at a time: 64 MiB in fp32."""
_LEAST_ROWS_IN_PAIRS, _LEAST_ROWS_EMULATED = 64, 8
"""With fewer rows, a weight in bf16 is not widened: that takes longer than torch's product, in pairs or emulated."""
WIDENED = "whet::widened_product"
"""The name of `widened_product` among torch's operators."""
CHOICE = "WHET_PRODUCTS"
"""Environment variable: mkl or onednn, instead of the choice by processor."""


@cache
def by_onednn() -> bool:
    """Return whether fp32 products of linear layers run in oneDNN in this process."""
    if not torch.backends.mkldnn.is_available():
        return False
    if asked := environment.value(CHOICE):
        return asked == "onednn"
    capable = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return capable and vendor() not in ("GenuineIntel", "")


@cache
def by_pairs() -> bool:
    """Return whether native operators multiply pairs of bf16, and nothing on this processor is faster (AMX)."""
    return "amx_bf16" not in features() and _has_pairs()


@cache
def is_widened() -> bool:
    """Return whether products of bf16 are faster here in fp32: without AMX, Arm's bf16, and fast pairs."""
    known = features()
    if library() is None or not known:
        return False
    return not known & {"amx_bf16", "bf16"} and not _has_pairs()


@cache
def _least_rows() -> int:
    return _LEAST_ROWS_IN_PAIRS if "avx512_bf16" in features() else _LEAST_ROWS_EMULATED


def _has_pairs() -> bool:
    """Return whether native operators multiply pairs of bf16 in this process."""
    found = ctypes.c_int32(0)
    if library() is not None:
        call("bf16_support", pairs=ctypes.addressof(found))
    return bool(found.value)


def product_of(x: Tensor, weight: Tensor, bias: Tensor | None, *, n_rows: int | None = None) -> Tensor:
    """Return x (N, K) @ weight (M, K) transposed + bias (M,), without a gradient.

    `n_rows` chooses the library, for products that must not be rounded by how many rows each has; None: N.
    """
    if suits_onednn(x, weight, n_rows):
        return times_transposed(x, weight, bias)
    if suits_widened(x, weight, n_rows):
        return widened_product(x, weight, bias, n_rows)
    return functional.linear(x, weight, bias)


def input_gradient(grad: Tensor, weight: Tensor, *, n_rows: int | None = None) -> Tensor:
    """Return grad (N, M) @ weight (M, K); `n_rows` as in `product_of`."""
    if grad.device.type == "cpu" and grad.dtype == torch.float32 and by_onednn():
        return times_transposed(grad, weight.t())
    if suits_widened(grad, weight, n_rows):
        return widened_product(grad, weight.t(), None, n_rows)
    return torch.mm(grad, weight)


def weight_gradient(grad: Tensor, x: Tensor, *, bias: bool) -> tuple[Tensor, Tensor | None]:
    """Return (grad (N, M) transposed @ x (N, K), the sum of grad's rows (M,) or None) in grad's dtype."""
    dweight = grad.new_empty(grad.shape[1], x.shape[1])
    dbias = grad.new_empty(grad.shape[1]) if bias else None
    weight_gradient_into(dweight, dbias, grad, x)
    return dweight, dbias


def weight_gradient_into(dweight: Tensor, dbias: Tensor | None, grad: Tensor, x: Tensor, *, add: bool = False) -> None:
    """Write what `weight_gradient` returns to contiguous tensors of that shape, or add it to what they hold."""
    native = native_for(grad, x)
    if native is None and dweight.dtype != grad.dtype:
        grad, x = grad.to(dweight.dtype), x.to(dweight.dtype)
        native = native_for(grad, x)
    if native is None or dweight.dtype != torch.float32:
        if suits_widened(grad.t(), x.t()):
            widened_product_into(dweight, grad.t(), x.t(), add=add)
        elif add:
            torch.addmm(dweight, grad.t(), x, out=dweight)
        else:
            torch.mm(grad.t(), x, out=dweight)
        if dbias is not None:
            dbias.add_(grad.sum(0)) if add else torch.sum(grad, 0, out=dbias)
        return
    grad, x = grad if grad.stride(1) == 1 else grad.contiguous(), x.contiguous()
    fits = len(grad) == len(x) and dweight.shape == (grad.shape[1], x.shape[1]) and dweight.is_contiguous()
    if not (fits and (dbias is None or dbias.shape == grad.shape[1:])):
        raise misfit("weight_gradient", grad, x, dweight, dbias)
    call(
        "weight_gradient",
        rows=len(x),
        width=x.shape[1],
        out=grad.shape[1],
        dy_stride=grad.stride(0),
        dtype=DTYPES[x.dtype],
        add=add,
        dy=grad,
        x=x,
        dweight=dweight,
        dbias=dbias,
    )


def suits_onednn(x: Tensor, weight: Tensor, n_rows: int | None = None) -> bool:
    """Return whether a product of x (..., K) and weight (M, K) is fp32 and large, and oneDNN is to compute it.

    `n_rows`: the rows to choose for; None: those of x.
    """
    if x.dtype != torch.float32 or weight.dtype != torch.float32 or x.device.type != "cpu":
        return False
    if is_followed() or torch.is_autocast_enabled("cpu"):
        return False
    elements = x.numel() if n_rows is None else n_rows * x.shape[-1]
    return elements * weight.shape[0] >= _SMALL and by_onednn()


def suits_widened(x: Tensor, weight: Tensor, n_rows: int | None = None) -> bool:
    """Return whether a product of x (..., K) in bf16 and weight (M, K), in bf16 or fp32, is faster in fp32."""
    return x.dtype == torch.bfloat16 and is_faster_widened(x, weight, n_rows)


def is_faster_widened(x: Tensor, weight: Tensor, n_rows: int | None = None) -> bool:
    """Return whether a product with a result in bf16 is faster in fp32; its factors are in bf16 or fp32, also both.

    Not with a weight in bf16 and few rows: widening the weight would then take longer than the product.
    """
    if x.dtype not in DTYPES or weight.dtype not in DTYPES or not x.device.type == weight.device.type == "cpu":
        return False
    elements = x.numel() if n_rows is None else n_rows * x.shape[-1]
    pays = weight.dtype == torch.float32 or elements >= _least_rows() * x.shape[-1]
    return pays and not is_followed() and is_widened()


def times_transposed(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return a (N, K) @ b (M, K) transposed + bias (M,), in oneDNN; a and b may be transposed views."""
    return torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")


def widened_product(x: Tensor, weight: Tensor, bias: Tensor | None, n_rows: int | None = None) -> Tensor:
    """Return x (N, K) @ weight (M, K) transposed + bias (M,) in bf16, multiplied and summed in fp32."""
    if torch._C._len_torch_dispatch_stack() > 0:
        return _as_one_operator(x, weight, bias, n_rows)
    result = x.new_empty(x.shape[0], weight.shape[0], dtype=torch.bfloat16)
    return widened_product_into(result, x, weight, bias, n_rows=n_rows)


@custom_op(WIDENED, mutates_args=())
def _as_one_operator(x: Tensor, weight: Tensor, bias: Tensor | None, n_rows: int | None) -> Tensor:
    """Compute `widened_product` for selective checkpointing, which would else keep the fp32 results inside it."""
    return widened_product(x, weight, bias, n_rows)


@register_fake(WIDENED)
def _(x: Tensor, weight: Tensor, bias: Tensor | None, n_rows: int | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0], dtype=torch.bfloat16)


def widened_product_into(
    result: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    n_rows: int | None = None,
    add: bool = False,
) -> Tensor:
    """Write what `widened_product` returns to the result (N, M), or add it to what that holds; return the result.

    Of a large weight in bf16, a block of rows at a time is widened, so that it never exists completely in fp32.
    """
    n_rows = len(x) if n_rows is None else n_rows
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        blocks = _blocks_of(weight)
        if len(blocks) == 1:
            weight = weight.float()
        bias = None if bias is None else bias.float()
        for first in range(0, len(x), _WIDENED_ROWS):
            rows = slice(first, first + _WIDENED_ROWS)
            part = x[rows].float()
            for block in blocks:
                wide = product_of(part, weight[block].float(), None if bias is None else bias[block], n_rows=n_rows)
                if add:
                    result[rows, block] += wide
                else:
                    result[rows, block] = wide
    return result


def _blocks_of(weight: Tensor) -> list[slice]:
    """Return the blocks of a weight's rows that are widened at a time; one in fp32 needs no widening."""
    if weight.dtype == torch.float32 or weight.numel() <= _WIDENED_NUMBERS:
        return [slice(None)]
    step = max(1, _WIDENED_NUMBERS // weight.shape[1])
    return [slice(first, first + step) for first in range(0, weight.shape[0], step)]
