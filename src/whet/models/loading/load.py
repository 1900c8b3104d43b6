"""Load a model with a head, and its tokenizer: safetensors and JSON only, no code from the folder, ever.

Every folder is checked before transformers sees it (`folder_check`, `tensor_check`), and transformers
gets the settings that were checked; it does not read config.json again.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from whet import console
from whet.errors import ConfigError, WhetError
from whet.hardware import memory
from whet.kernels.operator import is_rehearsed
from whet.log import logger
from whet.models import finite, known
from whet.models.experts import settings as expert_settings
from whet.models.loading.folder_check import CONFIG, bad_model, check_folder, check_tokenizer_config, checked_config
from whet.models.loading.heads import QUESTION_ANSWERING, Head
from whet.models.loading.hub import hub_problem, local_folder, missing_folder
from whet.models.loading.missing_check import in_short, is_part, keep_new, new_parts, require_complete
from whet.models.loading.tensor_check import check_weights
from whet.models.loading.tokenizer_check import check_special_ids, check_tokenizer_file, is_panic
from whet.models.packable import family_of
from whet.paths import utf8_name

_MOST_NAMED = 4
"""Labels that a log line names."""


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Where a model comes from: a folder, or a name on the hub."""

    model: str
    config: str | None = None
    tokenizer: str | None = None
    cache_dir: str | None = None
    revision: str = "main"
    token: str | None = field(default=None, repr=False)
    flag: str = "--model_name_or_path"
    """What names the model on the command line."""
    beside_adapter: bool = False
    """Whether the tokenizer's folder may hold an adapter, of which nothing is read."""

    def folder(self, part: str) -> Path:
        """Return the checked folder of `model`, `config` or `tokenizer`; a name on the hub is downloaded first."""
        name, flag = self.name(part), self.flag_of(part)
        if problem := missing_folder(name, flag) or hub_problem(name, flag, "model", self.cache_dir):
            raise ConfigError.of([problem])
        folder = local_folder(self.name(part), part, cache_dir=self.cache_dir, revision=self.revision, token=self.token)
        reads_none = self.beside_adapter and part == "tokenizer"
        check_folder(folder, adapter=reads_none, hub_name=None if Path(name).is_dir() else name)
        return folder

    def name(self, part: str) -> str:
        """Return what was named for this part."""
        return {"config": self.config, "tokenizer": self.tokenizer}.get(part) or self.model

    def flag_of(self, part: str) -> str:
        """Return the flag that named this part."""
        return f"--{part}_name" if {"config": self.config, "tokenizer": self.tokenizer}.get(part) else self.flag


def load_tokenizer(source: ModelSource, *, resize: bool | None = False) -> Any:
    """Return the tokenizer; raises ConfigError if it cannot be loaded or has tokens that the model does not.

    `resize`: whether the model gets rows for such tokens (`add_rows`); None: for those that were added to a tokenizer.
    """
    from transformers import AutoTokenizer

    name = source.name("tokenizer")
    try:
        folder = source.folder("tokenizer")
        check_tokenizer_config(folder)
        check_tokenizer_file(folder)
        own = _config(folder, name) if (folder / CONFIG).exists() else None
        with utf8_name(folder) as named:
            tokenizer = AutoTokenizer.from_pretrained(named, config=own, local_files_only=True, trust_remote_code=False)
        if tokenizer.is_fast:  # others are refused where they would be used
            _require_words(tokenizer, name, source.flag_of("tokenizer"))
            _check_ids(tokenizer, source, own, resize)
        tokenizer.name_or_path = name  # not where a download happens to lie
    except BaseException as error:
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        raise not_loaded("tokenizer", name, error, source.flag_of("tokenizer")) from error
    return tokenizer


@dataclass(frozen=True, kw_only=True)
class Labels:
    """The labels that a head gives scores for; they go into the model's configuration."""

    names: Sequence[str]
    problem_type: str | None = None
    may_replace: bool = False
    """Whether a head that was trained with another number of labels is replaced by a new one."""


