"""`whet merge`: the weights of an adapter added to those of its model, saved as a model like any other."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from whet import optional
from whet.errors import ConfigError, StorageError
from whet.jobs.lora.adapt import TASK_TYPES, digest_of, quiet_peft
from whet.jobs.lora.merge_arguments import MergeArguments
from whet.jobs.predict.trained import NAME
from whet.log import logger, set_up
from whet.models import adapters
from whet.models.experts.settings import KEY, ExpertSettings, parsed
from whet.models.experts.upcycle import upcycle
from whet.models.loading import heads
from whet.models.loading.folder_check import CONFIG, TOKENIZER, TOKENIZER_CONFIG, read_object
from whet.models.loading.load import Labels, ModelSource, load_model, load_tokenizer, n_tokens, resize_rows
from whet.models.loading.tensor_check import read_header
from whet.models.wrapped import passed_on, unwrapped
from whet.train.checkpoint.weights import save_processing, save_weights
from whet.train.output import files as output_files
from whet.train.output import printing

_ADAPTER, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_READ = (
    *("r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "use_rslora", "use_dora", "task_type"),
    *("fan_in_fan_out", "bias", "modules_to_save", "layers_to_transform", "layers_pattern", "rank_pattern"),
    *("alpha_pattern", "trainable_token_indices"),
)
"""Settings of an adapter that say how it is computed; others may name code of other packages."""
_HARMLESS = (
    *("peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode"),
    *("init_lora_weights", "eva_config", "megatron_core", "runtime_config"),
)
"""Settings that do not change what a trained adapter adds to its model."""
_BEGINNINGS = ("gaussian", "eva", "orthogonal")
"""Ways to begin that leave the model's own weights as they are; others, such as PiSSA, change them too."""
_TYPES = "token_type_ids"
_MOST_ROWS = 1 << 22
"""Of an embedding table: the largest vocabularies have a million tokens at most."""
_UNFINISHED = ".merge.partial"
"""Lies in the output folder while the model is written to it."""
_WITH_PEFT = "merge it with peft: merge_and_unload, then save_pretrained"
_HEADS = {head.auto: head for head in (*heads.HEADS.values(), heads.CAUSAL_LM)}


def run_merge(asked: MergeArguments) -> int:
    """Run the command; return its exit code."""
    set_up()
    folder, output = Path(asked.adapter), Path(asked.output_dir)
    _require_empty(output)
    settings = settings_of(folder)
    base = asked.model_name_or_path or settings.get("base_model_name_or_path") or ""
    source = ModelSource(model=str(base), revision=revision_of(settings, str(base)))
    model = base_model(source, head_of(settings, folder), folder)
    tokenizer, reading = load_tokenizer(tokenizer_source(source, folder), resize=None), _file_of_run(folder, NAME)
    require_rows(model, tokenizer, folder)
    wrapped = with_adapter(model, settings, folder)
    _embed_types_as_trained(wrapped)
    merged = wrapped.merge_and_unload()

    def fill(staging: Path) -> None:
        save_weights(merged, staging)
        save_processing(tokenizer, staging)
        if reading is not None:
            shutil.copyfile(reading, staging / NAME)

    _write(output, fill)
    printing.show([f"{base} with the adapter of {folder} is in {output}"])
    return 0


def base_model(source: ModelSource, head: heads.Head, folder: Path) -> Any:
    """Return the model that the adapter in this folder was trained on, as it was before the training.

    Raises ConfigError if its weights are others by now.
    """
    model = load_model(source, head, labels=_labels(folder))
    _require_same_weights(model, source, folder)
    resize_rows(model, _n_rows(model, folder))
    if (experts := _experts(folder)) is not None:
        upcycle(model, experts)
    return model


def _n_rows(model: Any, folder: Path) -> int:
    """Return how many rows the embedding tables had in the run: those of its own table, or of its configuration."""
    table = model.get_input_embeddings()
    name = next(name for name, module in model.named_modules() if module is table)
    held = {one.replace(".base_layer.", "."): tensor for one, tensor in read_header(folder / _WEIGHTS).items()}
    if (own := held.get(f"base_model.model.{name}.weight")) is not None:
        return own.shape[0]
    path = _file_of_run(folder, CONFIG)
    found = None if path is None else read_object(path).get("vocab_size")
    return found if isinstance(found, int) and found <= _MOST_ROWS else 0


