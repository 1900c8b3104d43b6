"""A trained model as it is read again: complete, or the adapter of peft next to the model that it was trained on.

Of an adapter's settings only those that are known are read, as others may name code of other packages, and its model
has to have the weights of the training.
"""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from whet import optional, system
from whet.errors import ConfigError, Problem
from whet.hardware import memory
from whet.log import logger
from whet.models import adapters, finite
from whet.models.experts.settings import KEY, ExpertSettings, parsed
from whet.models.experts.upcycle import upcycle
from whet.models.loading import exported, heads
from whet.models.loading.folder_check import ADAPTER, CONFIG, TOKENIZER, TOKENIZER_CONFIG, file_of_run, read_object
from whet.models.loading.hub import missing_folder
from whet.models.loading.load import (
    Labels,
    ModelSource,
    config_under_adapter,
    load_config,
    load_model,
    load_tokenizer,
    n_tokens,
    resize_rows,
)
from whet.models.loading.missing_check import in_short, new_weights
from whet.models.loading.quiet import quiet
from whet.models.loading.special_tokens import align_special_tokens, set_padding
from whet.models.loading.tensor_check import read_header


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST_NUMBER


def _is_whole(value: object, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_rank(value: object) -> bool:
    return _is_whole(value, least=1)


def _is_switch(value: object) -> bool:
    return isinstance(value, bool)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _are_numbers(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_whole, value))


def _is_table(of: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, dict) and all(map(of, value.values()))


_BASE_FLAG = "--base_model_name_or_path"
WITH_PEFT = "merge it with peft (merge_and_unload, save_pretrained), and compare the logits before and after"
_WEIGHTS = "adapter_model.safetensors"
_LARGEST_NUMBER = 1e308
_SWITCH = ("true or false", (_is_switch,))
_NAMES = ("a list of names", (_are_names,))
_PATTERN = ("a list of names, or a regular expression", (_is_text, _are_names))
_READ: dict[str, tuple[str, tuple[Callable[[object], bool], ...]]] = {
    "r": ("a whole number from 1 on", (_is_rank,)),
    "lora_alpha": ("a number", (_is_number,)),
    "lora_dropout": ("a number", (_is_number,)),
    "target_modules": _PATTERN,
    "exclude_modules": _PATTERN,
    "target_parameters": _NAMES,
    "modules_to_save": _NAMES,
    "use_rslora": _SWITCH,
    "use_dora": _SWITCH,
    "fan_in_fan_out": _SWITCH,
    "lora_bias": _SWITCH,
    "ensure_weight_tying": _SWITCH,
    "bias": ("none, all or lora_only", (lambda value: value in ("none", "all", "lora_only"),)),
    "task_type": ("a text", (_is_text,)),
    "layers_to_transform": ("whole numbers", (_is_whole, _are_numbers)),
    "layers_pattern": _PATTERN,
    "rank_pattern": ("whole numbers from 1 on, by name", (_is_table(_is_rank),)),
    "alpha_pattern": ("numbers by name", (_is_table(_is_number),)),
    "trainable_token_indices": ("numbers of tokens", (_are_numbers, _is_table(_are_numbers))),
}
"""Settings of an adapter that say how it is computed, and their values; others may name code of other packages."""
_HARMLESS = (
    *("peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode"),
    *("init_lora_weights", "eva_config", "megatron_core", "runtime_config"),
)
"""Settings that do not change what a trained adapter adds to its model."""
_BEGINNINGS = ("gaussian", "eva", "orthogonal")
"""Ways to begin that leave the model's own weights as they are; others, such as PiSSA, change them too."""
_MOST_ROWS = 1 << 22
"""Of an embedding table: the largest vocabularies have a million tokens at most."""
_PATTERN_S = 2.0
"""Seconds that one regular expression may take for the name of one layer; usual ones take microseconds."""


def load_trained(name: str, head: heads.Head, base: str | None) -> tuple[Any, Any]:
    """Return the trained model with this head, and its tokenizer; of a folder that `whet export` wrote, that model.

    The tokenizer pads as the head reads rows. An adapter stays next to the weights of its model: `base`, or else the
    one that it names, if its weights are those of the training.
    """
    model, tokenizer = _adapted(Path(name), head, base) if is_adapter(name) else _complete(name, head, base)
    set_padding(model, tokenizer, head)
    return model, tokenizer


