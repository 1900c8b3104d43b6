"""The gradient norm and AdamW over all tensors of a model in one native call each, with moments in fp32 or 8 bits.

Moments in 8 bits are codes of the dynamic map of Dettmers et al. 2022 (arXiv:2110.02861). A block of 256 elements has
one scale, its largest magnitude; the last block of a tensor is shorter.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whet.kernels.embedding import RowsInUse, rows_in_use_of
from whet.kernels.library import library
from whet.kernels.operator import DTYPES, call, kept_table

BLOCK = 256
"""Elements of a moment in 8 bits that share a scale; native/optimizer/optimizer_8bit.cpp has the same number."""
_DECADES = 7
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class AdamWStep:
    """One step's constants: `step` counts from 1, and gradients are multiplied by `grad_scale` first (clipping)."""

    beta1: float
    beta2: float
    eps: float
    step: int
    grad_scale: float = 1.0


def squared_norm(tensors: Sequence[Tensor]) -> float:
    """Return the sum of the squares of all elements of all tensors, summed in double: equal for any number of threads.

    If most rows of a gradient are known to be zero, only the others are read.
    """
    if not native(tensors):
        return squared_norm_reference(tensors)
    result = ctypes.c_double()
    held = {"grads": addresses(tensors), "sizes": sizes_of(tensors), "dtypes": dtypes_of(tensors), "result": result}
    held |= _use_of(rows_in_use_of(tensors))
    call("grad_norm", n_tensors=len(tensors), **_pointers(held))
    return result.value


def gradient_norm(grads: Sequence[Tensor]) -> float:
    """Return the Euclidean norm over all elements of all tensors, on any device and of any dtype."""
    if not grads:
        return 0.0
    if not native(grads):
        return float(torch.nn.utils.get_total_norm(grads))
    return squared_norm(grads) ** 0.5


class Updated:
    """Tensors that one AdamW updates: `params` fp32 or bf16; the subclass defines `first` and `second` (m and v).

    `masters` are the fp32 values of bf16 parameters, or None if a parameter is its own master.
    """

    operator: str
    passes_by_rows = False
    """Whether the operator can skip rows of a table that are not in use."""

    def __init__(
        self,
        params: Sequence[Tensor],
        first: Sequence[Any],
        second: Sequence[Any],
        masters: Sequence[Tensor | None] | None = None,
    ) -> None:
        self.params, self.first, self.second = list(params), list(first), list(second)
        self.masters = list(masters) if masters is not None else [None] * len(self.params)
        self._native = native([*self.params, *(m for m in self.masters if m is not None)]) and self._fits()
        self._sizes = sizes_of(self.params)

    def update(
        self,
        grads: Sequence[Tensor],
        rates: Sequence[tuple[float, float]],
        step: AdamWStep,
        rows: Sequence[RowsInUse | None] | None = None,
    ) -> None:
        """Update parameters, masters and moments in place; `rates` has (learning rate, weight decay) per tensor.

        `rows` has, for each tensor without decay, the rows outside of which gradient and moments are zero.
        """
        if not (self._native and native(grads) and dtypes_of(grads)[:] == dtypes_of(self.params)[:]):
            self._update_in_torch(grads, rates, step)
            return
        lr, decay = ((ctypes.c_float * len(rates))(*column) for column in zip(*rates, strict=True))
        # read each time: setting `parameter.data` changes the address
        tensors = {"params": self.params, "grads": grads, "masters": self.masters, **self._moments()}
        held = {name: addresses(group) for name, group in tensors.items()}
        held |= {"sizes": self._sizes, "dtypes": dtypes_of(self.params), "learning_rates": lr, "weight_decays": decay}
        if self.passes_by_rows:
            held |= _use_of(rows or [None] * len(grads))
        numbers = {"beta1": step.beta1, "beta2": step.beta2, "eps": step.eps, "grad_scale": step.grad_scale}
        numbers |= {"correction1": 1 - step.beta1**step.step, "correction2": 1 - step.beta2**step.step}
        call(self.operator, n_tensors=len(grads), **_pointers(held), **numbers)

    def _update_in_torch(self, grads: Sequence[Tensor], rates: Sequence[tuple[float, float]], step: AdamWStep) -> None:
        updated = [param if master is None else master for param, master in zip(self.params, self.masters, strict=True)]
        self._reference_update(list(zip(updated, grads, self.first, self.second, strict=True)), rates, step)
        with torch.no_grad():
            for param, master in zip(self.params, self.masters, strict=True):
                if master is not None:
                    param.copy_(master)

    def _fits(self) -> bool:
        """Return whether the operator can work on the moments."""
        raise NotImplementedError

    def _moments(self) -> dict[str, list[Tensor]]:
        """Return the tensors of the moments, by their fields in the operator's arguments."""
        raise NotImplementedError

    def _reference_update(self, rows: list[Any], rates: Sequence[tuple[float, float]], step: AdamWStep) -> None:
        """Update rows of (parameter or master, gradient, first, second) in plain torch."""
        raise NotImplementedError


