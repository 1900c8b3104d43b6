"""`whet.optimize`: the methods that suit a training loop of the user's own, in one call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import nn
from transformers import PreTrainedModel

from whet.config import environment, methods
from whet.config.fields import LastBlockTokens, PaddingInLoss
from whet.config.methods import MethodSettings
from whet.errors import ConfigError
from whet.log import logger
from whet.methods import order
from whet.methods.unpad import method as unpad
from whet.models import known, record
from whet.models.experts.settings import settings_of
from whet.models.packable import why_padded
from whet.models.packed import packed_model, prepare
from whet.models.view import ModelView
from whet.optional import is_from
from whet.own_loop import curated, locate
from whet.own_loop.changes import changes

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_USUAL = {"padding": "auto", "last_block_tokens": "read", "cuda_graphs": True}
"""What `optimize` does without these options."""
_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def optimize(
    model: Any,
    optimizer: Any = None,
    dtype: torch.dtype | None = None,
    *,
    padding: PaddingInLoss | Literal["auto"] = "auto",
    last_block_tokens: LastBlockTokens = "read",
    cuda_graphs: bool = True,
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
    On a GPU, training passes are launched as one (cuda_graphs), unless a module inside has a hook, is compiled or
    recomputed, or several ranks train.
    Rows that hold several sequences end to end run as they are, and sequences are kept apart that transformers keeps
    apart, by position_ids, or that cu_seq_lens_q or seq_idx names (docs/optimize.md).
    Forward hooks on parts of the encoder see packed tensors (1, N, D), also if they are registered afterwards. Under
    torch.compile the graph breaks around the encoder.

    Raises ConfigError if there is no encoder of a known family, for another value of an option, for a model that
    torch.compile or DataParallel has wrapped already, and for an optimizer with none of the model's parameters.
    """
    environment.require_known()
    _require_model(model)
    _require_optimizer(optimizer, model)
    _require_options(dtype, padding, last_block_tokens)
    locate.prove_in(model)
    encoders = locate.encoders_in(model)
    if not encoders:
        raise _no_encoder(model)
    for encoder in encoders:
        _require_no_balance(encoder.model)
        _change(encoder, dtype, padding, last_block_tokens, cuda_graphs=cuda_graphs)
    options = {"padding": padding, "last_block_tokens": last_block_tokens, "cuda_graphs": cuda_graphs}
    note_options(model, options, by=None)
    _forget_who_prepared(model)
    where = "".join(f" ({encoder.name})" for encoder in encoders if encoder.name)
    logger.info("%s%s: %s", type(model).__name__, where, changes(model))
    return model if optimizer is None else (model, optimizer)


def change_for(by: str, model: nn.Module, options: Mapping[str, Any]) -> bool:
    """Call `optimize` for a Trainer or an Accelerator; return whether that was done.

    What another one of them has changed is changed again, also with the same options: each has steps of its own that
    follow, such as the padding of an unknown head. What the user has changed stays, and the log names the options that
    do not count then.
    """
    before = [unpad.options_of(one) for one in _unpadded_in(model)]
    if changes(model) is not None and (not before or any(by_whom is None for _, by_whom in before)):
        for given in [given for given, by_whom in before if by_whom is None]:
            _log_ignored(by, options, given)
        return False
    if before and all(one == (options, by) for one in before):
        return False
    optimize(model, **options)
    note_options(model, options, by=by)
    return True


def note_options(model: Any, options: Mapping[str, Any], *, by: str | None) -> None:
    """Note with which options the model was changed, and by which class; a Trainer does not undo what its user did."""
    for one in _unpadded_in(model):
        unpad.note_options(one, options, by=by)


