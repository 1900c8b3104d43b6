"""`whet.optimize`: the methods that suit a training loop of the user's own, in one call."""

from __future__ import annotations

from typing import Any, get_args

import torch
from torch import nn

from whet.config import environment
from whet.config.fields import PaddingInLoss
from whet.config.methods import MethodSettings
from whet.errors import ConfigError
from whet.log import logger
from whet.methods import order
from whet.models.packed import prepare
from whet.models.view import ModelView
from whet.own_loop import checks
from whet.own_loop.changes import changes

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def optimize(
    model: nn.Module,
    optimizer: Any = None,
    dtype: torch.dtype | None = None,
    *,
    padding: PaddingInLoss = "sampled",
) -> Any:
    """Put whet's operators into a transformers model, in place; return it, or (model, optimizer) if one was given.

    The call that `ipex.optimize` had: one line before a training loop of your own, or before transformers' Trainer.
    Padded batches then run without their padding, dropout included; weights, their names and the saved form stay, so
    an existing optimizer still works. `dtype=torch.bfloat16` (or float16) computes the encoder's products in it
    and keeps the weights in float32. `whet.changes(model)` says what was changed, and the log does.
    Dropout masks follow torch's CPU generator, from which a call that drops anything draws one number. One model serves
    any number of threads.

    Hidden states of real tokens are those of the untouched model. `padding` says what places of padding get. sampled:
    a few padding tokens a row are computed, and each place gets the state of the nearest ones' middle, so that the span
    loss of transformers' question answering models is within 0.1 % of the untouched model's; classifiers that read
    first tokens alone go without. all: each place its own state, for heads that must have these exactly. none: zeros,
    for heads that mask padding. A call whose labels or positions lie at padding tokens computes all of these. Rows
    padded on the left, and calls that ask for the states of all layers, run with their padding; the log says which.
    Forward hooks on parts of the encoder see packed tensors (1, N, D), also if they are registered afterwards. Under
    torch.compile the graph breaks around the encoder.

    Raises ConfigError for a family that whet does not know, for another dtype or `padding`, for a model that
    torch.compile or DataParallel has wrapped already, and for an optimizer with none of the model's parameters.
    """
    environment.require_known()
    checks.require_model(model)
    checks.require_optimizer(optimizer, model)
    _require_dtype(dtype)
    _require_padding(padding)
    if prepare(order.restore(model), encoder_only=True) is None:
        raise checks.no_family(model)
    order.apply(ModelView(model), MethodSettings(operators="auto", unpad=padding, unpad_dtype=dtype))
    logger.info("%s: %s", type(model).__name__, changes(model))
    return model if optimizer is None else (model, optimizer)


def _require_dtype(dtype: Any) -> None:
    if dtype is None or dtype in _DTYPES:
        return
    raise ConfigError(
        what="whet.optimize computes in no such dtype",
        got=repr(dtype),
        why=f"products of the encoder run in one of {', '.join(map(str, _DTYPES))}",
        fix="use dtype=torch.bfloat16, or leave dtype out",
    )


def _require_padding(padding: Any) -> None:
    if padding in get_args(PaddingInLoss):
        return
    raise ConfigError(
        what="whet.optimize knows no such padding",
        got=repr(padding),
        why="places of padding get the states of a few padding tokens, each its own, or zeros",
        fix="use padding='sampled', 'all' or 'none'",
    )