def _require_same_weights(model: Any, source: ModelSource, folder: Path) -> None:
    """Compare the digest of the model's weights with the one that the run has recorded; none is logged."""
    path = _file_of_run(folder, CONFIG)
    recorded = None if path is None else read_object(path).get(adapters.DIGEST)
    if recorded is None:
        logger.warning("%s records no digest of its model: %s is taken for it unchecked", folder, source.model)
    elif recorded != digest_of(model):
        raise ConfigError(
            what="the adapter was trained on other weights",
            got=source.model,
            why=f"their digest is not the one in {path}: the model has changed since, or is another one",
            fix=f"name the model that it was trained on in {source.flag}; to take this one all the same, remove "
            f"{adapters.DIGEST} from {path}",
        )


def _write(output: Path, fill: Callable[[Path], None]) -> None:
    """Write the model that `fill` puts into a folder; a merge that is killed in the middle can be repeated."""
    mark = output / _UNFINISHED
    with output_files.stored(f"the model cannot be written to {output}", output):
        output.mkdir(parents=True, exist_ok=True)
        mark.touch()
    try:
        output_files.write_model(output, fill)
    except StorageError:
        with suppress(OSError):
            if [*output.iterdir()] == [mark]:
                mark.unlink()
        raise
    with output_files.stored(f"{mark} cannot be removed", output):
        mark.unlink()


def settings_of(folder: Path) -> dict[str, Any]:
    """Return the settings of the adapter in a folder."""
    if not (folder / _ADAPTER).is_file() or not (folder / _WEIGHTS).is_file():
        raise ConfigError(
            what="the folder holds no adapter",
            got=str(folder),
            why=f"an adapter is the files {_ADAPTER} and {_WEIGHTS}",
            fix="name the output folder of a run with --lora_r, or a folder that peft has saved",
        )
    settings = read_object(folder / _ADAPTER)
    if settings.get("peft_type") != "LORA":
        raise ConfigError(
            what="the adapter is not a LoRA",
            got=settings.get("peft_type"),
            why="whet merge adds low-rank pairs to weights",
            fix=_WITH_PEFT,
        )
    _require_known(settings)
    return settings


def _require_known(settings: dict[str, Any]) -> None:
    """Refuse an adapter with settings that change what it computes, and that are not read here."""
    usual = _peft().LoraConfig().to_dict()
    odd = [
        name for name, value in settings.items()
        if name not in (*_READ, *_HARMLESS) and value != usual.get(name) and value not in (None, False, {}, [])
    ]  # fmt: skip
    begin = settings.get("init_lora_weights")
    if isinstance(begin, str) and begin not in _BEGINNINGS:
        odd.append("init_lora_weights")
    if odd:
        raise ConfigError(
            what="the adapter is of a kind that whet merge does not know",
            got=", ".join(f"{name}: {settings[name]!r}"[:80] for name in odd),
            why="such an adapter is not low-rank pairs next to the weights of its model alone",
            fix=_WITH_PEFT,
        )


def revision_of(settings: dict[str, Any], base: str) -> str:
    """Return the revision of the model that the adapter names."""
    found = settings.get("revision") if base == settings.get("base_model_name_or_path") else None
    return found if isinstance(found, str) and found else "main"


def tokenizer_source(source: ModelSource, folder: Path) -> ModelSource:
    """Return where the tokenizer comes from: the adapter's folder if it has one, as it was trained with it."""
    if not any((folder / name).exists() for name in (TOKENIZER, TOKENIZER_CONFIG)):
        return source
    return ModelSource(
        model=str(folder), config=source.model, revision=source.revision, flag="--adapter", beside_adapter=True
    )


def _file_of_run(folder: Path, name: str) -> Path | None:
    """Return this file of the run: a checkpoint's lies in the folder around it, if not next to the adapter."""
    places = [folder, folder.resolve().parent] if folder.resolve().name.startswith("checkpoint-") else [folder]
    return next((place / name for place in places if (place / name).exists()), None)


