"""Makes a model ready for the engine: on its device, with the methods that the settings ask for, and an objective.

Before its first step, the last blocks of a pretrained model may get new weights (`reinit_layers`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.generic import find_labels

from whet.config.arguments import TrainingArguments
from whet.config.methods import MethodSettings, method_settings
from whet.data.padding import Padding
from whet.engine.collate import default_collator, pads_only, without_unread
from whet.engine.run import device_of
from whet.errors import ConfigError
from whet.kernels import allocator
from whet.log import logger
from whet.methods import fuse, order
from whet.methods.seam import Applied
from whet.models import attention
from whet.models.adapters import unwrapped
from whet.models.known import of_classes
from whet.models.packed import checked
from whet.models.view import ModelView
from whet.objectives.base import Collate, Objective
from whet.objectives.choose import choose
from whet.objectives.span import PackedSpans, PaddedSpans
from whet.precision import formats, policy
from whet.store import weights


@dataclass(frozen=True)
class Ready:
    """A model on its device, in float32, with whet's operators, and how it trains on rows."""

    model: nn.Module
    objective: Objective
    precision: policy.Precision
    """That of its forward passes; "auto" until it is chosen."""
    collate: Collate
    """Makes padded batches, without the columns that the model does not read."""


def prepare(
    model: nn.Module,
    args: TrainingArguments,
    collator: Collate | None = None,
    processing_class: Any = None,
    padded_length: int | None = None,
) -> Ready:
    """Change the model in place by the methods that the settings ask for, and choose its objective.

    Without a collator, rows are padded by the tokenizer, or stacked if there is none. `padded_length` is the length
    that rows would be padded to without packing; None: that of the longest row in their batch.
    """
    model = order.restore(model).to(weights.device_of(args.use_cpu))
    device = device_of(model)
    formats.require_floating(model)
    formats.raise_to_float32(model)
    collate = _collate(model, args, default_collator(processing_class) if collator is None else collator)
    if args.attn_implementation in (None, attention.NAME) and of_classes(unwrapped(model)) is None:
        from whet.models.proof import prove

        prove.ensure(model)
    if smooths := _smooths(model, args):
        from whet.engine import own_losses

        objective: Objective = own_losses.smoothed(model, collate, args)
    else:
        padding = Padding(args.padding_in_loss, padded_length, pad_token_id(model, processing_class))
        custom = collate if collator is not None and not pads_only(collator) else None
        default = collate if collator is not None else default_collator(processing_class, model)
        objective = choose(
            model, custom, default, padding, attn=args.attn_implementation, span_loss=args.span_loss
        )  # fmt: skip
    optimized = smooths
    if objective.is_own_loss and not smooths:
        from whet.engine import own_losses

        objective = own_losses.unpadded(objective, args)
        optimized = objective.packed
    if device.type == "cpu":
        allocator.keep_freed_memory()
    _require_packed_for_budget(model, args, objective)
    _require_spans_for_loss(model, args, objective)
    settings = method_settings(args, operators=None if optimized else "auto")
    if isinstance(objective, PackedSpans):  # whose head reads every token
        settings = replace(settings, last_block=None)
    done = order.apply(ModelView(model), settings)
    if not optimized:  # of which `optimize` has logged what it did
        _log_batches(model, args, objective, done)
    for one in done:
        if one.method != fuse.CARD.name:
            logger.info("%s", one)
    return Ready(model, objective, policy.build(args, device), collate)


def follow_own_switch(model: nn.Module, args: TrainingArguments) -> None:
    """Let blocks in which transformers' own switch for checkpoints is on be recomputed as a part of their pass."""
    is_on = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    if is_on and not args.gradient_checkpointing:
        order.apply(ModelView(model), MethodSettings(checkpointing="theirs"))


def pad_token_id(model: nn.Module, processing_class: Any) -> int:
    """Return the id of padding tokens: the tokenizer's, else the model's, else 0."""
    known = [getattr(one, "pad_token_id", None) for one in (processing_class, getattr(model, "config", None))]
    return next((one for one in known if isinstance(one, int)), 0)


