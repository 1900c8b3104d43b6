"""The model of a run before its training: rows for new tokens, new experts, and LoRA.

With LoRA, low-rank pairs next to chosen layers learn, and the model's own weights stay (Hu et al. 2021).
The adapter is peft's own, so that its folder loads anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from whet import optional
from whet.config.arguments import TrainingArguments
from whet.errors import ConfigError
from whet.jobs.fields import JobFields
from whet.kernels.operator import is_rehearsed
from whet.log import logger
from whet.models import adapters
from whet.models.experts.layer import layers_of
from whet.models.experts.settings import ExpertSettings, settings_of
from whet.models.loading.adapter import digest_of, quiet_peft
from whet.models.loading.heads import Head
from whet.models.loading.load import ModelSource, add_rows, load_tokenizer, n_tokens
from whet.models.loading.missing_check import is_part, new_weights
from whet.models.quantised import FLAGS, quantise
from whet.models.view import ModelView, Named
from whet.store import weights
from whet.watch import printing

ALL_LINEAR = "all-linear"
_MOST_PLACES = 6
_MOST_TOKENS = 5


def adapted(model: Any, job: JobFields, args: TrainingArguments, head: Head, tokenizer: Any) -> Any:
    """Return the loaded model as the run trains it: with rows for new tokens, new experts, and its adapter."""
    if job.lora_r is not None and not is_rehearsed():
        adapters.keep_digest(model, digest_of(model))
    new = [*_new_in_frozen_rows(model, job, args, tokenizer), *add_rows(model, tokenizer)]
    if new:
        _require_trained(model, job, args, len(new))
        n_rows, shown = model.get_input_embeddings().weight.shape[0], _first_of(tokenizer.convert_ids_to_tokens(new))
        printing.show([f"tokens: {len(new)} new in the embedding tables, now {n_rows:,} rows: {shown}"])
    elif job.resize_token_embeddings:
        printing.show(["tokens: the embedding tables have rows for all of them"])
    return _with_adapter(_with_experts(model, job, args), job, args, head, new)


def _freezes_tables(job: JobFields, args: TrainingArguments) -> bool:
    """Return whether the rows of the embedding tables stay as they are."""
    return job.lora_r is not None or args.freeze_layers is not None or "freeze_tables" in args.methods


def _new_in_frozen_rows(model: Any, job: JobFields, args: TrainingArguments, tokenizer: Any) -> list[int]:
    """Return the added tokens that the model never learnt, and that have one of its frozen rows all the same.

    Tables often have more rows than there are tokens. What is new is what the model's own tokenizer lacks; without it,
    the log names the tokens whose rows stay as they are.
    """
    n_rows = model.get_input_embeddings().weight.shape[0]
    added = {token: number for token, number in tokenizer.get_added_vocab().items() if number < n_rows}
    if not added or not _freezes_tables(job, args):
        return []
    if (own := _own_vocabulary(job)) is not None:
        return sorted(number for token, number in added.items() if own.get(token) != number)
    if n_tokens(tokenizer) != n_rows:
        shown = _first_of(sorted(added, key=lambda token: -added[token]))
        printing.show_wrapped(
            f"tokens: the embedding tables are frozen, also the rows of the added tokens {shown}; if the model never "
            "learnt one of them, name it with its own tokenizer in --model_name_or_path, and yours in --tokenizer_name"
        )
    return []


def _own_vocabulary(job: JobFields) -> dict[str, int] | None:
    """Return the tokens of the model's own tokenizer, if the run has another one; None: there is none to compare."""
    if job.tokenizer_name in (None, job.model_name_or_path):
        return None
    revision = {"cache_dir": job.cache_dir, "revision": job.model_revision, "token": job.token}
    try:
        return load_tokenizer(ModelSource(model=job.model_name_or_path, **revision), resize=True).get_vocab()
    except ConfigError:
        return None


def _with_experts(model: Any, job: JobFields, args: TrainingArguments) -> Any:
    """Return the model with the experts that the run asks for; without moe_experts, the model as it is.

    A model that has experts keeps the settings that are not given.
    """
    if job.moe_experts is None:
        return model
    from whet.models.experts.upcycle import upcycle

    usual = settings_of(model.config) or ExpertSettings(experts=job.moe_experts)
    given = {one.name: getattr(job, f"moe_{one.name}") for one in fields(ExpertSettings)}
    settings = replace(usual, **{name: value for name, value in given.items() if value is not None})
    return upcycle(model, settings, seed=args.seed)


