"""The number format of the products; the weights stay float32 (the master copy)."""

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from whet.card import Card
from whet.config.arguments import TrainingArguments
from whet.kernels import linear as product
from whet.log import logger
from whet.precision import device as devices

if TYPE_CHECKING:
    from whet.kernels.int8 import Step

CARD = Card(
    name="half precision",
    asked_by="precision, bf16, fp16, tf32",
    does="Matrix products run in a shorter format; weights stay float32.",
    improves="both",
    same_result="nearly",
    hurts="On hardware without fast instructions for the format.",
    source="Micikevicius et al. 2017, arXiv:1710.03740",
    page="speed.md#number-formats",
)


class Precision:
    """What varies in a step: how a forward and a backward pass run, and what their gradients need afterwards.

    Without a change they compute in the format of the weights.
    """

    name: str
    """fp32, bf16, fp16 or int8; auto until a training run has measured."""

    def begin(self, seed: int, step: int) -> None:
        """Begin an optimizer step: the weights do not change until the next call."""

    def forward(self) -> AbstractContextManager[object]:
        """Return the context of a forward pass."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss` to .grad, possibly scaled."""
        loss.backward()

    def unscale(self, parameters: Sequence[nn.Parameter]) -> None:
        """Divide .grad by the scale, once per step."""

    def adapt(self) -> bool:
        """Adapt the scale to the step's gradients; return whether it was too high for them and can still be lowered."""
        return False

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs, ready for JSON."""
        return {}

    def load_state(self, saved: dict[str, Any]) -> None:
        """Restore what `state` returned."""


class Float32(Precision):
    """Products in the format of the weights."""

    name = "fp32"


class Undecided(Precision):
    """`auto` before a training run has measured: fp32."""

    name = "auto"


class BFloat16(Precision):
    """Matrix products in bfloat16 through torch's autocast; norms, softmax and losses in float32."""

    name = "bf16"

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def forward(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, dtype=torch.bfloat16)


class Int8(Precision):
    """Products of linear layers in 8-bit integers, everything else and passes without gradients in float32."""

    name = "int8"

    def __init__(self) -> None:
        self._step: Step | None = None
        self._backward = devices.int8_backward_too()

    def begin(self, seed: int, step: int) -> None:
        from whet.kernels.int8 import Step

        self._step = Step(seed, step, backward=self._backward)

    def forward(self) -> AbstractContextManager[object]:
        return self._running() if torch.is_grad_enabled() else nullcontext()

    def backward(self, loss: Tensor) -> None:
        with self._running():  # blocks may be recomputed
            loss.backward()

    def _running(self) -> AbstractContextManager[None]:
        return product.multiplied_by(None if self._step is None else self._step.linear)


class Float16(Precision):
    """Matrix products in float16 through torch's autocast, with a loss scale that keeps small gradients above zero.

    The scale halves when a gradient overflows and doubles after 2,000 steps without one (Micikevicius et al. 2018,
    arXiv:1710.03740, section 3.2).
    """

    name = "fp16"
    lowest_scale = 1.0
    """Below this scale, an overflow is not caused by the scale."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._scaler = GradScaler(device.type)
        self._bearer: torch.optim.Optimizer | None = None

    def forward(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, dtype=torch.float16)

    def backward(self, loss: Tensor) -> None:
        self._scaler.scale(loss).backward()

    def unscale(self, parameters: Sequence[nn.Parameter]) -> None:
        # The scaler reads gradients through an optimizer; this one holds all clipped parameters and never steps.
        self._bearer = self._bearer or torch.optim.SGD(parameters, lr=0.0)
        self._scaler.unscale_(self._bearer)

    def adapt(self) -> bool:
        before = self._scaler.get_scale()
        self._scaler.update()
        after = self._scaler.get_scale()
        if after >= before:
            return False
        logger.info("fp16: a gradient overflowed; the loss scale falls from %g to %g", before, after)
        return before > self.lowest_scale

    def state(self) -> dict[str, Any]:
        return self._scaler.state_dict()

    def load_state(self, saved: dict[str, Any]) -> None:
        if saved:  # a run in another format has none
            self._scaler.load_state_dict(saved)


def build(args: TrainingArguments, device: torch.device) -> Precision:
    """Return the requested precision; raises ConfigError if the device cannot compute in it."""
    devices.require(args.precision, args.tf32, device)
    if args.tf32 is not None:
        devices.set_tf32(args.tf32, device)
    return make(args.precision, device)


def make(name: str, device: torch.device) -> Precision:
    """Return a fresh precision of this name."""
    if name == "bf16":
        return BFloat16(device)
    if name == "fp16":
        return Float16(device)
    if name == "int8":
        devices.require_int8(device)
        return Int8()
    return Float32() if name == "fp32" else Undecided()


def as_run(args: TrainingArguments, precision: Precision) -> str:
    """Return the settings as JSON text, with the precision that `auto` has chosen, if any.

    Settings that contain a path are left out: the folder may be moved, copied and published.
    """
    ran = {name: precision.name == name for name in ("bf16", "fp16")} if precision.name != "auto" else {}
    settings = {name: value for name, value in args.to_dict().items() if name not in _PLACES}
    return json.dumps(settings | {"precision": precision.name} | ran, indent=2)


_PLACES = ("output_dir", "logging_dir", "resume_from_checkpoint")


def in_checkpoint(settings: Mapping[str, Any]) -> str:
    """Return the precision of a run from the settings in its checkpoint; older ones only have bf16."""
    return settings.get("precision") or ("bf16" if settings.get("bf16") else "fp32")