def load_qa_model(source: ModelSource, *, trained: bool = False) -> Any:
    """Return the model with a question answering head; see `load_model`."""
    return load_model(source, QUESTION_ANSWERING, trained=trained)


def load_model(
    source: ModelSource, head: Head, *, trained: bool = False, labels: Labels | None = None, adapted: Any = None
) -> Any:
    """Return the model with this head, weights in float32 (the master copy of any precision).

    Raises ConfigError if it cannot be loaded, if other weights than those of a new head are not in its files, or if
    it has to be `trained` already and these are not there either. `adapted`: an adapter comes next, with its own head,
    and this is the configuration that it was trained with.
    """
    name = source.name("config")
    config = load_config(source) if adapted is None else adapted
    try:
        _require_head(config, head, name, source.flag_of("config"))
    except Exception as error:
        raise not_loaded("model configuration", name, error, source.flag_of("config")) from error
    earlier = dict(config.id2label or {})
    if labels is not None:
        _set_labels(config, labels)
    try:
        model, new = _from_folder(source, head, config, labels)
    except Exception as error:
        raise not_loaded("model", source.model, error, source.flag) from error
    if trained and new:
        raise ConfigError(
            what=f"the model has not learnt to {head.learns}",
            got=source.model,
            why=f"its folder holds no weights for {in_short(new)}",
            fix=f"train it first: {head.command} --model_name_or_path {shlex.quote(source.model)} --train_file FILE "
            "--do_train --output_dir out, then name the folder out",
        )
    if not is_rehearsed():
        _require_finite(model, source)
    _say_what_is_new(model, new if adapted is None else [])
    if labels is not None and not new:
        _say_what_was_learnt(earlier, labels)
    return model


def model_folder(source: ModelSource) -> Path:
    """Return the checked folder of the model, which is downloaded if the hub has it; ConfigError if it cannot be."""
    try:
        return source.folder("model")
    except Exception as error:
        raise not_loaded("model", source.model, error, source.flag) from error


def load_config(source: ModelSource) -> Any:
    """Return the model's configuration, checked; raises ConfigError if it cannot be read."""
    name = source.name("config")
    try:
        return _config(source.folder("config"), name)
    except Exception as error:
        raise not_loaded("model configuration", name, error, source.flag_of("config")) from error


def _from_folder(source: ModelSource, head: Head, config: Any, labels: Labels | None) -> tuple[Any, list[str]]:
    """Return the model and the names of its new weights."""
    import torch
    import transformers

    from whet.models.loading.quiet import Undrawn, quiet

    folder = source.folder("model")
    tensors = check_weights(folder, config.to_dict())
    if is_rehearsed():
        return _without_values(source, head, config, tensors)
    with quiet(), Undrawn(), utf8_name(folder) as named:
        model, report = _class_of(getattr(transformers, head.auto), config).from_pretrained(
            named,
            config=config,
            use_safetensors=True,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # what differs is in the report
            local_files_only=True,
            trust_remote_code=False,
        )
    model.config.name_or_path = model.name_or_path = source.model  # not where a download happens to lie
    _finish_experts(model, report["missing_keys"], str(folder))
    _require_fitting(model, source, head, labels, report["mismatched_keys"])
    _name_ties_as_loaded(model)
    return model, require_complete(model, report, tensors, head, folder, source.flag)


def _without_values(source: ModelSource, head: Head, config: Any, tensors: Collection[str]) -> tuple[Any, list[str]]:
    """Return the model that would be loaded from files with these tensors, in a rehearsal: nothing is read of them."""
    import torch
    import transformers

    from whet.models.loading.quiet import quiet

    cls = _class_of(getattr(transformers, head.auto), config)
    with quiet():
        build = cls.from_config if hasattr(cls, "from_config") else cls._from_config
        model = build(config, dtype=torch.float32)
    model.config.name_or_path = model.name_or_path = source.model
    _finish_experts(model, [], source.model)
    return model, keep_new(model, [] if head.causal else [name for name in model.state_dict() if name not in tensors])


