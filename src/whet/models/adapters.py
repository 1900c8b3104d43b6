"""The adapters of peft in a model: they are what is saved of it, and what a resumed run reads again."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import nn

from whet import optional
from whet.errors import ConfigError
from whet.models import record
from whet.models.wrapped import unwrapped

_FILE = "adapter_model.safetensors"
_DEFAULT = "default"
DIGEST = "_whet_base_digest"
"""In config.json next to an adapter: the digest of the weights that it was trained on."""


def keep_digest(model: nn.Module, digest: str) -> None:
    """Keep the digest of the weights that an adapter is trained on; each save writes it next to the adapter."""
    record.keep(model, DIGEST, digest)


def save_options(model: nn.Module) -> dict[str, Any]:
    """Return what peft is called with to save the adapters of a command's run.

    Its tables are those of its model, with the rows of new tokens in the adapter: peft would save them completely.
    """
    return {} if digest_kept(model) is None else {"save_embedding_layers": False}


def digest_kept(model: nn.Module) -> str | None:
    """Return that digest; None if the adapter's run has kept none."""
    return record.read(unwrapped(model), DIGEST)


def names_of(model: nn.Module) -> list[str]:
    """Return the names of the model's adapters if saving it writes them alone; else nothing."""
    wrapped = "peft" in sys.modules and isinstance(model, sys.modules["peft"].PeftModel)
    if not (wrapped or getattr(model, "_hf_peft_config_loaded", False)):
        return []
    return list(model.peft_config if wrapped else model.active_adapters()[:1])  # pyright: ignore


def load(model: nn.Module, folder: Path) -> None:
    """Put the adapters that a save wrote to the folder into the model; ValueError if they are those of another."""
    wrapped = hasattr(model, "active_peft_config")
    for name in names_of(model):
        place = folder / name if wrapped and name != _DEFAULT else folder
        result = _peft().set_peft_model_state_dict(model, load_file(place / _FILE), adapter_name=name)
        if result.unexpected_keys:
            raise ValueError(f"the adapter {name} has no place for {', '.join(sorted(result.unexpected_keys)[:3])}")


def require_saved(model: nn.Module) -> None:
    """Raise ConfigError for weights that train and that a save of the adapters would leave out."""
    names = names_of(model)
    if not names:
        return
    states = [_peft().get_peft_model_state_dict(model, adapter_name=name, **save_options(model)) for name in names]
    saved = {tensor.data_ptr() for state in states for tensor in state.values()}
    lost = [name for name, one in model.named_parameters() if one.requires_grad and one.data_ptr() not in saved]
    if lost:
        raise ConfigError(
            what="some weights would be trained and then lost",
            got=f"{', '.join(lost[:3])}{f' and {len(lost) - 3} more' if len(lost) > 3 else ''}",
            why="of a model with adapters peft saves the adapters and the modules_to_save, nothing else",
            fix="name these modules in modules_to_save of the LoraConfig, or freeze them (requires_grad_(False))",
        )


def _peft() -> Any:
    return optional.require("peft", needed_for="a model with its adapters", install="peft")
