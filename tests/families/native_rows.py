"""How many rows native operators compute: watches the calls of the library."""

from __future__ import annotations

from typing import Any

import pytest

from whet.kernels.library import Library


class RowsOfOperators:
    """Within this context, collects the rows of each forward call of these operators, in order."""

    def __init__(self, *names: str) -> None:
        self.forward: list[int] = []
        self._names = names

    def __enter__(self) -> RowsOfOperators:
        self._patch = pytest.MonkeyPatch()
        call = Library.call

        def watched(library: Library, name: str, given: dict[str, Any]) -> None:
            if name in self._names:
                self.forward.append(given["rows"])
            call(library, name, given)

        self._patch.setattr(Library, "call", watched)
        return self

    def __exit__(self, *error: object) -> None:
        self._patch.undo()