def _name_ties_as_loaded(model: Any) -> None:
    """Say in the configuration that the output has a table of its own, if the files hold one: it is saved so."""
    read, written = model.get_input_embeddings(), model.get_output_embeddings()
    config = model.config.get_text_config(decoder=True)
    tied = getattr(config, "tie_word_embeddings", False) and getattr(written, "weight", None) is not None
    if tied and read is not None and written.weight is not read.weight:
        model.config.tie_word_embeddings = config.tie_word_embeddings = False
        logger.warning(
            "tie_word_embeddings is true in config.json, but the model's files hold a table of the output's own: "
            "the two are trained and saved apart, with tie_word_embeddings: false"
        )


def _class_of(auto: Any, config: Any) -> Any:
    """Return what loads a model of this configuration: transformers' own choice, or the class with experts."""
    if expert_settings.settings_of(config) is None:
        return auto
    return _with_experts(auto._model_mapping[type(config)], config)


_DENSE = "whet_dense_class"


def _with_experts(cls: type, config: Any) -> type:
    """Return the class of transformers, whose models are built with the experts of this configuration."""
    from whet.models.experts.upcycle import replace_parts

    settings = expert_settings.parsed(getattr(config, expert_settings.KEY))
    assert settings is not None

    def begin(self: Any, config: Any, *args: Any, **options: Any) -> None:
        cls.__init__(self, config, *args, **options)
        replace_parts(self, settings, copied=False)

    return type(cls.__name__, (cls,), {"__init__": begin, "__module__": cls.__module__, _DENSE: cls})


def _finish_experts(model: Any, missing: Iterable[str], folder: str) -> None:
    """Give a model that has been loaded with its experts its own class again, and refuse one without their weights."""
    if expert_settings.settings_of(model.config) is None:
        return
    from whet.models.experts.layer import layers_of

    model.__class__ = getattr(type(model), _DENSE)
    layers = tuple(f"{name}." for name, _ in layers_of(model))
    lost = sorted(name for name in missing if name.startswith(layers))
    if lost:
        raise bad_model(
            f"{folder} lacks weights of its experts",
            got=", ".join(lost[:3]),
            why="config.json says that the model has experts, and new ones would know nothing",
            fix="copy the folder again from where it comes",
        )


def _set_labels(config: Any, labels: Labels) -> None:
    config.id2label = dict(enumerate(labels.names))
    config.label2id = {name: n for n, name in enumerate(labels.names)}
    if labels.problem_type is not None:
        config.problem_type = labels.problem_type


def _say_what_was_learnt(earlier: Mapping[int, str], labels: Labels) -> None:
    """Log that a trained head is kept for other labels than its own, if it has names for them."""
    names = list(earlier.values())
    unnamed = names == [f"LABEL_{n}" for n in range(len(names))]
    if not unnamed and names != list(labels.names) and labels.names:
        logger.warning(
            "the model's head was trained for other labels (%s) and is kept for %s; for a new one, name a model "
            "without a trained head",
            _in_short(names), _in_short(labels.names),
        )  # fmt: skip


def _in_short(names: Sequence[str]) -> str:
    return ", ".join(map(str, names[:_MOST_NAMED])) + (", ..." if len(names) > _MOST_NAMED else "")


def _require_fitting(
    model: Any, source: ModelSource, head: Head, labels: Labels | None, found: Collection[tuple[str, Any, Any]]
) -> None:
    """Refuse weights of other sizes than the model's; those of a head for other labels can be replaced."""
    heads = () if head.causal else tuple(new_parts(model))
    inside = [one for one in found if not is_part(one[0], heads)]
    if inside:
        raise _mismatch(source, None, inside)
    if found and not (labels is not None and labels.may_replace):
        raise _mismatch(source, labels, found)


