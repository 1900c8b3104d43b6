"""Cross entropies: of a large vocabulary without the complete table of logits, and of rows of different lengths."""

from typing import Any

import torch
from torch import Tensor
from torch._C import _autograd  # pyright: ignore[reportAttributeAccessIssue]
from torch.autograd import Function
from torch.nn import functional

from whet.kernels.matrix import (
    by_onednn,
    by_pairs,
    input_gradient,
    is_widened,
    product_of,
    suits_widened,
    weight_gradient_into,
    widened_product_into,
)
from whet.kernels.operator import DTYPES, call, floats, has_rows, misfit, native_for, once_differentiable, wide

_CHUNK_BYTES = 32 * 2**20  # logits at a time: a few hundred rows of a common vocabulary, enough for full-speed products
_GPU_CHUNK_BYTES = 2**30
"""On a GPU: products of a few hundred rows would leave most of it idle, and its memory is larger."""
_LEAST_ROWS = (
    256  # of a vocabulary of 128,000: with fewer, adding to the weight's gradient takes longer than the product
)

_BLOCK = 4096
"""Entries of the vocabulary whose logits oneDNN computes at a time; it has no way to write to memory that is there."""


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, cap: float | None = None, bias: Tensor | None = None
) -> Tensor:
    """Return the summed cross entropy () of the logits hidden (N, D) @ weight (V, D)' + bias (V,).

    Negative labels are ignored. With a cap, logits are cap tanh(logits / cap) (Gemma Team 2024, arXiv:2408.00118,
    section 2).

    Forward also computes the gradients, chunk by chunk, and stores them: (N, D) and (V, D) instead of (N, V) numbers.
    This idea is Liger's (Hsu et al. 2024, arXiv:2410.10989). `labels` (N,) are int64 below V. Under autocast the
    products are in its format, and each chunk's part of the weight's gradient is rounded to it once.
    The parts are summed in fp32: of a weight in bf16, its gradient takes twice the memory until all chunks are there.
    """
    if native_for(hidden) is None or native_for(weight) is None:
        return linear_cross_entropy_reference(hidden, weight, labels, cap, bias)
    assert labels.dtype == torch.int64
    fits = hidden.dim() == 2 and hidden.shape[1] == weight.shape[1] and labels.shape == hidden.shape[:1]
    if not fits or (bias is not None and bias.shape != weight.shape[:1]):
        raise misfit("linear_cross_entropy", hidden, weight, labels, bias)
    labels = labels.clamp_min(-1)
    if labels.numel() and int(labels.max()) >= weight.shape[0]:
        raise IndexError(f"a label is outside of the vocabulary of {weight.shape[0]}")
    return _LinearCrossEntropy.apply(hidden, weight, bias, labels, _product_format(weight), cap)


def linear_cross_entropy_reference(
    hidden: Tensor, weight: Tensor, labels: Tensor, cap: float | None = None, bias: Tensor | None = None
) -> Tensor:
    """Return `linear_cross_entropy` in plain torch, also in float64."""
    logits = wide(functional.linear(hidden, weight, bias))
    logits = logits if cap is None else cap * (logits / cap).tanh()
    return functional.cross_entropy(logits, labels.clamp_min(-1), ignore_index=-1, reduction="sum")


