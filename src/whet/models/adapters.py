"""Models with adapters of peft: whet changes and runs the model inside, and the adapters are what is saved of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from whet import optional
from whet.errors import ConfigError
from whet.models import record
from whet.models.forwards import Replaced
from whet.models.standard import has_hooks


def unwrapped(model: nn.Module) -> Any:
    """Return the model of transformers inside one of peft; any other as it is."""
    if isinstance(model, _peft_class("PeftModel")):
        return model.get_base_model()  # pyright: ignore
    return model.model if isinstance(model, _peft_class("BaseTuner")) else model


def adds_tokens(model: nn.Module) -> bool:
    """Return whether the model puts learnt tokens before each row, as prompt tuning and its like do."""
    return isinstance(model, _peft_class("PeftModel")) and bool(model.active_peft_config.is_prompt_learning)  # pyright: ignore


def why_not_inside(model: nn.Module) -> str | None:
    """Return why this model has to be called, and not the one inside of it; None if what is around hands calls on.

    Of peft's wrappers most do. Those of AdaLoRA, X-LoRA and Poly have forwards of their own, which add to the loss or
    run the model twice, and activated LoRA looks for its tokens in each call.
    """
    base = unwrapped(model)
    outer = [model, model.base_model] if isinstance(model, _peft_class("PeftModel")) else [model]
    for one in outer:
        name = type(one).__name__
        if one is not base and has_hooks(one):
            return f"hooks on its {name} see its calls"
        if one is not base and not _hands_on(one):
            return f"its {name} may do more than call the model inside"
    configs: Any = getattr(model, "peft_config", {}) if model is not base else {}
    if any(getattr(config, "alora_invocation_tokens", None) for config in configs.values()):
        return "its adapter begins at tokens that it looks for in each call (alora_invocation_tokens)"
    return None


def _hands_on(wrapper: nn.Module) -> bool:
    """Return whether the wrapper runs a forward of peft's that calls the model inside, and does no more."""
    cls = type(wrapper)
    known = is_pefts(wrapper) and cls.forward.__module__ in _HANDING_ON and cls.__call__ is nn.Module.__call__
    return known and "forward" not in wrapper.__dict__


def passed_on(model: nn.Module, names: frozenset[str]) -> frozenset[str]:
    """Return which of these columns of tokens a wrapped model hands on to the model inside.

    Some of peft's wrappers keep `token_type_ids` to themselves: a run without padding must not know more than one with.
    """
    base = unwrapped(model)
    if base is model:
        return names
    replaced = Replaced()
    replaced.put(base, _stop)
    try:
        model.forward(**{name: torch.zeros(1, 1, dtype=torch.int64) for name in names})
    except _Reached as reached:
        return names & reached.names
    finally:
        replaced.undo()
    return names


_HANDING_ON = ("peft.peft_model", "peft.tuners.tuners_utils")
"""Where peft has the forwards that hand a call on; tuners that do more have forwards in files of their own."""


class _Reached(Exception):  # noqa: N818
    """Carries the names of the arguments that came through."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__()
        self.names = names


def _stop(*_: Any, **given: Any) -> None:
    raise _Reached(frozenset(name for name, value in given.items() if value is not None))


def is_pefts(module: nn.Module) -> bool:
    """Return whether the module is one of peft's own classes: an adapter, or what goes around one."""
    return type(module).__module__.startswith("peft.")


def _peft_class(name: str) -> tuple[type, ...]:
    """Return the class of peft with this name, for isinstance; nothing if peft is not in use."""
    peft, tuners = sys.modules.get("peft"), sys.modules.get("peft.tuners.tuners_utils")
    found = getattr(peft, name, None) or getattr(tuners, name, None)
    return () if found is None else (found,)


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


_PASSING = {
    "peft_version", "base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "task_type",
    "init_lora_weights",
}  # fmt: skip
"""Settings of an adapter that do not change what its weights compute: where it is from, how it begins."""


def settings_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the settings of the model's adapters that change its loss, by the name of the adapter."""
    configs: Any = model.peft_config if (names := names_of(model)) else {}
    return {
        name: {
            key: sorted(value) if isinstance(value, set | frozenset) else value
            for key, value in configs[name].to_dict().items()
            if key not in _PASSING
        }
        for name in names
    }


def files_of(model: nn.Module) -> list[dict[str, Tensor]]:
    """Return the tensors of each file of weights that a save writes: of each adapter, or of the model without any."""
    names, options = names_of(model), save_options(model)
    found = [_peft().get_peft_model_state_dict(model, adapter_name=name, **options) for name in names]
    return found if names else [dict(model.state_dict())]


def _in_files(model: nn.Module) -> set[int]:
    """Return where in memory the tensors begin that a save writes."""
    return {tensor.data_ptr() for file in files_of(model) for tensor in file.values()}


def read_by_save(model: nn.Module) -> dict[str, Tensor]:
    """Return the part of the model's state that a save reads: all of it, or with adapters these and what is trained."""
    state = dict(model.state_dict())
    if not names_of(model):
        return state
    trained = {name for name, one in model.named_parameters(remove_duplicate=False) if one.requires_grad}
    saved = _in_files(model)
    return {name: one for name, one in state.items() if name in trained or one.data_ptr() in saved}


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
    if not names_of(model):
        return
    saved = _in_files(model)
    lost = [name for name, one in model.named_parameters() if one.requires_grad and one.data_ptr() not in saved]
    if lost:
        raise ConfigError(
            what="some weights would be trained and then lost",
            got=f"{', '.join(lost[:3])}{f' and {len(lost) - 3} more' if len(lost) > 3 else ''}",
            why="of a model with adapters peft saves the adapters and the modules_to_save, nothing else",
            fix="name these modules in modules_to_save of the LoraConfig, or freeze them (requires_grad_(False))",
        )


def require_another_folder(base: str | None, folder: str | Path, *, what: str, fix: str) -> None:
    """Refuse an output folder that holds the base itself: saving the adapter there would remove its weights."""
    if base and Path(folder).resolve() == Path(base).resolve():
        raise ConfigError(
            what=f"{what} would replace the model that it needs",
            got=f"the model and the output folder are both {folder}",
            why="the adapter takes the place of the weights in its output folder, and is nothing without them",
            fix=fix,
        )


def bases_of(model: nn.Module) -> set[str | None]:
    """Return the names or folders of the models that the model's adapters were put on; nothing if it has none."""
    configs: Any = model.peft_config if (names := names_of(model)) else {}
    loaded = getattr(getattr(unwrapped(model), "config", None), "name_or_path", None)
    return {loaded, *(configs[name].base_model_name_or_path for name in names)} if names else set()


def _peft() -> Any:
    return optional.require("peft", needed_for="a model with its adapters", install="peft")