def _mismatch(source: ModelSource, labels: Labels | None, found: Collection[tuple[str, Any, Any]]) -> ConfigError:
    sizes = [f"{name}: {tuple(saved)} in the file, {tuple(wanted)} wanted" for name, saved, wanted in sorted(found)]
    fix = "to begin with a new head: --ignore_mismatched_sizes; or name a model without a trained head"
    if labels is None:
        fix = "copy config.json again from where the model comes, or name another model"
    return ConfigError(
        what="weights of the model do not fit its configuration" + ("" if labels is None else " and these labels"),
        got="; ".join(sizes[:_MOST_NAMED]) + (f" and {len(sizes) - _MOST_NAMED} more" * (len(sizes) > _MOST_NAMED)),
        why=f"{source.model} was trained with other sizes than these",
        fix=fix,
    )


def max_positions(model: Any) -> int | None:
    """Return how many tokens of one row the model has positions for, None if positions are not a table."""
    table = getattr(model.config, "max_position_embeddings", None)
    if table is not None and table <= 0:  # how XLNet says that it has no table
        return None
    family = family_of(model)
    return table if table is None or family is None else table - family.first_position(model)


def positions_of(config: Any) -> int | None:
    """Return the same for a model of this configuration that is not loaded."""
    table, family = getattr(config, "max_position_embeddings", None), known.known().get(config.model_type)
    if table is None or table <= 0:
        return None
    return table if family is None else table - family.first_position(SimpleNamespace(config=config))  # pyright: ignore


def config_under_adapter(source: ModelSource, folder: Path | None) -> Any:
    """Return the configuration that an adapter's model was trained with, for the weights as they were before.

    `folder` holds the configuration of the run, which may have been another one than that of the model's own folder;
    None: there is none. Rows for new tokens and experts came to the model after its weights had been loaded.
    """
    if folder is None:
        return load_config(source)
    try:
        found, place = _config(folder, source.model, of_adapter=True), source.folder("config")
        vars(found).pop(expert_settings.KEY, None)
        if not (place / CONFIG).exists():  # --config_name has named the only one
            return found
        own = _config(place, source.model)
    except Exception as error:
        raise not_loaded("model configuration", source.model, error, source.flag) from error
    text, before = (config.get_text_config(decoder=True) for config in (found, own))
    text.vocab_size = before.vocab_size
    if (getattr(text, "pad_token_id", None) or 0) >= text.vocab_size:
        text.pad_token_id = before.pad_token_id
    if (experts := expert_settings.settings_of(own)) is not None:
        expert_settings.keep(found, experts)
    return found


def _config(folder: Path, name: str, *, of_adapter: bool = False) -> Any:
    from transformers import CONFIG_MAPPING

    values = checked_config(folder, of_adapter=of_adapter)
    experts = expert_settings.parsed(values.pop(expert_settings.KEY, None))
    try:
        config = CONFIG_MAPPING[values.pop("model_type")].from_dict(values, name_or_path=name)
    except Exception as error:  # what transformers raises for a value of another type
        raise bad_model(
            f"{folder / CONFIG} is not valid",
            got=f"{type(error).__name__}: {' '.join(str(error).split())}"[:500],
            why="transformers builds the model from it",
            fix="correct this setting, or copy config.json again from where the model comes",
        ) from error
    if experts is not None:
        expert_settings.keep(config, experts)
    return config


def _require_head(config: Any, head: Head, name: str, flag: str) -> None:
    import transformers

    if type(config) in getattr(transformers, head.mapping):
        return
    raise ConfigError(
        what=f"the model cannot be loaded: {config.model_type} models have no head for {head.task}",
        got=f"{name}: model_type {config.model_type}",
        why=f"{head.gives}, and this architecture gives none",
        fix=f"name {'a decoder' if head.causal else 'an encoder'} in {flag}: one of model_type "
        f"{known.names(causal=head.causal)} trains without padding",
    )


def _require_words(tokenizer: Any, name: str, flag: str) -> None:
    """Refuse the empty tokenizer that transformers makes up where a folder holds none."""
    if tokenizer.get_vocab().keys() - set(tokenizer.all_special_tokens) - tokenizer.get_added_vocab().keys():
        return
    raise ConfigError(
        what="the tokenizer knows no words",
        got=f"{name}: {len(tokenizer)} tokens, all of them special",
        why="the folder holds no vocabulary, so every word of the data would be the same unknown token",
        fix=f"put the model's own tokenizer.json (or its vocab.txt) into the folder, or name one with it in {flag}"
        + ("" if flag == "--tokenizer_name" else "; commands that train also take another folder in --tokenizer_name"),
    )