def head_of(settings: dict[str, Any], folder: Path) -> heads.Head:
    """Return the head of the adapter's model; raises ConfigError if its task is none of whet's."""
    autos = {task: auto for auto, task in TASK_TYPES.items()}
    auto = autos.get(str(settings.get("task_type")))
    if auto is None:
        raise ConfigError(
            what="the adapter names no task that whet knows",
            got=f"{folder}: task_type {settings.get('task_type')}",
            why="the task says which head the model has",
            fix=f"use an adapter of {', '.join(autos)}",
        )
    return _HEADS[auto]


def _labels(folder: Path) -> Labels | None:
    """Return the labels of the run that has written the adapter."""
    path = _file_of_run(folder, CONFIG)
    if path is None:
        return None
    config = read_object(path)
    names = config.get("id2label")
    if not isinstance(names, dict) or not names:
        return None
    ordered = [str(names[key]) for key in sorted(names, key=int)]
    return Labels(names=ordered, problem_type=config.get("problem_type"), may_replace=True)


def _experts(folder: Path) -> ExpertSettings | None:
    """Return the experts that the run gave the model; the adapter holds their weights."""
    path = _file_of_run(folder, CONFIG)
    return None if path is None else parsed(read_object(path).get(KEY))


def with_adapter(model: Any, settings: dict[str, Any], folder: Path) -> Any:
    """Return the model with the adapter's pairs; raises ConfigError if they are of another model."""
    peft = _peft()
    config = peft.LoraConfig(**{name: settings[name] for name in _READ if name in settings})
    try:
        weights = load_file(folder / _WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            what=f"the weights of the adapter cannot be read: {folder / _WEIGHTS}",
            got=str(error),
            why="the file is damaged, or was copied in part",
            fix="copy the adapter again, or name another checkpoint of its run",
        ) from error
    try:
        with quiet_peft():
            wrapped = peft.get_peft_model(model, config)
            wanted = set(peft.get_peft_model_state_dict(wrapped, save_embedding_layers=False))
            found = peft.set_peft_model_state_dict(wrapped, weights)
    except (ValueError, RuntimeError) as error:
        raise _other_model(folder, " ".join(str(error).split())[:300]) from error
    odd = sorted(set(found.unexpected_keys) | (wanted - set(weights)))
    if odd:
        raise _other_model(folder, f"no place, or no weights, for {', '.join(odd[:3])}")
    return wrapped


def require_rows(model: Any, tokenizer: Any, folder: Path) -> None:
    """Refuse tokens of which neither the model nor the adapter has a row."""
    n_rows, n_wanted = model.get_input_embeddings().weight.shape[0], n_tokens(tokenizer)
    if n_wanted > n_rows:
        raise ConfigError(
            what="the tokenizer has tokens that the adapter and its model do not know",
            got=f"{folder}: {n_wanted:,} tokens, {n_rows:,} rows",
            why="text with these tokens has no embedding",
            fix="put the tokenizer that it was trained with into the adapter's folder",
        )


def names_in(folder: Path) -> set[str]:
    """Return the names of the weights that the adapter holds, as the model without peft has them."""
    return {name.removeprefix("base_model.model.") for name in read_header(folder / _WEIGHTS)}


def _embed_types_as_trained(wrapped: nn.Module) -> None:
    """Give all token types the embedding of the first, if peft's class for the task keeps them from the model.

    PeftModelForQuestionAnswering does: an adapter learns with the first type alone, and a merged model is given others.
    """
    if _TYPES in passed_on(wrapped, frozenset({"input_ids", _TYPES})):
        return
    for name, table in unwrapped(wrapped).named_modules():
        if name.endswith("token_type_embeddings") and isinstance(table, nn.Embedding):
            with torch.no_grad():
                table.weight.copy_(table.weight[:1].expand_as(table.weight))
            logger.info("%s: each type has the embedding of the first, as under %s", name, type(wrapped).__name__)


def _peft() -> Any:
    return optional.require("peft", needed_for="whet merge", install="peft")


def _other_model(folder: Path, why: str) -> ConfigError:
    return ConfigError(
        what="the adapter does not fit the model",
        got=str(folder),
        why=why,
        fix="name the model that it was trained on in --model_name_or_path",
    )


def _require_empty(output: Path) -> None:
    """Refuse a folder with files, except for those of a merge that was killed in the middle."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())) and not (output / _UNFINISHED).is_file():
        raise ConfigError(
            what="output_dir is not empty",
            got=str(output),
            why="the merged model would replace files that are there",
            fix="name a new folder in --output_dir",
        )