def _complete(name: str, head: heads.Head, base: str | None) -> tuple[Any, Any]:
    """Return a model that is no adapter, and its tokenizer."""
    if base is not None:
        raise no_adapter(name, base)
    source = ModelSource(model=name, flag="--model")
    tokenizer = load_tokenizer(source)
    if exported.about_folder(name) is not None:
        return exported.load_exported(name, head), tokenizer
    return load_model(source, head, trained=True), tokenizer


def _adapted(folder: Path, head: heads.Head, base: str | None) -> tuple[Any, Any]:
    """Return the adapter's model with its adapter, and the tokenizer of the two."""
    settings = settings_of(folder)
    if settings.get("task_type") != head.peft:
        found = head_of_adapter(settings, folder, (*heads.OF_ENCODERS, heads.CAUSAL_LM))
        raise ConfigError(
            what=f"the adapter has not learnt to {head.learns}",
            got=f"{folder}: task_type {settings.get('task_type')}",
            why=f"it was trained for {found.task}",
            fix=f"name an adapter that {head.command} has trained",
        )
    source = source_under(base, settings, folder)
    tokenizer = load_tokenizer(tokenizer_source(source, folder), resize=None)
    model = base_model(source, head, folder)
    new = new_weights(model)
    require_rows(model, tokenizer, folder)
    wrapped = with_adapter(model, settings, folder)
    if lost := sorted(set(new) - _names_in(folder)):
        raise ConfigError(
            what=f"the model with its adapter has not learnt to {head.learns}",
            got=f"{folder} on {source.model}",
            why=f"neither holds weights for {in_short(lost)}",
            fix=f"name the model that it was trained on in {_BASE_FLAG}, or train the adapter with its head in "
            "modules_to_save",
        )
    with quiet():  # as in the training, whose run may have taught another end than the model's
        align_special_tokens(wrapped, tokenizer)
    return wrapped.eval(), tokenizer


def is_adapter(name: str) -> bool:
    """Return whether this is the folder of an adapter."""
    return (Path(name) / ADAPTER).is_file()


def trained_head(name: str, known: Iterable[heads.Head]) -> tuple[heads.Head | None, str]:
    """Return the head of the model, or of the adapter's model if it is among `known`; and what names it there.

    None: the model's head is unknown. Raises ConfigError for an adapter of another task than those of `known`.
    """
    if is_adapter(name):
        settings = settings_of(Path(name))
        return head_of_adapter(settings, Path(name), known), f"task_type {settings['task_type']}"
    architectures = load_config(ModelSource(model=name, flag="--model")).architectures
    return heads.head_named(architectures, known), f"architectures {architectures}"


def source_under(base: str | None, settings: dict[str, Any], folder: Path) -> ModelSource:
    """Return where the adapter's model is; raises ConfigError if the place that was recorded is empty."""
    recorded = settings.get("base_model_name_or_path")
    name = base or str(recorded or "")
    if base is None and (not name or missing_folder(name, _BASE_FLAG)):
        raise ConfigError(
            what="the model of the adapter is not where it was" if name else "the adapter names no model",
            got=f"{folder}: {name or 'no base_model_name_or_path'}",
            why="an adapter holds what is added to the weights of a model, and not these weights",
            fix=f"name the model that it was trained on: {_BASE_FLAG} FOLDER",
        )
    return ModelSource(model=name, revision=revision_of(settings, name), flag=_BASE_FLAG)


def no_adapter(name: str, base: str) -> ConfigError:
    """Return the error for a model under an adapter that is named for a model of its own."""
    return ConfigError(
        what="base_model_name_or_path would change nothing",
        got=base,
        why=f"{name} is no adapter: it holds all of its weights",
        fix=f"leave {_BASE_FLAG} out, or name the folder of an adapter",
    )


def base_model(source: ModelSource, head: heads.Head, folder: Path) -> Any:
    """Return the model that the adapter in this folder was trained on, as it was before the training.

    Its configuration is that of the run, which --config_name may have named. Raises ConfigError if its weights are
    others by now.
    """
    path = file_of_run(folder, CONFIG)
    config = config_under_adapter(source, None if path is None else path.parent)
    model = load_model(source, head, labels=_labels(folder), adapted=config)
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
    path = file_of_run(folder, CONFIG)
    found = None if path is None else read_object(path).get("vocab_size")
    return found if isinstance(found, int) and found <= _MOST_ROWS else 0


