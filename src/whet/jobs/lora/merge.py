"""`whet merge`: the weights of an adapter added to those of its model, saved as a model like any other.

Nothing is written before the merged model has computed what the adapted one computes: peft's merge of tied tables and
of weights that overflow is wrong without an error.
"""

from __future__ import annotations

import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from whet import optional
from whet.errors import ConfigError, Problem, StorageError
from whet.hardware import memory
from whet.jobs.lora.adapt import TASK_TYPES, digest_of, quiet_peft
from whet.jobs.lora.merge_arguments import MergeArguments
from whet.jobs.predict.trained import NAME
from whet.log import logger, set_up
from whet.models import adapters, finite
from whet.models.adapters import is_pefts, passed_on, unwrapped
from whet.models.experts.settings import KEY, ExpertSettings, parsed
from whet.models.experts.upcycle import upcycle
from whet.models.loading import heads
from whet.models.loading.folder_check import CONFIG, TOKENIZER, TOKENIZER_CONFIG, read_object
from whet.models.loading.load import (
    Labels,
    ModelSource,
    load_model,
    load_tokenizer,
    max_positions,
    n_tokens,
    resize_rows,
)
from whet.models.loading.tensor_check import read_header
from whet.store.weights import save_processing, save_weights
from whet.train.output import files as output_files
from whet.train.output import printing

_ADAPTER, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


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
_TYPES = "token_type_ids"
_MOST_ROWS = 1 << 22
"""Of an embedding table: the largest vocabularies have a million tokens at most."""
_N_ROWS, _ROW_TOKENS = 3, 24
"""Of the comparison of the merged model with the adapted one."""
_CLOSE = 1e-3
"""Of the largest logit, how far the two may be apart: rounding of float32 through tens of blocks stays below a tenth of
it, and a pair that is missing, added twice, or added to another table does not."""
_PATTERN_S = 2.0
"""Seconds that one regular expression may take for the name of one layer; usual ones take microseconds."""
_UNFINISHED = ".merge.partial"
"""Lies in the output folder while the model is written to it."""
_WITH_PEFT = "merge it with peft (merge_and_unload, save_pretrained), and compare the logits before and after"
_HEADS = {head.auto: head for head in (*heads.HEADS.values(), heads.CAUSAL_LM)}


def run_merge(asked: MergeArguments) -> int:
    """Run the command; return its exit code."""
    set_up()
    folder, output = Path(asked.adapter), Path(asked.output_dir)
    _require_empty(output)
    settings = settings_of(folder)
    base = asked.model_name_or_path or base_of(settings, folder)
    source, head = ModelSource(model=base, revision=revision_of(settings, base)), head_of(settings, folder)
    model = base_model(source, head, folder)
    tokenizer, reading = load_tokenizer(tokenizer_source(source, folder), resize=None), _file_of_run(folder, NAME)
    require_rows(model, tokenizer, folder)
    wrapped = with_adapter(model, settings, folder)
    _embed_types_as_trained(wrapped)
    merged = _merged(wrapped, _rows(model, head, tokenizer, settings), folder)

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
    model = load_model(source, head, labels=_labels(folder), adapted=True)
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
    """Return the settings of the adapter in a folder; the log names further adapters that it holds."""
    inside = [*map(str, sorted(path.parent for path in folder.glob(f"*/{_ADAPTER}")))]
    others = [name for name in inside if not Path(name).name.startswith("checkpoint-")]
    if not (folder / _ADAPTER).is_file() or not (folder / _WEIGHTS).is_file():
        raise ConfigError(
            what="the folder holds no adapter",
            got=str(folder),
            why=f"an adapter is the files {_ADAPTER} and {_WEIGHTS}",
            fix=f"name one of {', '.join(inside)}"
            if inside
            else "name the output folder of a run with --lora_r, or a folder that peft has saved",
        )
    if others:
        logger.warning("%s also holds the adapters %s, which are not merged", folder, ", ".join(others))
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


def base_of(settings: Mapping[str, Any], folder: Path) -> str:
    """Return the model that the adapter names."""
    found = settings.get("base_model_name_or_path")
    if not isinstance(found, str) or not found.strip():
        raise ConfigError(
            what="the adapter names no model",
            got=f"{folder / _ADAPTER}: base_model_name_or_path {found!r}",
            why="its pairs belong to the weights of one model",
            fix="name the model that it was trained on in --model_name_or_path",
        )
    return found


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
    path = _file_of_run(folder, CONFIG)
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
    _require_values(settings, weights, folder / _ADAPTER)
    given = {name: settings[name] for name in _READ if settings.get(name) is not None}
    try:
        with quiet_peft(), _patterns_in_time(folder / _ADAPTER):
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


