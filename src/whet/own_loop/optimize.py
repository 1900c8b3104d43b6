"""`whet.optimize`: the methods that suit a training loop of the user's own, in one call."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch

from whet.config import environment
from whet.config.fields import LastBlockTokens, PaddingInLoss
from whet.config.methods import MethodSettings
from whet.errors import ConfigError
from whet.log import logger
from whet.methods import order
from whet.models.packed import prepare
from whet.models.view import ModelView
from whet.own_loop import checks, curated, inside
from whet.own_loop.changes import changes

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def optimize(
    model: Any,
    optimizer: Any = None,
    dtype: torch.dtype | None = None,
    *,
    padding: PaddingInLoss | Literal["auto"] = "auto",
    last_block_tokens: LastBlockTokens = "read",
) -> Any:
    """Put whet's operators into a transformers model, in place; return it, or (model, optimizer) if one was given.

    `model` may also hold such models: a SentenceTransformer, a CrossEncoder, a SetFitModel, a pipeline, a
    LightningModule, spaCy's `nlp`, any module of your own. Each encoder of a known family inside is changed, and the
    log names it.

    The call that `ipex.optimize` had: one line before a training loop of your own, or before transformers' Trainer.
    Padded batches then run without their padding, dropout included; weights, their names and the saved form stay, so
    an existing optimizer still works. `dtype=torch.bfloat16` (or float16) computes the encoder's products in it
    and keeps the weights in float32. `whet.changes(model)` says what was changed, and the log does.
    Dropout masks follow torch's CPU generator, from which a call that drops anything draws one number. One model serves
    any number of threads.

    Hidden states of real tokens are those of the untouched model. `padding` says what those of padding tokens are.
    sampled: a few padding tokens of each sequence are computed and stand for all; the mean span loss of transformers'
    question answering models is then within 0.02 % of the untouched model's. all: each padding token has its own
    state, for heads that need these exactly. none: zeros, for heads that mask padding. auto: none if the head is known
    to ignore padding (the pooling of sentence-transformers, classifiers that read the first token), all before other
    modules of sentence-transformers, else sampled; the log says which. A call with labels or positions at padding
    tokens computes all of these. Sequences padded on the left, and calls for the states of all layers, run padded.
    Where a classifier reads first tokens alone, or sentence-transformers' pooling first or last ones, so does the last
    block, and other tokens are computed when they are read; last_block_tokens="all" computes all at once.
    Rows that hold several sequences end to end run as they are, and sequences are kept apart that transformers keeps
    apart, by position_ids, or that cu_seq_lens_q or seq_idx names (docs/optimize.md).
    Forward hooks on parts of the encoder see packed tensors (1, N, D), also if they are registered afterwards. Under
    torch.compile the graph breaks around the encoder.

    Raises ConfigError if there is no encoder of a known family, for another value of an option, for a model that
    torch.compile or DataParallel has wrapped already, and for an optimizer with none of the model's parameters.
    """
    environment.require_known()
    checks.require_model(model)
    checks.require_optimizer(optimizer, model)
    _require_options(dtype, padding, last_block_tokens)
    inside.prove_in(model)
    encoders = inside.encoders_in(model)
    if not encoders:
        raise checks.no_encoder(model)
    for encoder in encoders:
        checks.require_no_balance(encoder.model)
        _change(encoder, dtype, padding, last_block_tokens)
    where = "".join(f" ({encoder.name})" for encoder in encoders if encoder.name)
    logger.info("%s%s: %s", type(model).__name__, where, changes(model))
    return model if optimizer is None else (model, optimizer)


def restore(model: Any) -> Any:
    """Undo `optimize` exactly and return the model; one that whet did not change stays as it is.

    Raises ConfigError for what holds no model, such as a list of models.
    """
    checks.require_modules(model, "whet.restore")
    for _, root in inside.modules_in(model):
        order.restore(root)
    for encoder in inside.encoders_in(model):
        order.restore(encoder.model)
        curated.restore(encoder.model)
    return model


def _change(
    encoder: inside.Encoder,
    dtype: torch.dtype | None,
    padding: PaddingInLoss | Literal["auto"],
    last_block: LastBlockTokens,
) -> None:
    model = encoder.model
    if curated.is_encoder(model):  # it computes every token that is none of padding
        curated.apply(model, dtype, padding)
        return
    if padding == "auto":
        padding = "none" if encoder.padding_is_masked else "all" if encoder.padding_is_read else "sampled"
    if prepare(order.restore(model), encoder_only=True) is None:
        raise checks.no_family(model)
    settings = MethodSettings(
        operators="auto", unpad=padding, unpad_dtype=dtype, last_block=last_block, pooled=encoder.pooled
    )
    order.apply(ModelView(model), settings)


def _require_options(dtype: Any, padding: Any, last_block_tokens: Any) -> None:
    _require_dtype(dtype)
    _require_padding(padding)
    _require_tokens(last_block_tokens)


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
    if padding == "auto" or padding in get_args(PaddingInLoss):
        return
    raise ConfigError(
        what="whet.optimize knows no such padding",
        got=repr(padding),
        why="padding tokens get the states of a few of them, each its own, zeros, or what the head needs",
        fix="use padding='auto', 'sampled', 'all' or 'none'",
    )


def _require_tokens(tokens: Any) -> None:
    if tokens in get_args(LastBlockTokens):
        return
    raise ConfigError(
        what="whet.optimize knows no such last_block_tokens",
        got=repr(tokens),
        why="the last block computes the tokens that the head reads, or all of them",
        fix="use last_block_tokens='read' or 'all'",
    )