class AdamWTensors(Updated):
    """The tensors that one AdamW updates, with `first` and `second` (m and v) in fp32; masters are fp32 too."""

    operator = "adamw"
    passes_by_rows = True

    def _fits(self) -> bool:
        wide = [*self.first, *self.second, *(m for m in self.masters if m is not None)]
        return native(wide) and {t.dtype for t in wide} <= {torch.float32}

    def _moments(self) -> dict[str, list[Tensor]]:
        return {"first": self.first, "second": self.second}

    def _reference_update(self, rows: list[Any], rates: Sequence[tuple[float, float]], step: AdamWStep) -> None:
        adamw_reference(rows, rates, step)


class AdamW8bitTensors(Updated):
    """The tensors that one AdamW updates, with `first` and `second` (m and v) as codes."""

    operator = "adamw_8bit"

    def _fits(self) -> bool:
        return all(moment.codes.is_contiguous() for moment in (*self.first, *self.second))

    def _moments(self) -> dict[str, list[Tensor]]:
        return {
            "first": [m.codes for m in self.first],
            "second": [v.codes for v in self.second],
            "first_scales": [m.scales for m in self.first],
            "second_scales": [v.scales for v in self.second],
        }

    def _reference_update(self, rows: list[Any], rates: Sequence[tuple[float, float]], step: AdamWStep) -> None:
        adamw_8bit_reference(rows, rates, step)


def native(tensors: Sequence[Tensor]) -> bool:
    """Return whether the native operators can work on all of these, each fp32 or bf16."""
    for tensor in tensors:  # a generator would take several times as long
        if tensor.device.type != "cpu" or tensor.dtype not in DTYPES or not tensor.is_contiguous():
            return False
    return library() is not None


def addresses(tensors: Sequence[Tensor | None]) -> Any:
    """Return a C array of the addresses of the tensors' data; null for None."""
    return (ctypes.c_void_p * len(tensors))(*[None if t is None else t.data_ptr() for t in tensors])


def sizes_of(tensors: Sequence[Tensor]) -> Any:
    """Return a C array of the tensors' numbers of elements."""
    return (ctypes.c_int64 * len(tensors))(*[t.numel() for t in tensors])


def dtypes_of(tensors: Sequence[Tensor]) -> Any:
    """Return a C array of the tensors' dtypes, in the numbers of native/operator.h."""
    return (ctypes.c_int32 * len(tensors))(*[DTYPES[t.dtype] for t in tensors])


def _use_of(rows: Sequence[RowsInUse | None]) -> dict[str, Any]:
    """Return C arrays of the addresses of the rows in use, null for all rows, and of the rows' widths."""
    widths = (ctypes.c_int64 * len(rows))(*[0 if one is None else one.width for one in rows])
    return {"rows_in_use": addresses([None if one is None else one.bytes for one in rows]), "widths": widths}


def _pointers(arrays: dict[str, Any]) -> dict[str, int]:
    """Return the addresses of C arrays, which the caller keeps alive during the call."""
    return {name: ctypes.addressof(array) for name, array in arrays.items()}


def squared_norm_reference(tensors: Sequence[Tensor]) -> float:
    """Return `squared_norm` in plain torch."""
    return float(sum(tensor.double().square().sum() for tensor in tensors))


