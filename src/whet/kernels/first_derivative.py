"""An error for second derivatives of native operators, which have only first ones.

torch's own `once_differentiable` raises only if a backward pass reaches the operator itself. A second
`torch.autograd.grad` of chosen weights does not reach it: it would omit these terms and return wrong numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.autograd import function

from whet.errors import ConfigError


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the backward of an autograd Function, without second derivatives; ConfigError if they are requested."""
    once = function.once_differentiable(backward)

    @wraps(backward)
    def guarded(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled() and isinstance(ctx, function.FunctionCtx):
            raise ConfigError(
                what="whet's native operators have no second derivatives",
                got="a backward pass with create_graph=True",
                why="they compute gradients in one pass, which torch cannot differentiate again",
                fix="call whet.restore(model) first: the model's own operators have them (attention: eager)",
            )
        return once(ctx, *grads)

    return guarded