def _collate(model: nn.Module, args: TrainingArguments, collator: Collate) -> Collate:
    if not args.remove_unused_columns:
        return checked(collator, model)
    return without_unread(collator, model, args.label_names or ())


def _require_packed_for_budget(model: nn.Module, args: TrainingArguments, objective: Objective) -> None:
    """Refuse a token budget for batches that run padded."""
    if args.max_tokens_per_batch is None or objective.packed_model is not None:
        return
    raise ConfigError(
        what="max_tokens_per_batch goes with packed batches",
        got=f"{type(_base_model(model)).__name__}, whose batches run padded",
        why="the size of a padded batch does not follow from its tokens",
        fix="leave --max_tokens_per_batch out, and lower --per_device_train_batch_size instead",
    )


def _require_padding_read(model: nn.Module, args: TrainingArguments, objective: Objective) -> None:
    from whet.objectives.packed_head import PackedHead
    from whet.objectives.padded_tokens import PaddedNextTokens

    if isinstance(objective, PackedHead | PaddedNextTokens):
        raise ConfigError(
            what=f"padding_in_loss {args.padding_in_loss} would change nothing here",
            got=type(_base_model(model)).__name__,
            why="no padding token counts in the loss of this model: that is so in question answering alone",
            fix="leave --padding_in_loss out",
        )


def _require_spans_for_loss(model: nn.Module, args: TrainingArguments, objective: Objective) -> None:
    """Refuse settings of the loss of spans for a model, or a loss, that has nothing to do with them."""
    if args.padding_in_loss != "none":
        _require_padding_read(model, args, objective)
    if args.span_loss == "independent" or isinstance(objective, PackedSpans | PaddedSpans):
        return
    raise ConfigError(
        what=f"span_loss {args.span_loss} does not go with this training",
        got=type(_base_model(model)).__name__,
        why="whet computes it for question answering models without a data_collator or loss of your own",
        fix="leave --span_loss out",
    )


def _log_batches(model: nn.Module, args: TrainingArguments, objective: Objective, done: list[Applied]) -> None:
    """Log whether batches run packed, with which operators, and why not."""
    name = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if objective.packed:
        fused = next((one.text for one in done if one.method == fuse.CARD.name), "operators in plain torch")
        logger.info("batches run without padding (%s), %s", name, fused)
    elif isinstance(objective, PaddedSpans):
        from whet.engine import own_losses

        own_losses.log_padded(model, own_losses.why_padded(model, args) or "its head is not known", args)


def _smooths(model: nn.Module, args: TrainingArguments) -> bool:
    """Return whether the labels are smoothed; raises ConfigError for a model that has none to smooth."""
    if not args.label_smoothing_factor:
        return False
    inside = _base_model(model)
    named = find_labels(type(inside)) if args.label_names is None else args.label_names
    if "labels" not in named:
        raise ConfigError(
            what="label_smoothing_factor does not go with this model",
            got=type(inside).__name__,
            why=f"it smooths the column labels; this model learns from {', '.join(named) or 'none'}",
            fix="leave --label_smoothing_factor out",
        )
    kind = getattr(getattr(inside, "config", None), "problem_type", None)
    if kind in ("multi_label_classification", "regression"):
        raise ConfigError(
            what=f"label_smoothing_factor does not go with {kind}",
            got=args.label_smoothing_factor,
            why="it gives a share of the one right label to the others, and here no label is the one right one",
            fix="leave --label_smoothing_factor out",
        )
    return True


