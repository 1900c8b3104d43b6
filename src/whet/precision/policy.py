"""In which number format the forward pass computes; the weights stay float32 (the master copy)."""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from whet.config.arguments import TrainingArguments


class Precision(Protocol):
    """The seam of the step: how to run a forward pass and a backward pass."""

    name: str

    def forward(self) -> AbstractContextManager[object]:
        """Return the context of a forward pass."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Leave the gradients of `loss` in .grad."""
        ...


class Float32:
    """Compute in the format that the weights are stored in: nothing to do."""

    name = "fp32"

    def forward(self) -> AbstractContextManager[object]:
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        loss.backward()


class BFloat16(Float32):
    """Matrix products in bfloat16 through torch's autocast; norms, softmax and losses in float32."""

    name = "bf16 compute, fp32 weights"

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def forward(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, dtype=torch.bfloat16)


def build(args: TrainingArguments, device: torch.device) -> Precision:
    """Return the precision that was asked for."""
    return BFloat16(device) if args.bf16 else Float32()
