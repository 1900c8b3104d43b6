"""The state of a run on the disk: JSON for plain values, safetensors for tensors, and nothing that can run code.

Each part of a run returns its own state and restores it. `TrainingLoop._parts` lists the parts: one that is added there
is saved and restored with the others, without any other change. `state.json` holds the plain values of all parts,
`<part>.safetensors` the tensors of one part.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from whet.errors import ConfigError
from whet.paths import utf8_name
from whet.store.find import STATE
from whet.system import removes_open_files

State = dict[str, Any]
"""JSON values and tensors, by name."""
_ALIGNED_BYTES = 8
"""The header of a safetensors file ends at a multiple of it."""
_TENSOR = "$tensor"
"""The key of a reference: in JSON it replaces a tensor, and holds its name in the part's safetensors file."""


class Stateful(Protocol):
    """A part of a run that its checkpoints hold."""

    def state(self) -> State:
        """Return what a resumed run needs of this part."""
        ...

    def load_state(self, saved: State) -> None:
        """Restore what `state` returned; raises ValueError for values that no run writes."""
        ...


def load_states(parts: Mapping[str, Stateful], saved: Mapping[str, State]) -> None:
    """Give each part its saved state, in the order of `parts`; a part without one keeps the state it has."""
    for name, part in parts.items():
        if name in saved:
            if not isinstance(saved[name], dict):
                raise ValueError(f"the state of {name} is {str(saved[name])[:60]!r}, and not an object")
            part.load_state(saved[name])


# ---- references to tensors ----


def split(state: Mapping[str, Any]) -> tuple[State, dict[str, Tensor]]:
    """Return the state with references instead of tensors, and the tensors by their dotted paths in it."""
    tensors: dict[str, Tensor] = {}
    return _plain(state, "", tensors), tensors


def _plain(state: Mapping[str, Any], path: str, tensors: dict[str, Tensor]) -> State:
    plain: State = {}
    for name, value in state.items():
        place = f"{path}{name}"
        if isinstance(value, Tensor):
            tensors[place] = value
            plain[name] = {_TENSOR: place}
        else:
            plain[name] = _plain(value, f"{place}.", tensors) if isinstance(value, Mapping) else value
    return plain


def join(plain: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the state that `split` separated; raises ValueError if references and tensors do not match one to one."""
    named = list(_references(plain))
    if sorted(named) != sorted(tensors):
        odd = sorted({*named} ^ {*tensors}) or sorted(named)
        raise ValueError(f"the stored tensors are not those that the state refers to: {odd[0][:100]}")
    return _with_tensors(plain, tensors)


def _references(plain: Any) -> Iterator[str]:
    if isinstance(plain, dict):
        if _is_reference(plain):
            yield plain[_TENSOR]
            return
        for value in plain.values():
            yield from _references(value)


def _with_tensors(plain: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(plain, dict):
        return plain
    if _is_reference(plain):
        return tensors[plain[_TENSOR]]
    return {name: _with_tensors(value, tensors) for name, value in plain.items()}


def _is_reference(plain: Mapping[str, Any]) -> bool:
    return len(plain) == 1 and isinstance(plain.get(_TENSOR), str)


# ---- files ----


def split_parts(parts: Mapping[str, State]) -> tuple[str, dict[str, dict[str, Tensor]]]:
    """Return the text of `state.json`, and the tensors of each part that has any."""
    plain, tensors = {}, {}
    for name, state in parts.items():
        plain[name], own = split(state)
        if own:
            tensors[name] = own
    return _text(plain, "the run"), tensors


Pieces = Iterator[Tensor]
"""The bytes of a part's tensors, (n,) uint8: of one tensor after the other, in the order of `in_file_order`. No piece
holds bytes of two tensors."""


def write_tensors(tensors: Mapping[str, Mapping[str, Tensor]], folder: Path) -> None:
    """Write the tensors of each part into its file."""
    with utf8_name(folder) as named:
        for part, own in tensors.items():
            save_file(_without_shared_memory(own), named / f"{part}.safetensors")


def in_file_order(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names in the order in which safetensors writes them: by format, so that all are aligned."""
    return list(_described(tensors))


def write_pieces(tensors: Mapping[str, Tensor], pieces: Pieces, folder: Path, part: str) -> None:
    """Write the file of a part whose bytes come in pieces; `tensors` are their shapes, on the meta device.

    `save_file` would write the same, of complete tensors in memory. The format is a length, a header in JSON, and the
    bytes of the tensors without gaps (https://github.com/huggingface/safetensors#format).
    """
    header, end = _described(tensors), 0
    for name, facts in header.items():
        begin, end = end, end + tensors[name].nbytes
        facts.update(shape=list(tensors[name].shape), data_offsets=[begin, end])
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNED_BYTES)
    with (folder / f"{part}.safetensors").open("wb") as out:
        begin = out.write(struct.pack("<Q", len(text))) + out.write(text)
        for piece in pieces:
            out.write(piece.numpy().data)
        assert out.tell() == begin + end, "every rank sends what it has said that it holds"


def _described(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Return what safetensors says in its header of one number of each tensor, in the order in which it writes them."""
    data = save({name: torch.zeros(1, dtype=one.dtype) for name, one in tensors.items()})
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    return dict(sorted(header.items(), key=lambda one: one[1]["data_offsets"]))


def read_parts(folder: Path) -> dict[str, State]:
    """Return the states of the parts; raises ValueError if tensors and text do not match."""
    plain = json.loads((folder / STATE).read_text("utf-8"))
    if not isinstance(plain, dict):
        raise ValueError(f"{STATE} holds no object")
    for part in plain:
        if not part.isidentifier():
            raise ValueError(f"{str(part)[:60]!r} in {STATE} is not a part of a run")
    return {part: join(state, _read_tensors(folder, part)) for part, state in plain.items()}


def write_state(folder: Path, name: str, state: State) -> None:
    """Write one state as NAME.json and NAME.safetensors."""
    plain, tensors = split(state)
    (folder / f"{name}.json").write_text(_text(plain, f"the {name}"), "utf-8")
    if tensors:
        write_tensors({name: tensors}, folder)


def read_state(folder: Path, name: str) -> State | None:
    """Return what `write_state` wrote; None if there is no such state. Raises ValueError as `read_parts` does."""
    text = folder / f"{name}.json"
    return join(json.loads(text.read_text("utf-8")), _read_tensors(folder, name)) if text.is_file() else None


def _read_tensors(folder: Path, name: str) -> dict[str, Tensor]:
    file = f"{name}.safetensors"
    with utf8_name(folder) as named:
        found = load_file(named / file) if (folder / file).is_file() else {}
    if removes_open_files():
        return found
    return {name: tensor.clone() for name, tensor in found.items()}  # the file is mapped, and could not be removed


def _text(values: Any, owner: str) -> str:
    try:
        return json.dumps(values, indent=1) + "\n"
    except TypeError as error:
        raise ConfigError(
            what=f"the state of {owner} cannot be written",
            got=str(error),
            why="checkpoints hold plain numbers, texts and tensors: they can be read without running code",
            fix="change what the optimizer, the schedule or the callback exports as its state; or save the model alone "
            "(save_only_model), or nothing (save_strategy no)",
        ) from error


def _without_shared_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous tensors, those that share memory as copies: safetensors writes each memory once."""
    seen: set[int] = set()
    found = {}
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        found[name] = tensor.clone(memory_format=torch.contiguous_format) if memory in seen else tensor.contiguous()
        seen.add(memory)
    return found
