"""The methods in the order they are applied, for a model in anybody's training loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import nn

from whet.config import environment
from whet.config.arguments import TrainingArguments
from whet.config.fields import PaddingInLoss
from whet.errors import ConfigError
from whet.kernels import allocator
from whet.log import logger
from whet.methods import changes as what_changed
from whet.methods import checkpointing, compiling, fuse, offload, optimizable
from whet.methods.unpad import encoder as unpad
from whet.models.packed import PackedModel, prepare, release
from whet.models.wrapped import unwrapped

_STATE = "whet_optimized"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class _Optimized:
    """What `optimize` has done to a model."""

    packed: PackedModel
    applied: fuse.Applied | None
    dtype: torch.dtype | None


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
    an optimizer made before goes on working. `dtype=torch.bfloat16` (or float16) computes the encoder's products in it
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
    optimizable.require_model(model)
    optimizable.require_optimizer(optimizer, model)
    _require_dtype(dtype)
    _require_padding(padding)
    packed = prepare(restore(model), encoder_only=True)
    if packed is None:
        raise optimizable.no_family(model)
    applied = None
    if fuse.possible(packed):
        allocator.keep_freed_memory()
        applied = fuse.apply(packed, row_gradients=False)
    unpad.apply(packed, dtype, padding)
    checkpointing.follow(packed)
    packed.module.__dict__[_STATE] = _Optimized(packed, applied, dtype)
    logger.info("%s: %s", type(model).__name__, changes(model))
    return model if optimizer is None else (model, optimizer)


def changes(model: nn.Module) -> what_changed.Changes | None:
    """Return what `optimize` changed in this model; None where nothing of it is in it.

    The modules that keep their own forward are those of this moment: adapters and hooks come and go.
    """
    state: _Optimized | None = unwrapped(model).__dict__.get(_STATE)
    return None if state is None else what_changed.of(state.packed, state.applied, state.dtype)


def packed_model(model: nn.Module) -> PackedModel | None:
    """Return the model that `optimize` prepared; None where nothing of it is in it."""
    state: _Optimized | None = unwrapped(model).__dict__.get(_STATE)
    return None if state is None else state.packed


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


def restore(model: nn.Module) -> nn.Module:
    """Take everything that this file put into the model out again, exactly; a model without it stays as it is."""
    base = unwrapped(model)
    offload.restore(base)
    checkpointing.restore(base)
    compiling.restore(base)
    state: _Optimized | None = base.__dict__.pop(_STATE, None)
    if state is not None:
        unpad.restore(state.packed)
        fuse.restore(state.packed)
        release(state.packed)
    return model


def save_memory(model: nn.Module, packed: PackedModel | None, args: TrainingArguments) -> None:
    """Put in what the arguments ask for to keep fewer activations; the log says what it is."""
    model = unwrapped(model)
    if args.max_tokens_per_batch is not None and packed is None:
        raise ConfigError(
            what="max_tokens_per_batch goes with packed batches",
            got=f"{type(model).__name__}, whose batches run padded",
            why="the size of a padded batch is not its tokens",
            fix="leave --max_tokens_per_batch out, and lower --per_device_train_batch_size instead",
        )
    if args.torch_compile:
        logger.info("torch.compile: %s", compiling.apply(model, packed, args))
    if args.gradient_checkpointing:
        logger.info("checkpointing: %s", checkpointing.apply(model, packed, args.checkpointing_policy))
    elif packed is not None:
        checkpointing.follow(packed)
    if args.activation_offload:
        logger.info("offload: %s", offload.apply(model))
