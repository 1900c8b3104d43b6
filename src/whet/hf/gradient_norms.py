"""Steps whose gradient is not finite: none of them changes a weight, and several in a row end the training.

On a GPU the optimizer's own kernel leaves such a step out, by the flag that torch's GradScaler sets, and the norm is
read one step later: a program that waited for it would leave the GPU without work until it has launched the next step.
Source: torch.amp.GradScaler, `_step_supports_amp_scaling`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whet.errors import NonFiniteError
from whet.log import logger


def leaves_out_itself(optimizer: Any, norm: Any) -> bool:
    """Return whether the optimizer's kernel can leave a step out by itself, on the GPU where the norm is."""
    return type(norm) is Tensor and norm.is_cuda and getattr(optimizer, "_step_supports_amp_scaling", False)


@dataclass
class GradientNorms:
    """The norms of a training's gradients; `most` steps in a row may not be finite (0: none is looked at)."""

    most: int
    _in_a_row: int = 0
    _unread: tuple[Tensor, int, Any] | None = None
    """The norm on the host, its step, and the event after which it is there."""
    _flagged: Any = None
    """The optimizer whose next step has the flag."""

    def is_finite(self, norm: float, step: int) -> bool:
        """Return whether a step may be applied; raise NonFiniteError after too many that may not."""
        if math.isfinite(norm):
            self._in_a_row = 0
            return True
        self._in_a_row += 1
        logger.warning("step %d was not applied: its gradient has the norm %s", step, norm)
        if self._in_a_row >= self.most:
            raise NonFiniteError(
                what=f"{self.most} steps in a row were not finite",
                got=f"gradient norm {norm} at step {step}",
                why="the weights would become NaN; they are still those of the last good step",
                fix="lower learning_rate, raise warmup_steps, check the rows of these steps, or set "
                "max_nonfinite_steps=0 to apply such steps as transformers does",
            )
        return False

    def leave_to(self, optimizer: Any, norm: Tensor, step: int) -> None:
        """Let the optimizer's next step do nothing if this norm () is not finite; read the norm of the step before."""
        self.read()
        optimizer.found_inf = norm.isfinite().logical_not().float()
        self._flagged = optimizer
        host = torch.empty((), dtype=norm.dtype, pin_memory=norm.is_cuda)
        host.copy_(norm.detach(), non_blocking=True)
        event = None
        if norm.is_cuda:
            event = torch.cuda.Event()
            event.record()
        self._unread = (host, step, event)

    def release(self) -> None:
        """Take the flag from the optimizer, whose step is done."""
        if self._flagged is not None:
            vars(self._flagged).pop("found_inf", None)
            self._flagged = None

    def read(self) -> None:
        """Look at the norm that was left, if there is one; raises NonFiniteError as `is_finite`."""
        if self._unread is None:
            return
        (host, step, event), self._unread = self._unread, None
        if event is not None:
            event.synchronize()
        self.is_finite(float(host), step)
