"""Saves and loads the weights of a model and the files of its tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_model
from torch import Tensor, nn

from whet.errors import ConfigError
from whet.kernels import shared_memory
from whet.models import adapters
from whet.models.adapters import unwrapped
from whet.models.experts.settings import mark_saved
from whet.models.loading.quiet import quiet
from whet.paths import utf8_name

WEIGHTS = "model.safetensors"
_CARD = "README.md"
FILES = (WEIGHTS, f"{WEIGHTS}.index.json", "optimizer.safetensors", "average.safetensors", "config.json")
"""Names of the files of a checkpoint that hold tensors, or the model's settings."""


def save_weights(model: nn.Module, folder: Path, tensors: Mapping[str, Tensor] | None = None) -> None:
    """Write the model: a model of transformers with its configuration, any other module as weights alone.

    Of a model with adapters these are written, with its configuration: it has the labels. The card that peft writes of
    them is not kept: it names a local base by its path, which the hub refuses. `tensors` are written instead of the
    model's own state.
    """
    state = dict(model.state_dict() if tensors is None else tensors)
    if "DTensor" in {type(one).__name__ for one in state.values()}:
        raise ConfigError(
            what="the model cannot be saved here",
            got="a rank that has its share of the weights",
            why="with zero_stage 2 and 3 the ranks share the weights while they train",
            fix="set control.should_save in the callback, which writes a checkpoint; or save after train()",
        )
    with utf8_name(folder) as named:
        if hasattr(model, "save_pretrained"):
            saves_adapters = bool(adapters.names_of(model))
            if not saves_adapters:
                tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", {})
                state = _apart(state, lambda names: [name for name in names if name in {*tied, *tied.values()}])
            cards = {*named.rglob(_CARD)}
            with quiet():
                model.save_pretrained(named, state_dict=state, **adapters.save_options(model))  # pyright: ignore[reportCallIssue]
            for card in {*named.rglob(_CARD)} - cards:
                card.unlink()
            config = getattr(unwrapped(model), "config", None)
            if saves_adapters and hasattr(config, "to_json_string"):
                digest = adapters.digest_kept(model)
                settings = json.loads(config.to_json_string()) | ({} if digest is None else {adapters.DIGEST: digest})  # pyright: ignore
                (named / "config.json").write_text(json.dumps(settings, indent=2) + "\n", "utf-8")
            mark_saved(named, config)
        else:
            save_module(state, named / WEIGHTS)


def save_module(state: Mapping[str, Tensor], file: Path) -> None:
    """Write the weights of a plain module; those of one tensor under several names are written once."""

    def once(names: Sequence[str]) -> Sequence[str]:
        first = state[names[0]]
        same = len({shared_memory.layout_of(state[name]) for name in names}) == 1
        return names if same and first.untyped_storage().nbytes() == first.nbytes else []

    apart = _apart(state, once)
    parts = [name for name, one in apart.items() if one.untyped_storage().nbytes() > one.nbytes]  # refused as well
    save_model(_State(apart | {name: _copy(apart[name]) for name in parts}), str(file))  # pyright: ignore[reportArgumentType]


def _apart(state: Mapping[str, Tensor], once: Callable[[Sequence[str]], Sequence[str]]) -> dict[str, Tensor]:
    """Return the tensors; where several share memory, all but the first and those of `once` as copies.

    `once` returns the names that the library writes once by itself. Any other sharing it would refuse.
    """
    names, found = list(state), dict(state)
    for group in shared_memory.overlapping(list(state.values())):
        members = [names[number] for number in group]
        kept = once(members) or members[:1]
        found |= {name: _copy(state[name]) for name in members if name not in kept}
    return found


def _copy(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


class _State:
    """A module as far as `save_model` of safetensors reads it."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def state_dict(self) -> dict[str, Tensor]:
        return self._tensors


def save_processing(processing: Any, folder: Path, taken: Iterable[str] = ()) -> None:
    """Write the files of a tokenizer or processor, if there is one; sub-folders are allowed.

    Raises ConfigError if it has no files, or writes links or names that are `taken`; OSError if writing fails.
    """
    if processing is None:
        return
    if not hasattr(processing, "save_pretrained"):
        raise _no_files(processing, "it has no save_pretrained", "a checkpoint holds the tokenizer's files")
    before = set(folder.rglob("*"))
    try:
        with utf8_name(folder) as named:
            processing.save_pretrained(named)
    except Exception as error:
        # the library tokenizers raises a plain Exception if the disk is full
        if type(error) is not Exception:
            raise
        raise OSError(str(error)) from error
    for path in {*folder.rglob("*")} - before:
        if path.parent == folder and path.name in taken:
            raise _no_files(processing, path.name, "a file of whet's has this name, and one would replace the other")
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise _no_files(processing, path.name, "it is a link or a special file, and leads out of the folder")


def _no_files(processing: Any, got: str, why: str) -> ConfigError:
    return ConfigError(
        what=f"the files of {type(processing).__name__} cannot be saved",
        got=got,
        why=why,
        fix="change what its save_pretrained writes, or leave processing_class out and save it yourself",
    )


def load_weights(model: nn.Module, folder: Path) -> None:
    """Load the weights of the folder into the model by name; only the adapters if the model is one of peft."""
    if adapters.names_of(model):
        adapters.load(model, folder)
        return
    index = folder / f"{WEIGHTS}.index.json"
    files = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values())) if index.exists() else [WEIGHTS]
    with utf8_name(folder) as named:
        load_module(model, [named / Path(file).name for file in files])


def load_module(model: nn.Module, files: Sequence[Path], *, strict: bool = True) -> None:
    """Load the weights by name; a name may be missing if its memory is that of another one, as of a tied weight.

    Without `strict` any name may be missing, or have no place.
    """
    for file in files:
        _require_floats(model, file)
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    own = model.state_dict()
    loaded = [own[name] for name in tensors if name in own]
    lost = [name for name in missing if not any(shared_memory.holds(one, own[name]) for one in loaded)]
    if strict and (lost or unexpected):
        raise RuntimeError(f"weights that are missing: {lost[:3]}, weights that have no place: {unexpected[:3]}")


def _require_floats(model: nn.Module, file: Path) -> None:
    """Refuse integers for weights: torch would convert them silently."""
    with safe_open(file, framework="pt") as tensors:
        kinds = {name: tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118 (no dict)
    for name, own in model.state_dict().items():
        kind = kinds.get(name)
        if kind is not None and own.is_floating_point() and not kind.startswith(("F", "BF")):
            raise ValueError(f"{name} is stored as {kind}, and weights are floating-point numbers")


def count_without_embeddings(model: nn.Module) -> int:
    """Return the number of parameters that take part in matrix products: all but embedding tables."""
    tables = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    parameters = [parameter for name, parameter in model.named_parameters() if name not in tables]
    return sum(parameter.numel() for parameter in parameters) + _more_in_codes(model)


def count_weights(model: nn.Module, *, trained: bool = False) -> int:
    """Return the number of the model's weights, or of those that are trained."""
    if trained:
        return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return sum(parameter.numel() for parameter in model.parameters()) + _more_in_codes(model)


def _more_in_codes(model: nn.Module) -> int:
    """Return how many more weights there are than numbers in parameters: a code of 4 bits is half of one."""
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "n_weights_in_codes")]
    return sum(layer.n_weights_in_codes - layer.codes.numel() for layer in layers)


def device_of(use_cpu: bool) -> torch.device:
    """Return the device to train on: the first GPU unless the CPU was asked for or there is none."""
    return torch.device("cuda" if torch.cuda.is_available() and not use_cpu else "cpu")