def chunk_rows(weight: Tensor) -> int:
    """Return how many rows of logits for a weight (V, D) exist at a time."""
    most = _CHUNK_BYTES if weight.device.type == "cpu" else _GPU_CHUNK_BYTES
    return max(_LEAST_ROWS, most // (weight.shape[0] * weight.element_size()))


def _product_format(weight: Tensor) -> torch.dtype:
    """Return the format of the products: that of autocast, if it runs."""
    cpu = weight.device.type == "cpu" and torch.is_autocast_enabled("cpu")
    found = torch.get_autocast_dtype("cpu") if cpu else weight.dtype
    return found if found in DTYPES else weight.dtype


def row_cross_entropy(logits: Tensor, labels: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return -log softmax(logits of the row)[label] (rows,), fp32, for rows that are packed in logits (N,).

    `labels` (rows,) int64 are positions within their row; `cu_seqlens` (rows + 1,).
    """
    if native_for(logits) is None:
        return row_cross_entropy_reference(logits, labels, cu_seqlens)
    assert labels.dtype == torch.int64
    fits = has_rows(cu_seqlens, logits.numel()) and labels.shape == cu_seqlens[1:].shape
    if not fits:
        raise misfit("row_cross_entropy", logits, labels, cu_seqlens)
    if bool((labels >= cu_seqlens.diff()).any()):
        raise IndexError("a label is outside of its row")
    return _RowCrossEntropy.apply(logits, labels.contiguous(), cu_seqlens.int().contiguous())


def row_cross_entropy_reference(logits: Tensor, labels: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return `row_cross_entropy` in plain torch, also in float64."""
    rows = wide(to_rows(logits, cu_seqlens, -torch.inf))
    return functional.cross_entropy(rows, labels, reduction="none")


def to_rows(flat: Tensor, cu_seqlens: Tensor, fill: float) -> Tensor:
    """Return the rows of `flat` (N,) as a table (rows, longest), filled up with `fill`."""
    lengths = cu_seqlens.diff()
    rows = flat.new_full((len(lengths), int(lengths.max())), fill)
    return rows.masked_scatter(torch.arange(rows.shape[1], device=flat.device) < lengths[:, None], flat)


class _RowCrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, cu_seqlens: Tensor) -> Tensor:
        grad, n_rows = logits.detach().clone(memory_format=torch.contiguous_format), labels.numel()
        losses = floats(n_rows)
        how = {"n_rows": n_rows, "dtype": DTYPES[logits.dtype], "differentiate": ctx.needs_input_grad[0]}
        call("row_cross_entropy", **how, cu_seqlens=cu_seqlens, logits=grad, labels=labels, losses=losses)
        ctx.save_for_backward(grad, cu_seqlens)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        grad, cu_seqlens = ctx.saved_tensors
        return grad * grads[0].repeat_interleave(cu_seqlens.diff()).to(grad.dtype), None, None


class _LinearCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        dtype: torch.dtype,
        cap: float | None,
    ) -> Tensor:
        wanted = ctx.needs_input_grad[:3]
        losses = floats(hidden.shape[0])
        dhidden = torch.empty_like(hidden) if wanted[0] else None
        n_rows, labels = chunk_rows(weight), labels.contiguous()
        dweight = _gradient_of(weight, -(-len(hidden) // n_rows)) if wanted[1] else None
        dbias = None if bias is None or not wanted[2] else torch.zeros_like(bias, dtype=torch.float32)
        with torch.autocast("cpu", enabled=False):
            x = hidden.to(dtype)
            w = weight if suits_widened(x, weight) else weight.to(dtype)
            b = None if bias is None else bias.to(dtype)
            logits = x.new_empty(min(n_rows, len(x)), len(w))
            capped = None if cap is None else torch.empty_like(logits)
            for first in range(0, hidden.shape[0], n_rows):
                part = slice(first, first + n_rows)
                found = _product_into(logits[: len(x[part])], x[part], w, b)
                if cap is not None and capped is not None:
                    torch.mul(found.div_(cap).tanh_(), cap, out=capped[: len(found)])
                grad = found if capped is None else capped[: len(found)]
                _losses_and_gradient(grad, labels[part], losses[part], differentiate=any(wanted))
                if capped is not None and any(wanted):
                    grad.mul_(found.square_().neg_().add_(1.0))  # found holds tanh(logits / cap)
                if dhidden is not None:
                    dhidden[part] = input_gradient(grad, w)
                if dweight is not None:
                    _add_product(dweight, grad, x[part], first=first == 0)
                if dbias is not None:
                    dbias += grad.sum(0, dtype=torch.float32)
        dweight = None if dweight is None else dweight.to(weight.dtype)
        dbias = None if dbias is None or bias is None else dbias.to(bias.dtype)
        ctx.save_for_backward(dhidden, dweight, dbias)
        return losses.double().sum().float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (*(None if grad is None else _scaled(grad, grads[0]) for grad in ctx.saved_tensors), None, None, None)


def _scaled(grad: Tensor, factor: Tensor) -> Tensor:
    """Return the stored gradient times the factor (): in its memory, unless another backward pass may read it."""
    kept = _autograd._get_current_graph_task_keep_graph()
    return grad * factor.to(grad.dtype) if kept else grad.mul_(factor.to(grad.dtype))


def _product_into(logits: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Write x (N, D) @ weight (V, D)' + bias to the logits (N, V), the memory of the chunk before; return them."""
    if suits_widened(x, weight):
        return widened_product_into(logits, x, weight, bias)
    if not by_onednn() or x.dtype != torch.float32:
        return torch.mm(x, weight.T, out=logits) if bias is None else torch.addmm(bias, x, weight.T, out=logits)
    for first in range(0, len(weight), _BLOCK):
        block = slice(first, first + _BLOCK)
        logits[:, block] = product_of(x, weight[block], None if bias is None else bias[block])
    return logits


def _gradient_of(weight: Tensor, n_chunks: int) -> Tensor:
    """Return what the first chunk writes to, or zeros if there is none; several chunks are summed in fp32."""
    if not n_chunks:
        return torch.zeros_like(weight)
    return torch.empty_like(weight, dtype=torch.float32 if n_chunks > 1 else None)


def _add_product(total: Tensor, grad: Tensor, x: Tensor, *, first: bool) -> None:
    """Add grad (N, V)' @ x (N, D) to the total (V, D), which may be in a wider format; the first chunk sets it."""
    native = by_onednn() if grad.dtype == torch.float32 else by_pairs() or is_widened()
    native = native and total.dtype == torch.float32
    if (native or suits_widened(grad.t(), x.t())) and total.is_contiguous():
        weight_gradient_into(total, None, grad, x, add=not first)
    elif total.dtype == grad.dtype and not first:
        total.addmm_(grad.T, x)
    elif first:
        total.copy_(grad.T @ x)
    else:
        total.add_(grad.T @ x)


def _losses_and_gradient(logits: Tensor, labels: Tensor, losses: Tensor, *, differentiate: bool) -> Tensor:
    """Write the rows' losses and return the logits, overwritten by their gradient if that is wanted."""
    shape = {"rows": len(logits), "width": logits.shape[1], "stride": logits.stride(0), "dtype": DTYPES[logits.dtype]}
    call("cross_entropy", **shape, differentiate=differentiate, logits=logits, labels=labels, losses=losses)
    return logits
