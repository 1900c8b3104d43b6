"""The gradient norm and AdamW over all tensors of a model in one native call each."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from whet.kernels.library import library
from whet.kernels.native_call import DTYPES, call
from whet.kernels.optimizer.rows_in_use import RowsInUse, rows_in_use
from whet.kernels.reference import layers as reference
from whet.kernels.specs import AdamWStep


def squared_norm(tensors: Sequence[Tensor]) -> float:
    """Return the sum of the squares of all elements of all tensors, summed in double: equal for any number of threads.

    If most rows of a gradient are known to be zero, only the others are read.
    """
    if not native(tensors):
        return reference.squared_norm(tensors)
    result = ctypes.c_double()
    held = {"grads": addresses(tensors), "sizes": sizes_of(tensors), "dtypes": dtypes_of(tensors), "result": result}
    held |= _use_of([rows_in_use(tensor) for tensor in tensors])
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
        return native(wide) and all(t.dtype == torch.float32 for t in wide)

    def _moments(self) -> dict[str, list[Tensor]]:
        return {"first": self.first, "second": self.second}

    def _reference_update(self, rows: list[Any], rates: Sequence[tuple[float, float]], step: AdamWStep) -> None:
        reference.adamw(rows, rates, step)


def native(tensors: Sequence[Tensor]) -> bool:
    """Return whether the native operators can work on all of these, each fp32 or bf16."""
    fits = all(t.device.type == "cpu" and t.dtype in DTYPES and t.is_contiguous() for t in tensors)
    return fits and library() is not None


def addresses(tensors: Sequence[Tensor | None]) -> Any:
    """Return a C array of the addresses of the tensors' data; null for None."""
    return (ctypes.c_void_p * len(tensors))(*(None if t is None else t.data_ptr() for t in tensors))


def sizes_of(tensors: Sequence[Tensor]) -> Any:
    """Return a C array of the tensors' numbers of elements."""
    return (ctypes.c_int64 * len(tensors))(*(t.numel() for t in tensors))


def dtypes_of(tensors: Sequence[Tensor]) -> Any:
    """Return a C array of the tensors' dtypes, in the numbers of native/operator.h."""
    return (ctypes.c_int32 * len(tensors))(*(DTYPES[t.dtype] for t in tensors))


def _use_of(rows: Sequence[RowsInUse | None]) -> dict[str, Any]:
    """Return C arrays of the addresses of the rows in use, null for all rows, and of the rows' widths."""
    widths = (ctypes.c_int64 * len(rows))(*(0 if one is None else one.width for one in rows))
    return {"rows_in_use": addresses([None if one is None else one.bytes for one in rows]), "widths": widths}


def _pointers(arrays: dict[str, Any]) -> dict[str, int]:
    """Return the addresses of C arrays, which the caller keeps alive during the call."""
    return {name: ctypes.addressof(array) for name, array in arrays.items()}