def names_in(folder: Path) -> set[str]:
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

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, _PATTERN_S, _PATTERN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _merged(wrapped: Any, rows: list[Tensor], folder: Path) -> Any:
    """Return the model with the pairs added to its weights; raises ConfigError if it computes anything else then.

    Tables that were tied, and differ now, are saved as two.
    """
    wanted = _logits(wrapped, rows, folder)
    inside = unwrapped(wrapped)
    tied = _untied(inside)
    try:
        with quiet_peft():
            merged = wrapped.merge_and_unload()
    except Exception as error:
        raise memory.lack(error) or ConfigError(
            what="the adapter cannot be added to the weights of its model",
            got=str(folder),
            why=" ".join(str(error).split())[:300],
            fix="load it next to its model with peft instead",
        ) from error
    if tied:
        _tie_if_equal(merged, tied)
    found = _logits(merged, rows, folder)
    largest = max(float(one.abs().max()) for one in wanted)
    off = max(float((one - other).abs().max()) for one, other in zip(found, wanted, strict=True))
    spoilt = finite.not_finite(merged)
    if off > _CLOSE * largest or spoilt:
        raise ConfigError(
            what="the merged model does not compute what the model with the adapter computes",
            got=f"logits off by {off:.3g}, where the largest is {largest:.3g}"
            + (f"; not finite: {finite.shown(spoilt)}" if spoilt else ""),
            why=f"on {len(rows)} sequences they may differ by float32 rounding, {_CLOSE:g} of the largest logit",
            fix="load the adapter next to its model with peft instead; nothing was written",
        )
    return merged


def _untied(inside: Any) -> dict[str, str]:
    """Give tables that share their weight one each, if a pair is at one of them; return which were tied, by name.

    Otherwise what is added to one would be added to the other.
    """
    pairs: dict[str, str] = inside.get_expanded_tied_weights_keys(all_submodels=True)
    parts = {name.rpartition(".")[0] for pair in pairs.items() for name in pair}
    if not any(is_pefts(inside.get_submodule(part)) for part in parts):
        return {}
    shared = {id(weight) for weight in _plain_weights(inside, parts)}
    for module in inside.modules():
        for name, weight in module._parameters.items():
            if id(weight) in shared and not is_pefts(module):
                setattr(module, name, nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad))
    return pairs


def _tie_if_equal(merged: Any, tied: Mapping[str, str]) -> None:
    """Let the tables share one weight again if they are still equal, else say in the configuration that they do not."""
    equal = all(torch.equal(merged.get_parameter(one), merged.get_parameter(other)) for one, other in tied.items())
    for part in merged.modules():
        if hasattr(getattr(part, "config", None), "tie_word_embeddings"):
            part.config.tie_word_embeddings = equal
    merged.tie_weights()
    if not equal:
        logger.info(
            "tables that were tied differ now, and each is saved: %s", ", ".join(sorted({*tied, *tied.values()}))
        )


def _plain_weights(inside: Any, parts: set[str]) -> Iterator[nn.Parameter]:
    """Yield the model's own weights in these modules, under peft's layers too."""
    for part in parts:
        for module in inside.get_submodule(part).modules():
            if not is_pefts(module) and not isinstance(module, nn.ParameterDict | nn.ModuleDict):
                yield from module.parameters(recurse=False)


def _rows(model: Any, head: heads.Head, tokenizer: Any, settings: Mapping[str, Any]) -> list[Tensor]:
    """Return token ids (1, T) to compare models on: any for a decoder, pairs of texts for an encoder."""
    seed = torch.Generator().manual_seed(0)
    n_known = min(len(tokenizer), model.get_input_embeddings().weight.shape[0])
    length = min(_ROW_TOKENS, max_positions(model) or _ROW_TOKENS)
    ids = torch.randint(n_known, (_N_ROWS, length), generator=seed)
    named = settings.get("trainable_token_indices") or []
    learnt = named if isinstance(named, list) else [one for some in named.values() for one in some]
    if learnt:
        ids[:, ::2] = torch.tensor(learnt).repeat(length)[: ids[:, ::2].numel()].reshape(_N_ROWS, -1)
    if head.causal:
        return list(ids.split(1))
    texts = [tokenizer.decode(row[: length // 3], skip_special_tokens=True) for row in ids]
    asked = [tokenizer(text, text, truncation=True, max_length=length, return_tensors="pt") for text in texts]
    return [row["input_ids"] for row in asked]


def _logits(model: Any, rows: list[Tensor], folder: Path) -> list[Tensor]:
    """Return the model's logits for each row; raises ConfigError if it has none that are finite."""
    model.eval()
    try:
        with torch.no_grad():
            done = [model(input_ids=row, attention_mask=torch.ones_like(row)) for row in rows]
    except Exception as error:
        raise memory.lack(error) or ConfigError(
            what="the model with the adapter cannot be run",
            got=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
            why="the merged model is compared with it before anything is written",
            fix=_WITH_PEFT,
        ) from error
    found = [value for one in done for name, value in one.items() if name.endswith("logits")]
    if not all(bool(torch.isfinite(value).all()) for value in found):
        settings = read_object(folder / _ADAPTER)
        raise ConfigError(
            what="the model with the adapter computes logits that are not finite",
            got=f"{folder}: lora_alpha {settings.get('lora_alpha')}, r {settings.get('r')}",
            why="the weights of the model and of its adapter are finite, but their products are not",
            fix="name another checkpoint of the run, or correct lora_alpha in " + _ADAPTER,
        )
    return found


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