def n_tokens(tokenizer: Any) -> int:
    """Return how many rows an embedding table for this tokenizer has at least."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def add_rows(model: Any, tokenizer: Any) -> list[int]:
    """Give the model's embedding tables rows for all tokens of the tokenizer; return the new ones.

    They are drawn around the mean of the others, as transformers does it (Hewitt 2021). Tied tables stay tied.
    """
    return resize_rows(model, n_tokens(tokenizer))


def resize_rows(model: Any, n_rows: int) -> list[int]:
    """Give the model's embedding tables this many rows, if they have fewer; return the new ones."""
    from whet.models.loading.quiet import quiet

    n_before = model.get_input_embeddings().weight.shape[0]
    if n_rows > n_before:
        with quiet():
            model.resize_token_embeddings(n_rows)
    return [*range(n_before, n_rows)]


def _check_ids(tokenizer: Any, source: ModelSource, own: Any, resize: bool | None) -> None:
    """Refuse a tokenizer that gives ids for which the model has no embedding, and gets none."""
    if source.tokenizer or source.config or own is None:
        folder = source.folder("config")
        own = _config(folder, source.model) if (folder / CONFIG).exists() else None
    n_known = getattr(own, "vocab_size", None)
    if n_known is None:
        return
    beyond = {number: token for token, number in tokenizer.get_vocab().items() if number >= n_known}
    are_added = beyond.keys() <= set(tokenizer.get_added_vocab().values())
    if beyond and not (are_added if resize is None else resize):
        trains = source.flag != "--model" and resize is not False
        raise ConfigError(
            what="the tokenizer has tokens that the model does not know",
            got=f"{beyond[max(beyond)]!r} is token {max(beyond):,}",
            why=f"the model has embeddings for {n_known:,} tokens (vocab_size), counted from 0",
            fix="name a model and a tokenizer that were trained together"
            + (": --model_name_or_path, --tokenizer_name" if source.flag != "--model" else ": another --model")
            + ("; or train rows for these tokens: --resize_token_embeddings true" if trains else ""),
        )
    check_special_ids(tokenizer, own, source.name("tokenizer"), grows=bool(beyond))


def _require_finite(model: Any, source: ModelSource) -> None:
    if found := finite.not_finite(model):
        raise ConfigError(
            what="the model's weights are not finite",
            got=f"{source.model}: {finite.shown(found)}",
            why="one NaN or infinity in the weights makes every answer and every gradient one",
            fix=f"name another model in {source.flag}: this one was saved after its training had failed",
        )


def _say_what_is_new(model: Any, missing: list[str]) -> None:
    """Log the model's size and the weights that no file holds."""
    n_weights = sum(parameter.numel() for parameter in model.parameters())
    new = f"; new, still to be learnt: {', '.join(missing)}" if missing else ""
    logger.info("%s, %s weights%s", type(model).__name__, console.count(n_weights), new)


def not_loaded(part: str, name: str, error: BaseException, flag: str) -> WhetError:
    """Return the error for a part of a model of which `error` kept the rest from being read; `flag` named it."""
    if isinstance(error, WhetError):
        return error
    if (lack := memory.lack(error)) is not None:
        return lack
    if os.path.isdir(name):  # noqa: PTH112 - Path.is_dir raises if this user may not look
        files = (
            "tokenizer_config.json and tokenizer.json"
            if part == "tokenizer"
            else "config.json, generation_config.json and the weights"
        )
        fix = f"check {files} in {name}, or name another folder in {flag}"
    else:
        fix = f"{flag} takes a folder with config.json and model.safetensors, or a name on the hub (needs a network)"
    why = f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]
    return ConfigError(what=f"the {part} cannot be loaded", got=name, why=why, fix=fix)