def _first_of(tokens: list[str]) -> str:
    """Return the first tokens of a list, for a line."""
    more = len(tokens) - _MOST_TOKENS
    return " ".join(map(repr, tokens[:_MOST_TOKENS])) + (f" and {more} more" if more > 0 else "")


def _require_trained(model: Any, job: JobFields, args: TrainingArguments, n_new: int) -> None:
    """Refuse settings under which the rows of new tokens would stay as they are drawn."""
    given = {"freeze_layers": args.freeze_layers, "methods": "freeze_tables" in args.methods or None}
    output = model.get_output_embeddings()
    if frozen := [name for name, value in given.items() if value is not None]:
        raise ConfigError(
            what=f"{' and '.join(frozen)} would freeze the rows of new tokens",
            got=f"{n_new} tokens that the model has no rows for, or none that it has learnt",
            why="the embedding tables are frozen, and untrained rows mean nothing",
            fix=f"leave --{' and --'.join(frozen)} out, or use the model's own tokenizer",
        )
    if job.lora_r is not None and getattr(output, "bias", None) is not None:
        raise ConfigError(
            what="lora_r does not go with new tokens in this model",
            got=f"{type(model).__name__}: its output layer has a bias",
            why="peft computes rows of new tokens in the output layer without its bias",
            fix="leave --lora_r out, or use the model's own tokenizer",
        )


def _rows_to_train(model: Any, new: list[int]) -> dict[str, list[int]] | None:
    """Return peft's setting for the rows of new tokens in each table that is no other's."""
    tables = [model.get_input_embeddings(), model.get_output_embeddings()]
    if tables[1] is not None and tables[1].weight is tables[0].weight:
        tables = tables[:1]
    names = {id(module): name for name, module in model.named_modules()}
    return {names[id(table)]: new for table in tables if table is not None} if new else None


def _with_adapter(model: Any, job: JobFields, args: TrainingArguments, head: Head, new: list[int]) -> Any:
    """Return the model with the adapter that the run asks for; without lora_r, the model as it is.

    A head that has its labels from the run is trained completely, next to the adapter; that of a language model is not.
    New experts are too: as copies of one part they would stay alike. With load_in_8bit or 4bit, the others are rounded.
    """
    if job.lora_r is None:
        return model
    peft = _peft()
    adapters.require_another_folder(
        job.model_name_or_path, args.output_dir, what="lora_r",
        fix="use another --output_dir, or leave --lora_r out to train all weights",
    )  # fmt: skip
    targets = _targets(model, job.lora_target_modules)
    above = _above(model, args.freeze_layers) if args.freeze_layers else {}
    if above and targets == ALL_LINEAR:
        targets = _linear_names(model)  # peft takes numbers of layers with names alone
    config = peft.LoraConfig(
        task_type=head.peft,
        revision=None if job.model_revision == "main" else job.model_revision,
        r=job.lora_r,
        lora_alpha=job.lora_alpha,
        lora_dropout=job.lora_dropout,
        target_modules=targets,
        use_rslora=job.use_rslora,
        use_dora=job.use_dora,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        modules_to_save=_trained_completely(model, job, head) or None,
        trainable_token_indices=_rows_to_train(model, new),
        **above,
    )
    try:
        with quiet_peft():
            wrapped = peft.get_peft_model(model, config)
        n_weights = sum(one.numel() for one in wrapped.parameters())
    except ValueError as error:
        raise ConfigError(
            what="no layer of the model takes LoRA",
            got=f"lora_target_modules {targets}",
            why=" ".join(str(error).split())[:300],
            fix=f"use some of {', '.join(_linear_names(model))} in --lora_target_modules, or {ALL_LINEAR}",
        ) from error
    if wider := _narrower_than(wrapped, job.lora_r):
        text = "lora_r %d is above the width of %s: a pair of this width learns as much, in less time and memory"
        logger.warning(text, job.lora_r, wider)
    if Path(job.model_name_or_path).is_dir():  # a relative name would be another model elsewhere, or one of the hub
        wrapped.active_peft_config.base_model_name_or_path = str(Path(job.model_name_or_path).absolute())
    if job.load_in_8bit or job.load_in_4bit:
        n_bits = 8 if job.load_in_8bit else 4
        _require_cpu(args, n_bits)
        logger.info("%s", quantise(wrapped, n_bits))
    _say_share(wrapped, n_weights)
    return wrapped


