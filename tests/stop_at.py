"""A signal that comes at a chosen call of a run in this process."""

from __future__ import annotations

from typing import Any

import pytest

from whet.watch import stop


def stop_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, number: int) -> None:
    """Let a signal come with the call of this number."""
    inner, calls = getattr(owner, name), iter(range(1, 1000))

    def noticed(*given: Any, **named: Any) -> Any:
        if next(calls) == number:
            stop._current.requested = "SIGTERM"  # as the handler does
        return inner(*given, **named)

    monkeypatch.setattr(owner, name, noticed)
