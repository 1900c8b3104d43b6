"""The trained model of `whet predict`, `whet ask` and `whet generate`: complete, or an adapter next to its model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from whet.errors import ConfigError
from whet.jobs.lora import merge
from whet.models.loading.folder_check import ADAPTER
from whet.models.loading.heads import Head, head_named
from whet.models.loading.hub import missing_folder
from whet.models.loading.load import ModelSource, load_config, load_model, load_tokenizer
from whet.models.loading.missing_check import in_short, new_weights

BASE_FLAG = "--base_model_name_or_path"


def load_trained(name: str, head: Head, base: str | None) -> tuple[Any, Any]:
    """Return the trained model with this head, and its tokenizer.

    An adapter stays next to the weights of its model: `base`, or else the one that it names, if its weights are those
    of the training.
    """
    if not is_adapter(name):
        if base is not None:
            raise _no_adapter(name, base)
        source = ModelSource(model=name, flag="--model")
        tokenizer = load_tokenizer(source)
        return load_model(source, head, trained=True), tokenizer
    folder = Path(name)
    settings = merge.settings_of(folder)
    if (found := merge.head_of(settings, folder)) is not head:
        raise ConfigError(
            what=f"the adapter has not learnt to {head.learns}",
            got=f"{folder}: task_type {settings.get('task_type')}",
            why=f"it was trained for {found.task}",
            fix=f"name an adapter that {head.command} has trained",
        )
    source = _source(base, settings, folder)
    tokenizer = load_tokenizer(merge.tokenizer_source(source, folder), resize=None)
    model = merge.base_model(source, head, folder)
    new = new_weights(model)
    merge.require_rows(model, tokenizer, folder)
    wrapped = merge.with_adapter(model, settings, folder)
    if lost := sorted(set(new) - merge.names_in(folder)):
        raise ConfigError(
            what=f"the model with its adapter has not learnt to {head.learns}",
            got=f"{folder} on {source.model}",
            why=f"neither holds weights for {in_short(lost)}",
            fix=f"name the model that it was trained on in {BASE_FLAG}, or train the adapter with its head in "
            "modules_to_save",
        )
    return wrapped.eval(), tokenizer


def is_adapter(name: str) -> bool:
    """Return whether this is the folder of an adapter."""
    return (Path(name) / ADAPTER).is_file()


def head_of(name: str) -> tuple[Head | None, str]:
    """Return the head of the model or of the adapter's model, None if it is unknown; and what names it there."""
    if is_adapter(name):
        settings = merge.settings_of(Path(name))
        return merge.head_of(settings, Path(name)), f"task_type {settings['task_type']}"
    architectures = load_config(ModelSource(model=name, flag="--model")).architectures
    return head_named(architectures), f"architectures {architectures}"


def _source(base: str | None, settings: dict[str, Any], folder: Path) -> ModelSource:
    """Return where the adapter's model is; raises ConfigError if the place that was recorded is empty."""
    recorded = settings.get("base_model_name_or_path")
    name = base or str(recorded or "")
    if base is None and (not name or missing_folder(name, BASE_FLAG)):
        raise ConfigError(
            what="the model of the adapter is not where it was" if name else "the adapter names no model",
            got=f"{folder}: {name or 'no base_model_name_or_path'}",
            why="an adapter holds what is added to the weights of a model, and not these weights",
            fix=f"name the model that it was trained on: {BASE_FLAG} FOLDER",
        )
    return ModelSource(model=name, revision=merge.revision_of(settings, name), flag=BASE_FLAG)


def _no_adapter(name: str, base: str) -> ConfigError:
    return ConfigError(
        what="base_model_name_or_path would change nothing",
        got=base,
        why=f"{name} is no adapter: it holds all of its weights",
        fix=f"leave {BASE_FLAG} out, or name the folder of an adapter",
    )
