"""AdamW with moments of 8 bits over all tensors of a model in one native call."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from whet.kernels import reference_8bit, structs
from whet.kernels.fused_optimizer import addresses, array_at, dtypes_of, native, sizes_of
from whet.kernels.native_call import call
from whet.kernels.reference import AdamWStep
from whet.kernels.reference_8bit import Codes


class AdamW8bitTensors:
    """The tensors that one AdamW updates: `params` fp32 or bf16, `first` and `second` (m and v) as codes.

    `masters` are the fp32 values of bf16 parameters, or None where a parameter is its own master.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        first: Sequence[Codes],
        second: Sequence[Codes],
        masters: Sequence[Tensor | None] | None = None,
    ) -> None:
        self.params, self.first, self.second = list(params), list(first), list(second)
        self.masters = list(masters) if masters is not None else [None] * len(self.params)
        self._native = native([*self.params, *(m for m in self.masters if m is not None)]) and all(
            moment.codes.is_contiguous() for moment in (*first, *second)
        )
        self._sizes = sizes_of(self.params)

    def update(self, grads: Sequence[Tensor], rates: Sequence[tuple[float, float]], step: AdamWStep) -> None:
        """Update parameters, masters and moments in place; `rates` holds (learning rate, weight decay) a tensor."""
        if not (self._native and native(grads) and dtypes_of(grads)[:] == dtypes_of(self.params)[:]):
            self._update_plainly(grads, rates, step)
            return
        groups = (
            self.params, grads, [m.codes for m in self.first], [v.codes for v in self.second],
            [m.scales for m in self.first], [v.scales for v in self.second], self.masters,
        )  # fmt: skip
        held = [addresses(group) for group in groups]  # the arrays must outlive the call
        lr, decay = ((ctypes.c_float * len(rates))(*column) for column in zip(*rates, strict=True))
        dtypes = dtypes_of(self.params)
        args = structs.AdamW8bit(len(grads), array_at(self._sizes), array_at(held[0]), array_at(dtypes))
        args.grads, args.first, args.second, args.first_scales, args.second_scales, args.masters = map(
            array_at, held[1:]
        )
        args.learning_rates, args.weight_decays = array_at(lr), array_at(decay)
        args.beta1, args.beta2, args.eps, args.grad_scale = step.beta1, step.beta2, step.eps, step.grad_scale
        args.correction1, args.correction2 = 1 - step.beta1**step.step, 1 - step.beta2**step.step
        call("adamw_8bit", args)

    def _update_plainly(self, grads: Sequence[Tensor], rates: Sequence[tuple[float, float]], step: AdamWStep) -> None:
        updated = [param if master is None else master for param, master in zip(self.params, self.masters, strict=True)]
        reference_8bit.adamw_8bit(list(zip(updated, grads, self.first, self.second, strict=True)), rates, step)
        with torch.no_grad():
            for param, master in zip(self.params, self.masters, strict=True):
                if master is not None:
                    param.copy_(master)