def _base_model(model: Any) -> nn.Module:
    """Return the model inside an adapter's wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


_SAYS_DONE = "_is_hf_initialized"
"""By this attribute of a tensor, transformers leaves its values as they are."""


def draw_new_layers(model: nn.Module, n_blocks: int, seed: int) -> str:
    """Give the last blocks and the pooler new weights; return what was done, for the log.

    The weights are those that the `_init_weights` of the model's class draws after `torch.manual_seed(seed)`, block by
    block and then the pooler (Zhang et al. 2021, arXiv:2006.05987, section 5). Other random numbers of the process do
    not change. Raises ConfigError for a model whose last blocks are not known, or not trained.
    """
    modules = _chosen(model, n_blocks)
    weights = [weight for module in modules for weight in module.parameters()]
    if any(not weight.requires_grad for weight in weights):
        raise ConfigError(
            what="reinit_layers would draw new weights that are never trained",
            got=f"{sum(not weight.requires_grad for weight in weights)} frozen weights in the last {n_blocks} blocks",
            why="new weights have to be learnt, and a frozen one keeps its random value",
            fix="leave --reinit_layers out, or train these blocks",
        )
    from whet.models.experts.layer import layers_of

    if any(layers_of(module) for module in modules):
        why = "experts begin as copies of pretrained weights, and new ones would know nothing"
        raise _refusal(model, n_blocks, why, "leave --reinit_layers out")
    owner = _owner(model, modules[0])
    with torch.random.fork_rng({weight.device.index for weight in weights if weight.is_cuda}), _not_done(weights):
        torch.manual_seed(seed)
        with torch.no_grad():
            for module in modules:
                module.apply(owner._init_weights)
    blocks = f"the last {n_blocks} of {len(ModelView(model).blocks())} blocks"
    pooler = " and the pooler" if len(modules) > n_blocks else ""
    return f"new weights in {blocks}{pooler}, drawn with seed {seed}"


def draw_by_recipe(model: nn.Module, n_blocks: int, seed: int) -> str:
    """As `draw_new_layers`, for a recipe: a model that it does not go with keeps its weights, and the log says why."""
    try:
        if _is_decoder(ModelView(model).model):
            raise _refusal(model, n_blocks, "it was measured for encoders alone", "leave --reinit_layers out")
        return draw_new_layers(model, n_blocks, seed)
    except ConfigError as error:
        return f"the recipe's reinit_layers {n_blocks} is left out: {error.problems[0].why}"


def _is_decoder(model: nn.Module) -> bool:
    """Return whether tokens of the model see earlier ones alone, whatever its head."""
    family = of_classes(model)
    if family is not None and family.causal:
        return True
    is_causal = any(getattr(module, "is_causal", False) is True for module in model.modules())
    return is_causal or type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))


def _chosen(model: nn.Module, n_blocks: int) -> list[nn.Module]:
    """Return the last blocks, and the pooler if the encoder has one with weights."""
    view = ModelView(model)
    blocks = view.blocks()
    if not view.depths():
        why = "it needs one stack of blocks with weights of their own: whet cannot tell which are the last ones"
        raise _refusal(model, n_blocks, why, "leave --reinit_layers out")
    if n_blocks >= len(blocks):
        fewer = f"use --reinit_layers {len(blocks) - 1} or less, or leave it out"
        raise _refusal(model, n_blocks, f"none of its {len(blocks)} pretrained blocks would be left", fewer)
    chosen = [block for _, block in blocks[len(blocks) - n_blocks :]]
    pooler = getattr(view.model.base_model, "pooler", None)
    if isinstance(pooler, nn.Module) and any(True for _ in pooler.parameters()):
        chosen.append(pooler)
    return chosen


def _refusal(model: nn.Module, n_blocks: int, why: str, fix: str) -> ConfigError:
    got = f"{n_blocks} for {type(ModelView(model).model).__name__}"
    return ConfigError(what="reinit_layers does not go with this model", got=got, why=why, fix=fix)


def _owner(model: nn.Module, block: nn.Module) -> PreTrainedModel:
    """Return the innermost model of transformers that the block is a part of: it knows how its blocks begin."""
    owners = [one for one in model.modules() if isinstance(one, PreTrainedModel)]
    return [one for one in owners if any(module is block for module in one.modules())][-1]


@contextmanager
def _not_done(weights: Sequence[Tensor]) -> Iterator[None]:
    """Let transformers draw these weights again within the block."""
    marked = [weight for weight in weights if getattr(weight, _SAYS_DONE, False)]
    for weight in marked:
        delattr(weight, _SAYS_DONE)
    try:
        yield
    finally:
        for weight in marked:
            setattr(weight, _SAYS_DONE, True)