def _require_same_weights(model: Any, source: ModelSource, folder: Path) -> None:
    """Compare the digest of the model's weights with the one that the run has recorded; none is logged."""
    path = file_of_run(folder, CONFIG)
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


def settings_of(folder: Path) -> dict[str, Any]:
    """Return the settings of the adapter in a folder; the log names further adapters that it holds."""
    inside = [*map(str, sorted(path.parent for path in folder.glob(f"*/{ADAPTER}")))]
    others = [name for name in inside if not Path(name).name.startswith("checkpoint-")]
    if not (folder / ADAPTER).is_file() or not (folder / _WEIGHTS).is_file():
        raise ConfigError(
            what="the folder holds no adapter",
            got=str(folder),
            why=f"an adapter is the files {ADAPTER} and {_WEIGHTS}",
            fix=f"name one of {', '.join(inside)}"
            if inside
            else "name the output folder of a run with --lora_r, or a folder that peft has saved; one of the hub is "
            "downloaded first: hf download NAME --local-dir adapter",
        )
    if others:
        logger.warning("%s also holds the adapters %s, which are not merged", folder, ", ".join(others))
    settings = read_object(folder / ADAPTER)
    if settings.get("peft_type") != "LORA":
        raise ConfigError(
            what="the adapter is not a LoRA",
            got=settings.get("peft_type"),
            why="whet merge adds low-rank pairs to weights",
            fix=WITH_PEFT,
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
            fix=WITH_PEFT,
        )


