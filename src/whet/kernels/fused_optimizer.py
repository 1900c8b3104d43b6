"""The gradient norm and AdamW over all tensors of a model in one native call each."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from whet.kernels import reference, structs
from whet.kernels.library import library
from whet.kernels.native_call import DTYPES, call
from whet.kernels.reference import AdamWStep


def squared_norm(tensors: Sequence[Tensor]) -> float:
    """Return the sum of the squares of all elements of all tensors, summed in double: the same for any thread count."""
    if not native(tensors):
        return reference.squared_norm(tensors)
    result = ctypes.c_double()
    grads, sizes, dtypes = addresses(tensors), sizes_of(tensors), dtypes_of(tensors)
    args = structs.GradNorm(len(tensors), array_at(grads), array_at(sizes), array_at(dtypes), ctypes.pointer(result))
    call("grad_norm", args)
    return result.value


def gradient_norm(grads: Sequence[Tensor]) -> float:
    """Return the Euclidean norm over all elements of all tensors, wherever they are and of whatever dtype."""
    if not grads:
        return 0.0
    if not native(grads):
        return float(torch.nn.utils.get_total_norm(grads))
    return squared_norm(grads) ** 0.5


class AdamWTensors:
    """The tensors that one AdamW updates.

    `params` are fp32 or bf16, `first` and `second` (m and v) fp32. `masters` are the fp32 values of bf16 parameters, or
    None where a parameter is its own master.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        first: Sequence[Tensor],
        second: Sequence[Tensor],
        masters: Sequence[Tensor | None] | None = None,
    ) -> None:
        self.params, self.first, self.second = list(params), list(first), list(second)
        self.masters = list(masters) if masters is not None else [None] * len(self.params)
        fixed = [*self.params, *self.first, *self.second, *(m for m in self.masters if m is not None)]
        self._native = native(fixed) and all(t.dtype == torch.float32 for t in fixed[len(self.params) :])
        self._sizes = sizes_of(self.params)

    def update(self, grads: Sequence[Tensor], rates: Sequence[tuple[float, float]], step: AdamWStep) -> None:
        """Update parameters, masters and moments in place; `rates` holds (learning rate, weight decay) a tensor."""
        if not (self._native and native(grads) and dtypes_of(grads)[:] == dtypes_of(self.params)[:]):
            self._update_plainly(grads, rates, step)
            return
        lr, decay = ((ctypes.c_float * len(rates))(*column) for column in zip(*rates, strict=True))
        # looked up each time: an address may change when somebody sets `parameter.data`
        held = [addresses(group) for group in (self.params, grads, self.first, self.second, self.masters)]
        dtypes = dtypes_of(self.params)
        args = structs.AdamW(len(grads), array_at(self._sizes), array_at(held[0]), array_at(dtypes))
        args.grads, args.first, args.second, args.masters = map(array_at, held[1:])
        args.learning_rates, args.weight_decays = array_at(lr), array_at(decay)
        args.beta1, args.beta2, args.eps, args.grad_scale = step.beta1, step.beta2, step.eps, step.grad_scale
        args.correction1, args.correction2 = 1 - step.beta1**step.step, 1 - step.beta2**step.step
        call("adamw", args)

    def _update_plainly(self, grads: Sequence[Tensor], rates: Sequence[tuple[float, float]], step: AdamWStep) -> None:
        updated = [param if master is None else master for param, master in zip(self.params, self.masters, strict=True)]
        reference.adamw(list(zip(updated, grads, self.first, self.second, strict=True)), rates, step)
        with torch.no_grad():
            for param, master in zip(self.params, self.masters, strict=True):
                if master is not None:
                    param.copy_(master)


def native(tensors: Sequence[Tensor]) -> bool:
    """Return whether the native operators can work on all of these, each fp32 or bf16."""
    fits = all(t.device.type == "cpu" and t.dtype in DTYPES and t.is_contiguous() for t in tensors)
    return fits and library() is not None


def addresses(tensors: Sequence[Tensor | None]) -> Any:
    """Return a C array of where the tensors' data lie; null for None."""
    return (ctypes.c_void_p * len(tensors))(*(None if t is None else t.data_ptr() for t in tensors))


def sizes_of(tensors: Sequence[Tensor]) -> Any:
    """Return a C array of the tensors' counts of elements."""
    return (ctypes.c_int64 * len(tensors))(*(t.numel() for t in tensors))


def dtypes_of(tensors: Sequence[Tensor]) -> Any:
    """Return a C array of the tensors' dtypes, in the numbers of native/args.h."""
    return (ctypes.c_int32 * len(tensors))(*(DTYPES[t.dtype] for t in tensors))


def array_at(array: Any) -> int:
    """Return the address of a C array, which the caller keeps alive."""
    return ctypes.addressof(array)