def _log_ignored(by: str, options: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    counts = [key for key in options if key != "cuda_graphs" or methods.have_graphs()]
    ignored = [f"{key}={options[key]!r}" for key in counts if options[key] not in (_USUAL[key], given.get(key))]
    if ignored:
        logger.warning(
            "%s is asked for %s, and the model stays as whet.optimize has changed it before: %s; after"
            " whet.restore(model) the settings count",
            by, " and ".join(ignored), ", ".join(f"{key}={one!r}" for key, one in given.items()),
        )  # fmt: skip


def _unpadded_in(model: Any) -> list[nn.Module]:
    """Return the models of transformers in this one that run without padding."""
    packed = [packed_model(encoder.model) for encoder in locate.encoders_in(model)]
    return [one.module for one in packed if one is not None and unpad.is_on(one.module)]


def restore(model: Any) -> Any:
    """Undo `optimize` exactly and return the model; one that whet did not change stays as it is.

    Raises ConfigError for what holds no model, such as a list of models.
    """
    _require_modules(model, "whet.restore")
    for _, root in locate.modules_in(model):
        order.restore(root)
    for encoder in locate.encoders_in(model):
        order.restore(encoder.model)
        curated.restore(encoder.model)
    _forget_who_prepared(model)
    return model


def _forget_who_prepared(model: Any) -> None:
    """Let the Accelerator that prepared this model, or one inside, prepare it again when it is asked to."""
    for _, root in locate.modules_in(model):
        for one in root.modules():
            record.take(one, record.PREPARED_BY)


def _change(
    encoder: locate.Encoder,
    dtype: torch.dtype | None,
    padding: PaddingInLoss | Literal["auto"],
    last_block: LastBlockTokens,
    *,
    cuda_graphs: bool,
) -> None:
    model = encoder.model
    if curated.is_encoder(model):  # it computes every token that is none of padding
        curated.apply(model, dtype, padding)
        return
    if padding == "auto":
        padding = "none" if encoder.padding_is_masked else "all" if encoder.padding_is_read else "sampled"
    if prepare(order.restore(model), encoder_only=True) is None:
        raise _no_family(model)
    settings = MethodSettings(
        operators="auto", unpad=padding, unpad_dtype=dtype, last_block=last_block, pooled=encoder.pooled,
        cuda_graphs=cuda_graphs and methods.have_graphs(), checkpointing="theirs",
    )  # fmt: skip
    order.apply(ModelView(model), settings)


def _require_options(dtype: Any, padding: Any, tokens: Any) -> None:
    """Refuse other values of options than the docstring of `optimize` names."""
    if dtype is not None and dtype not in _DTYPES:
        raise ConfigError(
            what="whet.optimize computes in no such dtype",
            got=repr(dtype),
            why=f"products of the encoder run in one of {', '.join(map(str, _DTYPES))}",
            fix="use dtype=torch.bfloat16, or leave dtype out",
        )
    if padding not in ("auto", *get_args(PaddingInLoss)):
        raise ConfigError(
            what="whet.optimize knows no such padding",
            got=repr(padding),
            why="padding tokens get the states of a few of them, each its own, zeros, or what the head needs",
            fix="use padding='auto', 'sampled', 'all' or 'none'",
        )
    if tokens not in get_args(LastBlockTokens):
        raise ConfigError(
            what="whet.optimize knows no such last_block_tokens",
            got=repr(tokens),
            why="the last block computes the tokens that the head reads, or all of them",
            fix="use last_block_tokens='read' or 'all'",
        )


def _require_model(model: Any) -> None:
    """Refuse what holds no model, and wrappers that whet's changes belong inside of."""
    for name, root in _require_modules(model, "whet.optimize"):
        for path, module in root.named_modules():
            _require_unwrapped(module, ".".join(part for part in (name, path) if part))


def _require_modules(model: Any, function: str) -> list[tuple[str, nn.Module]]:
    """Return the modules that an object holds, with their names; refuse one that holds none."""
    roots = [] if isinstance(model, type) else locate.modules_in(model)
    if not roots and locate.is_of_spacy(model):
        raise ConfigError(
            what=f"{function} changes a PyTorch model, and there is none in this object of spaCy",
            got=f"{type(model).__name__}, {_components_of(model)}",
            why="some components load their transformer when they are initialised, and others have none at all",
            fix=f"call nlp.initialize(...) first, then {function}(nlp), if the pipeline has a transformer",
        )
    if not roots:
        raise ConfigError(
            what=f"{function} changes a model, and there is none",
            got=model.__name__ if isinstance(model, type) else repr(model),
            why="it puts operators into a torch.nn.Module that is loaded, or into the modules that an object holds",
            fix=f"load it first: {function}(AutoModelForQuestionAnswering.from_pretrained('bert-base-uncased'));"
            " of several models, call it for each",
        )
    return roots


def _require_no_balance(model: Any) -> None:
    """Raise ConfigError for experts whose balance is learnt: a loop of the user's own would leave it out."""
    settings = settings_of(getattr(model, "config", None))
    if settings is None or not (settings.aux_loss_coef or settings.z_loss_coef):
        return
    raise ConfigError(
        what="whet.optimize does not train the routers of this model's experts",
        got=f"{type(model).__name__} with {settings.experts} experts",
        why="their balance loss is a part of the loss of whet's commands, and of no other loop",
        fix="train it with a command of whet and --moe_experts; or set aux_loss_coef and z_loss_coef of "
        "model.config.whet_experts to 0 if the loop has a balance loss of its own",
    )


def _components_of(model: Any) -> str:
    names = [name for name, _ in getattr(model, "components", [])]
    return f"components: {', '.join(names)}" if names else "without components"


def _require_unwrapped(module: nn.Module, name: str) -> None:
    if is_from(module, "torch._dynamo", "OptimizedModule"):
        raise ConfigError(
            what="whet.optimize cannot change a model that is compiled already",
            got=f"{name}, the result of torch.compile" if name else "the result of torch.compile",
            why="it changes the modules that torch.compile reads",
            fix="change the model inside, then compile it: torch.compile(whet.optimize(model._orig_mod))",
        )
    if isinstance(module, _PARALLEL):
        raise ConfigError(
            what="whet.optimize takes the model inside of this wrapper",
            got=f"{name}, a {type(module).__name__}" if name else type(module).__name__,
            why="the wrapper copies or synchronises the model as it was when it was wrapped",
            fix="pass the model inside, and train that one: whet.optimize(model.module)",
        )


def _require_optimizer(optimizer: Any, model: Any) -> None:
    """Refuse what is no optimizer, and one that would train none of the model's parameters."""
    if optimizer is None:
        return
    if isinstance(optimizer, type) or not hasattr(optimizer, "param_groups"):
        raise ConfigError(
            what="whet.optimize takes an optimizer that is made already",
            got=optimizer.__name__ if isinstance(optimizer, type) else repr(optimizer),
            why="it returns the optimizer as it came, to be used for the model's steps",
            fix="make it first: optimizer=torch.optim.AdamW(model.parameters())",
        )
    own = {id(parameter) for _, root in locate.modules_in(model) for parameter in root.parameters()}
    if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
        return
    raise ConfigError(
        what="the optimizer given to whet.optimize belongs to another model",
        got=f"{type(optimizer).__name__} with none of the parameters of this {type(model).__name__}",
        why="its steps would not train this model",
        fix="make it from this model: torch.optim.AdamW(model.parameters()); or leave optimizer out",
    )


def _no_family(model: nn.Module) -> ConfigError:
    """Return the refusal of a model of a known family that cannot run without padding."""
    return ConfigError(
        what=f"whet.optimize cannot run this model without padding: {why_padded(model)}",
        got=type(model).__name__,
        why=f"it knows the families {known.names(causal=None)}, and tries other encoders on a copy",
        fix="train it as it is, or with whet's Trainer, which runs such a model padded",
    )


def _no_encoder(model: Any) -> ConfigError:
    """Return the refusal of a model in which no encoder can run without padding, with the reason for each."""
    roots = locate.modules_in(model)
    if any(locate.is_known(root) for _, root in roots):
        return _no_family(next(root for _, root in roots if locate.is_known(root)))
    found = {
        type(module).__name__: why
        for _, root in roots
        for module in root.modules()
        if (why := _why_not(module)) is not None
    }
    reasons = "; ".join(f"{name}: {why}" for name, why in list(found.items())[:3])
    return ConfigError(
        what="whet.optimize finds no encoder here that it can run without padding",
        got=type(model).__name__ + (f" ({reasons})" if reasons else ", with no model of transformers inside"),
        why=f"it knows the families {known.names(causal=None)}, and tries other encoders on a copy",
        fix="train it as it is, or with whet.Trainer, which runs other models of transformers with their padding",
    )


def _why_not(module: nn.Module) -> str | None:
    """Return why this module is not changed; None for modules that are no model of a library that whet knows."""
    if isinstance(module, PreTrainedModel):
        return why_padded(module)
    if isinstance(module, torch.jit.ScriptModule):
        return "a TorchScript module, which has no parts to exchange: load it without torchscript=True"
    if curated.is_of_library(module) and type(module).__name__.endswith("Encoder"):
        return "whet knows the encoders of curated-transformers 0.1, which spaCy 3 installs"
    return None
