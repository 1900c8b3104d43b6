"""How many rows native operators compute: watches the arguments that the library gets."""

from __future__ import annotations

from typing import Any

import pytest

from whet.kernels.library import Pack, library


class RowsOfOperators:
    """Within this context, collects the rows of each forward call of these operators, in order."""

    def __init__(self, *names: str) -> None:
        self.forward: list[int] = []
        self._names = names

    def __enter__(self) -> RowsOfOperators:
        self._patch = pytest.MonkeyPatch()
        found = library()
        assert found is not None
        for name in self._names:
            pack, operator = found.operators.get(name) or found.load_operator(name)
            self._patch.setitem(found.operators, name, (self._noting(pack), operator))
        return self

    def _noting(self, pack: Pack) -> Pack:
        def noting(given: dict[str, Any]) -> bytes:
            self.forward.append(given["rows"])
            return pack(given)

        return noting

    def __exit__(self, *error: object) -> None:
        self._patch.undo()
