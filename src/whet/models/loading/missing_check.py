"""Weights that are not in a model's files would be random: only those of a new head may be missing.

transformers fills in what it does not find, drops what it has no place for, and reports both. This module decides which
of it a run may begin with. Persistent buffers count as weights; transformers itself leaves out of its report what tied
tables share, and what a class declares as derived.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from whet.console import plural
from whet.errors import ConfigError
from whet.models import record
from whet.models.loading.heads import Head
from whet.models.loading.tensor_check import WEIGHTS, Tensor, layers_setting
from whet.models.view import ModelView

_RECORD = "new_weights"
_MOST_NAMED = 2
"""Names in a message: it shows 300 characters of them."""
_PEFT, _PAIR = "base_model.model.", ".lora_"
_WRAPPERS = {
    "_orig_mod.": "torch.compile",
    "module.": "DistributedDataParallel, DataParallel or DeepSpeed",
    "_fsdp_wrapped_module.": "FSDP",
    "_checkpoint_wrapped_module.": "checkpointing",
    "_forward_module.": "Lightning",
    "model.": "a LightningModule or a module of one's own",
    "auto_model.": "sentence-transformers",
}
"""What wrappers put before or between the names of weights."""


def require_complete(
    model: Any, report: Mapping[str, Any], tensors: Mapping[str, Tensor], head: Head, folder: Path, flag: str
) -> list[str]:
    """Return the names of new weights, those of the head; raises ConfigError if any other weight is not in the files.

    `report` is that of transformers, `tensors` what the files hold by name.
    """
    missing = {*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}
    parts = () if head.causal else tuple(new_parts(model))
    half = {name for name in missing if is_part(name, parts) and _siblings(model, name) - missing}
    lost = sorted(name for name in missing if not is_part(name, parts) or name in half)
    left = _read_by_nobody(model, report["unexpected_keys"], tensors, parts)
    if lost or left:
        unexpected = sorted(report["unexpected_keys"]) if lost else left
        raise _incomplete(model, lost, unexpected, folder, flag)
    return keep_new(model, missing)


def keep_new(model: nn.Module, missing: Iterable[str]) -> list[str]:
    """Return the names of the model's new weights, and keep them for `new_weights`: those that are in its new parts."""
    parts = tuple(new_parts(model))
    new = sorted(name for name in missing if is_part(name, parts))
    record.keep(model, _RECORD, new)
    return new


def new_weights(model: nn.Module) -> list[str]:
    """Return the names of the weights that the model's files did not hold: those of a new head and its pooler."""
    return record.read(model, _RECORD) or []


def new_parts(model: Any) -> Iterator[str]:
    """Yield the names of the modules that a task trains from the beginning: the head, and the pooler before it.

    Pretraining by masked words saves no pooler, so that a classifier begins with a new one.
    """
    view, base = ModelView(model), model.base_model
    heads = [name for name, _ in view.head()]
    yield from heads
    if base is model and not heads:  # the encoder stands in the model itself, as in T5ForQuestionAnswering
        trunk = _names_of_encoder(model)
        yield from (name for name, _ in model.named_children() if trunk and name not in trunk)
    before = "" if base is model else f"{model.base_model_prefix}."
    yield from (f"{before}{name}" for name, _ in base.named_children() if name == "pooler")


def _names_of_encoder(model: Any) -> set[str]:
    """Return the names of the parts of transformers' encoder of this configuration; empty if there is none."""
    import torch
    from transformers import AutoModel

    if type(model.config) not in AutoModel._model_mapping:  # pyright: ignore[reportPrivateUsage]
        return set()
    with torch.device("meta"):
        return {name for name, _ in AutoModel.from_config(model.config).named_children()}


def is_part(name: str, parts: Sequence[str]) -> bool:
    """Return whether the weight or module of this name is one of these modules, or in one."""
    return any(name == part or name.startswith(f"{part}.") for part in parts)


def _siblings(model: nn.Module, name: str) -> set[str]:
    """Return the names of all weights of the layer that holds this one."""
    owner = name.rpartition(".")[0]
    return {f"{owner}.{own}" if owner else own for own, _ in model.get_submodule(owner).named_parameters(recurse=False)}


def _read_by_nobody(
    model: Any, unexpected: Collection[str], tensors: Mapping[str, Tensor], parts: Sequence[str]
) -> list[str]:
    """Return weights of the files that belong to the model's blocks and layers, which has no place for them.

    Without them it would compute something else than the model that was saved: blocks above num_hidden_layers, biases
    of an architecture that model_type does not name, the norms in its attention, pairs of an adapter. Heads for other
    tasks, poolers that nobody reads, and constants are no such weights.
    """
    prefix = f"{model.base_model_prefix}." if model.base_model is not model else ""
    inner = model.base_model_prefix
    stacks = tuple({f"{name.rpartition('.')[0]}." for name, _ in ModelView(model).blocks()})
    layers = {name for name, module in model.named_modules() if name and not any(True for _ in module.children())}
    found = []
    for name in sorted(unexpected):
        known = tensors.get(name)
        if known is not None and not known.is_weight:
            continue
        ways = {name, f"{prefix}{name}", name.removeprefix(f"{inner}.")}
        in_block = any(way.startswith(stacks) for way in ways)
        in_layer = any((owner := way.rpartition(".")[0]) in layers and not is_part(owner, parts) for way in ways)
        if in_block or in_layer:
            found.append(name)
    return found