def _require_values(settings: Mapping[str, Any], weights: Mapping[str, Tensor], path: Path) -> None:
    """Refuse settings of another type than theirs, and ranks that none of the adapter's weights has."""
    problems = [
        Problem(
            what=f"{name} of the adapter cannot be read",
            got=f"{path}: {name} {settings[name]!r}"[:200],
            why=f"it is {kind}",
            fix="copy the adapter again from where it comes",
        )
        for name, (kind, checks) in _READ.items()
        if settings.get(name) is not None and not any(check(settings[name]) for check in checks)
    ]
    if problems:
        raise ConfigError.of(problems)
    ranks = [settings.get("r") or 1, *(settings.get("rank_pattern") or {}).values()]
    largest = max((n for tensor in weights.values() for n in tensor.shape), default=0)
    if max(ranks) > largest:
        raise ConfigError(
            what="the rank of the adapter does not fit its weights",
            got=f"{path}: rank {max(ranks):,}",
            why=f"the longest side of a tensor in {path.with_name(_WEIGHTS)} is {largest:,}",
            fix="copy the adapter again from where it comes",
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


def head_of_adapter(settings: dict[str, Any], folder: Path, known: Iterable[heads.Head]) -> heads.Head:
    """Return the head of the adapter's model; raises ConfigError if its task is none of theirs."""
    by_task = {head.peft: head for head in known}
    found = str(settings.get("task_type"))
    if found not in by_task:
        raise ConfigError(
            what="the adapter names no task that whet knows",
            got=f"{folder}: task_type {settings.get('task_type')}",
            why="the task says which head the model has",
            fix=f"use an adapter of {', '.join(by_task)}",
        )
    return by_task[found]


def _labels(folder: Path) -> Labels | None:
    """Return the labels of the run that has written the adapter."""
    path = file_of_run(folder, CONFIG)
    if path is None:
        return None
    config = read_object(path)
    names, kind = config.get("id2label"), config.get("problem_type")
    if names is None or names == {}:
        return None
    if not isinstance(names, dict) or sorted(names) != sorted(map(str, range(len(names)))):
        raise ConfigError(
            what="the labels of the run cannot be read",
            got=f"{path}: id2label {names!r}"[:200],
            why="it gives each number from 0 on the name of a label",
            fix="copy the file again from the run's output folder",
        )
    ordered = [str(names[str(number)]) for number in range(len(names))]
    return Labels(names=ordered, problem_type=kind if isinstance(kind, str) else None, may_replace=True)


def _experts(folder: Path) -> ExpertSettings | None:
    """Return the experts that the run gave the model; the adapter holds their weights."""
    path = file_of_run(folder, CONFIG)
    return None if path is None else parsed(read_object(path).get(KEY))


def with_adapter(model: Any, settings: dict[str, Any], folder: Path) -> Any:
    """Return the model with the adapter's pairs; raises ConfigError if they are of another model."""
    peft = _peft()
    try:
        weights = load_file(folder / _WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            what=f"the weights of the adapter cannot be read: {folder / _WEIGHTS}",
            got=str(error),
            why="the file is damaged, or was copied in part",
            fix="copy the adapter again, or name another checkpoint of its run",
        ) from error
    _require_values(settings, weights, folder / ADAPTER)
    given = {name: settings[name] for name in _READ if settings.get(name) is not None}
    try:
        with quiet_peft(), _patterns_in_time(folder / ADAPTER):
            wrapped = peft.get_peft_model(model, peft.LoraConfig(**given))
            wanted = set(peft.get_peft_model_state_dict(wrapped, save_embedding_layers=False))
            found = None if wanted - set(weights) else peft.set_peft_model_state_dict(wrapped, weights)
    except ConfigError:
        raise
    except Exception as error:  # what peft and torch raise for settings of other models, of any type
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise memory.lack(error) or _other_model(folder, why) from error
    odd = sorted(wanted - set(weights) if found is None else found.unexpected_keys)
    if odd:
        raise _other_model(folder, f"no place, or no weights, for {', '.join(odd[:3])}")
    if spoilt := finite.not_finite(wrapped):
        raise ConfigError(
            what="the weights of the adapter are not finite",
            got=f"{folder / _WEIGHTS}: {finite.shown(spoilt)}",
            why="one NaN or infinity in the weights makes every answer one",
            fix="name an earlier checkpoint of its run: this one was saved after the training had failed",
        )
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


def _names_in(folder: Path) -> set[str]:
    """Return the names of the weights that the adapter holds, as the model without peft has them."""
    return {name.removeprefix("base_model.model.") for name in read_header(folder / _WEIGHTS)}


@contextmanager
def _patterns_in_time(path: Path) -> Iterator[None]:
    """Raise ConfigError if a regular expression of the adapter takes seconds for one name: it would take for ever."""
    if threading.current_thread() is not threading.main_thread():  # signals reach that one alone
        yield
        return
    last: Any = None

    def look(_: int, frame: Any) -> None:
        nonlocal last
        if frame is last and frame.f_code.co_filename == re.__file__:
            raise ConfigError(
                what="a regular expression of the adapter does not end",
                got=f"{path}: {str(frame.f_locals.get('pattern'))[:200]!r}",
                why=f"it takes more than {_PATTERN_S:.0f} s for the name of one layer",
                fix="write target_modules, and other settings with names of layers, as lists of names",
            )
        last = frame

    with system.alarms(_PATTERN_S, look) as is_watched:
        if not is_watched:
            logger.info("the regular expressions of the adapter have no limit in time on this system")
        yield


def _other_model(folder: Path, why: str) -> ConfigError:
    return ConfigError(
        what="the adapter does not fit the model",
        got=str(folder),
        why=why,
        fix=f"name the model that it was trained on in {_BASE_FLAG}",
    )


def digest_of(model: nn.Module) -> str:
    """Return a digest of the weights that came from the model's files, in float32.

    It does not depend on their names, their order or their number of files, which versions of transformers change.
    """
    new = set(new_weights(model))
    total = sum(
        xxhash.xxh3_128_intdigest(one.detach().contiguous().cpu().numpy().data, seed=one.ndim)
        for name, one in model.named_parameters() if name not in new
    )  # fmt: skip
    return f"{total % (1 << 128):032x}"


@contextmanager
def quiet_peft() -> Iterator[None]:
    """Run the block without what transformers says to peft, and peft of tied tables, which `whet merge` decides."""
    with quiet(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing.*", FutureWarning)
        warnings.filterwarnings("ignore", "Input and output embeddings are no longer tied after merging")
        yield


def _peft() -> Any:
    return optional.require("peft", needed_for="whet merge", install="peft")
