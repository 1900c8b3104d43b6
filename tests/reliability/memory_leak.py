"""A run that keeps more memory after each micro-batch."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

MIB = 2**20


def leak(megabytes: int, first_call: int = 1) -> Callable[[Callable[[], None]], None]:
    """Return what makes a child keep so much more memory after each micro-batch, really written to."""

    def prepare(_: Callable[[], None]) -> None:
        home = import_module("whet.objectives.span").PackedSpans
        real, kept, count = home.loss_sum, [], 0

        def leaking(*given: Any) -> Any:
            nonlocal count
            count += 1
            if count >= first_call:
                kept.append(bytearray(os.urandom(4096)) * (megabytes * MIB // 4096))
            return real(*given)

        home.loss_sum = leaking

    return prepare