def _say_share(wrapped: Any, n_weights: int) -> None:
    """Show how many of the model's weights are trained."""
    n_trained = sum(one.numel() for one in wrapped.parameters() if one.requires_grad)
    share = 100 * n_trained / n_weights
    trained, all_of_them = _millions(n_trained, n_weights)
    printing.show([f"LoRA: {trained} of {all_of_them} million weights trained ({share:.2g} %)"])


def _millions(*counts: int) -> list[str]:
    """Return the counts in millions, with one decimal place, or as many as the smallest needs."""
    places = 1
    while min(counts) and places < _MOST_PLACES and round(min(counts) / 1e6, places) == 0:
        places += 1
    return [f"{n / 1e6:.{places}f}" for n in counts]


def _above(model: Any, n_frozen: int) -> dict[str, Any]:
    """Return peft's settings for pairs in the blocks above these alone."""
    blocks = [name for name, _ in ModelView(model).blocks()]
    if n_frozen >= len(blocks):
        raise ConfigError(
            what="freeze_layers leaves no block for lora_r",
            got=f"freeze_layers {n_frozen} of {len(blocks)} blocks",
            why="frozen blocks get no pairs",
            fix=f"use a --freeze_layers below {len(blocks)}, or leave --lora_r out to train the head alone",
        )
    stack = blocks[0].rpartition(".")[0].rpartition(".")[2]
    return {"layers_to_transform": list(range(n_frozen, len(blocks))), "layers_pattern": [stack]}


def _narrower_than(wrapped: nn.Module, rank: int) -> str:
    """Return the layers whose smaller width is below the rank of their pair, with this width, by name; "": none."""
    layers: list[tuple[str, Any]] = list(wrapped.named_modules())
    pairs = [(name, layer) for name, layer in layers if hasattr(layer, "lora_A") and hasattr(layer, "in_features")]
    widths = {name.rpartition(".")[2]: min(int(layer.in_features), int(layer.out_features)) for name, layer in pairs}
    return ", ".join(f"{name} ({width})" for name, width in sorted(widths.items()) if width < rank)


def _require_cpu(args: TrainingArguments, n_bits: int) -> None:
    device = weights.device_of(args.use_cpu)
    if device.type != "cpu":
        raise ConfigError(
            what=f"load_in_{n_bits}bit is asked for on a GPU",
            got=f"the {device.type.upper()}",
            why=f"whet's products with weights of {n_bits} bits have been tested on CPUs alone",
            fix=f"add --use_cpu, or leave {FLAGS[n_bits]} out: --gradient_checkpointing saves memory on a GPU",
        )


def _trained_completely(model: Any, job: JobFields, head: Head) -> list[str]:
    """Return the names of the modules that are trained next to the adapter: the head, new experts, all new weights.

    New are also a pooler that the pretrained model came without: frozen, it would stay random.
    """
    found = [] if head.causal else [name for name, _ in ModelView(model).head()]
    found += [] if job.moe_experts is None else [name for name, _ in layers_of(model)]
    owners = dict.fromkeys(name.rpartition(".")[0] for name in new_weights(model))
    return found + [owner for owner in owners if not is_part(owner, found)]


def _targets(model: Any, asked: str | None) -> str | list[str]:
    """Return the layers that get a pair: what is asked for, else peft's usual ones, else all linear layers."""
    names = [name.strip() for name in (asked or "").split(",") if name.strip()]
    if names == [ALL_LINEAR]:
        return ALL_LINEAR
    missing = [name for name in names if name not in _linear_names(model)]
    if missing:
        absent = [name for name in missing if name not in _last_names(ModelView(model).linears())]
        raise ConfigError(
            what=f"the model has no layer {' or '.join(absent)}"
            if absent
            else f"the model's head gets no pair: {' or '.join(missing)}",
            got=f"lora_target_modules {asked}",
            why="each name is that of linear layers of the model"
            if absent
            else "a head with labels is trained completely, and that of a language model stays as it is",
            fix=f"use some of {', '.join(_linear_names(model))} in --lora_target_modules, or {ALL_LINEAR}",
        )
    usual: Any = _peft().utils.constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    return names or usual.get(model.config.model_type) or ALL_LINEAR


def _linear_names(model: nn.Module) -> list[str]:
    """Return the last parts of the names of the model's linear layers outside of its head."""
    view = ModelView(model)
    heads = tuple(f"{name}." for name, _ in view.head())
    return _last_names(one for one in view.linears() if not f"{one.name}.".startswith(heads))


def _last_names(modules: Iterable[Named]) -> list[str]:
    return list(dict.fromkeys(name.rpartition(".")[2] for name, _ in modules))


def _peft() -> Any:
    return optional.require("peft", needed_for="--lora_r", install="peft")