def adamw_reference(
    state: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]], rates: Sequence[tuple[float, float]], step: AdamWStep
) -> None:
    """Update (parameter, gradient, m, v) in place; rates are (learning rate, weight decay) per tensor.

    Loshchilov and Hutter 2019, algorithm 2.
    """
    correction1, correction2 = 1 - step.beta1**step.step, 1 - step.beta2**step.step
    with torch.no_grad():
        for (param, grad, m, v), (lr, decay) in zip(state, rates, strict=True):
            g = grad.to(m.dtype) * step.grad_scale
            m.lerp_(g, 1 - step.beta1)
            v.mul_(step.beta2).addcmul_(g, g, value=1 - step.beta2)
            move = (m / correction1) / ((v / correction2).sqrt() + step.eps)
            param.copy_(param.to(m.dtype) * (1 - lr * decay) - lr * move)


@dataclass(frozen=True)
class Codes:
    """A tensor in 8 bits: `codes` uint8 of its shape, `scales` (blocks,) fp32."""

    codes: Tensor
    scales: Tensor
    signed: bool

    def numbers(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the values that the codes stand for, in the tensor's shape."""
        values = dynamic_map(self.signed).to(dtype)[self.codes.long()]
        scales = self.scales.to(dtype).repeat_interleave(BLOCK)[: self.codes.numel()]
        return values * scales.view(self.codes.shape)

    def put(self, numbers: Tensor) -> None:
        """Write the nearest codes of the numbers; without a sign, a positive number never becomes zero."""
        flat = numbers.flatten()
        padded = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
        largest = padded.abs().amax(-1, keepdim=True)
        counts = largest >= _SMALLEST_SCALE
        shares = torch.where(counts, padded / largest.clamp_min(_SMALLEST_SCALE), 0.0)
        codes = (_nearest_signed if self.signed else _nearest_unsigned)(shares.double())
        self.codes.copy_(codes.flatten()[: flat.numel()].view(self.codes.shape))
        self.scales.copy_(torch.where(counts, largest, 0.0).flatten())


@kept_table
def dynamic_map(signed: bool) -> Tensor:
    """Return the value of each code (256,), float64.

    Seven decades below 1, each with twice the values of the one below, at the middles of equal parts of [0.1, 1] times
    the decade; and 0 and 1. Signed codes are a sign bit and a magnitude; minus zero, 0x80, stands for 1.
    """
    decades = []
    for i in range(_DECADES):
        places = 2**i if signed else 2 ** (i + 1)
        middles = (torch.arange(places, dtype=torch.float64) + 0.5) / places
        decades.append(10.0 ** (i - _DECADES + 1) * (0.1 + 0.9 * middles))
    positive = torch.cat(decades)
    zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    return torch.cat([zero, positive, one, -positive] if signed else [zero, positive, one])


def adamw_8bit_reference(
    state: Sequence[tuple[Tensor, Tensor, Codes, Codes]], rates: Sequence[tuple[float, float]], step: AdamWStep
) -> None:
    """Update (parameter, gradient, m, v) in place: `adamw_reference` on the decoded moments, which are then encoded."""
    for (param, grad, first, second), rate in zip(state, rates, strict=True):
        wide = torch.float64 if param.dtype == torch.float64 else torch.float32
        m, v = first.numbers(wide), second.numbers(wide)
        adamw_reference([(param, grad, m, v)], [rate], step)
        first.put(m)
        second.put(v)


def _middles(values: Tensor) -> Tensor:
    return (values[1:] + values[:-1]) / 2


def _nearest_signed(shares: Tensor) -> Tensor:
    magnitudes = dynamic_map(True)[: 2 ** (_DECADES)]
    n = torch.bucketize(shares.abs(), _middles(magnitudes), right=True)
    codes = n | torch.where((shares < 0) & (n > 0), 0x80, 0)
    return torch.where(shares >= (magnitudes[-1] + 1) / 2, 0x80, codes)


def _nearest_unsigned(shares: Tensor) -> Tensor:
    codes = torch.bucketize(shares, _middles(dynamic_map(False)), right=True)
    return torch.where(shares > 0, codes.clamp_min(1), codes)
