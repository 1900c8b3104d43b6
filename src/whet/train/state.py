"""The state of a run: each of its parts returns its own state and restores it.

A state consists of JSON values and tensors. `TrainingLoop._parts` lists the parts. A part that is added there is saved
and restored with the others, without any other change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from torch import Tensor

State = dict[str, Any]
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


def collect_states(parts: Mapping[str, Stateful]) -> dict[str, State]:
    """Return the state of every part."""
    return {name: part.state() for name, part in parts.items()}


def load_states(parts: Mapping[str, Stateful], saved: Mapping[str, State]) -> None:
    """Give each part its saved state, in the order of `parts`; a part without one keeps the state it has."""
    for name, part in parts.items():
        if name in saved:
            if not isinstance(saved[name], dict):
                raise ValueError(f"the state of {name} is {str(saved[name])[:60]!r}, and not an object")
            part.load_state(saved[name])


def split(state: Any, path: str = "") -> tuple[Any, dict[str, Tensor]]:
    """Return the state with references instead of tensors, and the tensors by their dotted paths in it."""
    if isinstance(state, Tensor):
        return {_TENSOR: path}, {path: state}
    if isinstance(state, Mapping):
        plain, tensors = {}, {}
        for name, value in state.items():
            plain[name], found = split(value, f"{path}.{name}" if path else str(name))
            tensors |= found
        return plain, tensors
    return state, {}


def join(plain: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the state that `split` separated; raises ValueError if references and tensors do not match one to one."""
    named = list(_references(plain))
    if sorted(named) != sorted(tensors):
        odd = sorted({*named} ^ {*tensors}) or sorted(named)
        raise ValueError(f"the stored tensors are not those that the state refers to: {odd[0][:100]}")
    return _joined(plain, tensors)


def _references(plain: Any) -> Iterator[str]:
    if isinstance(plain, dict):
        if _is_reference(plain):
            yield plain[_TENSOR]
            return
        for value in plain.values():
            yield from _references(value)


def _joined(plain: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(plain, dict):
        return plain
    if _is_reference(plain):
        return tensors[plain[_TENSOR]]
    return {name: _joined(value, tensors) for name, value in plain.items()}


def _is_reference(plain: Mapping[str, Any]) -> bool:
    return len(plain) == 1 and isinstance(plain.get(_TENSOR), str)