def _incomplete(model: Any, lost: list[str], unexpected: list[str], folder: Path, flag: str) -> ConfigError:
    total = len(model.state_dict())
    said = [f"missing {len(lost)} of {total}: {in_short(lost)}"] if lost else []
    said += [f"unexpected {len(unexpected)}: {in_short(unexpected)}"] if unexpected else []
    if lost:
        why = "weights that no file holds would be random numbers, and only those of a new head may be"
    else:
        why = f"{type(model).__name__} with this config.json has no place for them, and without them is another model"
    return ConfigError(
        what=f"weights of the model are not in {folder}" if lost else f"weights in {folder} would not be read",
        got="; ".join(said),
        why=why,
        fix=_fix(model, lost, unexpected, folder, flag),
    )


def _fix(model: Any, lost: list[str], unexpected: list[str], folder: Path, flag: str) -> str:
    if any(name.startswith(_PEFT) or _PAIR in name for name in unexpected):
        return "these are the weights of a model of peft: save its merge_and_unload() with save_pretrained"
    if (wrapper := _wrapper(model, lost, unexpected)) is not None:
        return _without(*wrapper, folder)
    if (n_blocks := _blocks_in_files(model, lost, unexpected)) is not None:
        setting = layers_setting(model.config)
        return f"set {setting} to {n_blocks} in {folder / 'config.json'}, or copy the model's files again: all of them"
    output = model.get_output_embeddings()
    names = {name for name, module in model.named_modules() if module is output}
    if lost and {name.rpartition(".")[0] for name in lost} <= names:
        return (
            f"name the complete language model in {flag}: this one was saved without its head; if it shares its "
            f'table of tokens, set "tie_word_embeddings": true in {folder / "config.json"}'
        )
    if odd := _files_outside(folder):
        return f"write {WEIGHTS}.index.json again, it does not name {', '.join(odd)}; or copy the model again"
    return (
        f"check model_type and sizes in {folder / 'config.json'}, copy the model again from where it comes, or name "
        f"another in {flag}"
    )


def _wrapper(model: Any, lost: Sequence[str], unexpected: Sequence[str]) -> tuple[str, str] | None:
    """Return what the names in the files have more than the model's, if that explains most of them.

    With it comes the method of str that takes it out: a wrapper of a part stands inside a name.
    """
    prefix = f"{model.base_model_prefix}."
    wanted = {way for name in lost for way in (name, name.removeprefix(prefix))}
    fits: Counter[tuple[str, str]] = Counter()
    for name in unexpected:
        tails = (place + 1 for place, letter in enumerate(name) if letter == ".")
        first = next((name[:tail] for tail in tails if name[tail:] in wanted), None)
        inside = [word for word in _WRAPPERS if name.replace(word, "") in wanted]
        leads = [word for word in inside if name.startswith(word)]
        if leads or (first and not inside):
            fits.update([(leads[0] if leads else str(first), "removeprefix")])
        else:
            fits.update((word, "replace") for word in inside)
    best, n_fits = next(iter(fits.most_common(1)), (None, 0))
    return best if n_fits * 2 > len(unexpected) else None


def _without(wrapper: str, method: str, folder: Path) -> str:
    """Return how the names are written without what a wrapper put there."""
    from transformers import CONFIG_MAPPING

    if (family := wrapper.rstrip(".")) in CONFIG_MAPPING:
        return f"the names begin with {wrapper!r}: set model_type to {family!r} in {folder / 'config.json'}"
    by = _WRAPPERS.get(wrapper)
    call = f"removeprefix({wrapper!r})" if method == "removeprefix" else f"replace({wrapper!r}, '')"
    files = [path.name for path in sorted(folder.glob("*.safetensors"))]
    each = "" if len(files) == 1 else f"for each of {len(files)} files, and in its index too: "
    file = str(folder / files[0])
    return (
        f"the names hold {wrapper!r}{f', which {by} adds' if by else ''}: save the model inside it with "
        f"save_pretrained, or rename its weights in Python: {each}from safetensors.torch import load_file, save_file; "
        f"save_file({{name.{call}: one for name, one in load_file({file!r}).items()}}, {file!r}, {{'format': 'pt'}})"
    )


def _blocks_in_files(model: Any, lost: Sequence[str], unexpected: Sequence[str]) -> int | None:
    """Return how many blocks the files hold, if complete blocks are all that differs; else None."""
    blocks = [name for name, _ in ModelView(model).blocks()]
    stacks = {name.rpartition(".")[0] for name in blocks}
    if len(stacks) != 1:
        return None
    stack = stacks.pop().removeprefix(f"{model.base_model_prefix}.")
    numbered = re.compile(rf"(?:.*\.)?{re.escape(stack)}\.(\d+)\.")
    matches = [numbered.match(name) for name in lost]
    if not all(matches):
        return None
    absent = Counter(int(match[1]) for match in matches if match)
    further = {int(match[1]) for name in unexpected if (match := numbered.match(name))}
    held = (set(range(len(blocks))) - set(absent)) | further
    complete = all(n == len(model.get_submodule(blocks[number]).state_dict()) for number, n in absent.items())
    return len(held) if complete and held == set(range(len(held))) != set(range(len(blocks))) else None


def _files_outside(folder: Path) -> list[str]:
    """Return the weight files of the folder that its index does not name."""
    index = folder / f"{WEIGHTS}.index.json"
    if (folder / WEIGHTS).exists() or not index.exists():
        return []
    text = index.read_text("utf-8")
    return [path.name for path in sorted(folder.glob("*.safetensors")) if path.name not in text]


def in_short(names: Sequence[str]) -> str:
    """Return the names as patterns, with `*` for the numbers of blocks, the first ones and the number of others."""
    counts = Counter(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names)
    only = {re.sub(r"(?<=\.)\d+(?=\.)", "*", name): name for name in reversed(names)}
    said = [f"{one} ({n} of them)" if n > 1 else only[one] for one, n in counts.items()]
    more = len(said) - _MOST_NAMED
    return ", ".join(said[:_MOST_NAMED]) + (f" and {plural(more, 'more kind')}" if more > 0 else "")
