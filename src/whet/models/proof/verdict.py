"""What a proof has found out about a model: kept with the model while it stays the same, and nowhere in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from whet.models.family import Family


@dataclass(frozen=True)
class Verdict:
    """Whether an encoder may run packed: its family as the proof found it, or why it needs its padding."""

    family: Family | None
    why_padded: str | None = None


_VERDICTS: WeakKeyDictionary[nn.Module, tuple[int, Verdict]] = WeakKeyDictionary()
_UNREAD = ("name_or_path", "dtype", "torch_dtype", "architectures", "transformers_version", "id2label", "label2id")
"""Entries of a configuration that no forward pass of an encoder reads."""


def record(encoder: nn.Module, verdict: Verdict) -> None:
    """Keep the verdict for the encoder as it is now."""
    _VERDICTS[encoder] = (_fingerprint(encoder), verdict)


def recorded(model: Any) -> Verdict | None:
    """Return the verdict on the model's encoder; None if there is none, or if its modules have changed since."""
    encoder = getattr(model, "base_model", None)
    found = _VERDICTS.get(encoder) if isinstance(encoder, nn.Module) else None
    if found is None or found[0] != _fingerprint(encoder):
        return None
    return found[1]


def _fingerprint(encoder: Any) -> int:
    """Return a hash of the encoder's classes, replaced forwards and configuration; what whet puts in does not count."""
    config = encoder.config.to_dict() if hasattr(encoder, "config") else {}
    kept = sorted((name, repr(value)) for name, value in config.items() if name not in _UNREAD and name[0] != "_")
    return hash((tuple(_described(encoder)), tuple(kept)))


def _described(encoder: nn.Module) -> Iterator[tuple[str, str, str]]:
    for name, module in encoder.named_modules():
        kind = next(cls for cls in type(module).__mro__ if not cls.__module__.startswith("whet."))
        forward: Any = module.__dict__.get("forward")
        forward = getattr(forward, "__func__", forward)
        home = getattr(getattr(forward, "func", forward), "__module__", None) or ""
        replaced = "" if forward is None or home.startswith("whet.") else f"{home} {id(forward)}"
        yield name, f"{kind.__module__}.{kind.__qualname__}", replaced
