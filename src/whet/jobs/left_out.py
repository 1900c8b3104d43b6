"""Bad rows that a run with --skip_bad leaves out: counted, and named in the log and in a file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from whet.console import plural
from whet.data.files.bad_rows import MAX_SHOWN, BadRows
from whet.errors import Problem
from whet.log import logger
from whet.watch import files as output_files

_LONGEST_GOT = 300


@dataclass(frozen=True)
class LeftOut:
    """The bad rows of one source that a run does not use."""

    problems: Sequence[Problem] = ()
    """Each with its position."""
    n_rows: int = 0
    """Rows that the problems make unusable: a problem of a paragraph concerns all of its questions."""
    kinds: Mapping[str, int] = field(default_factory=dict)
    """Kind of problem -> the rows that it makes unusable."""

    @classmethod
    def of(cls, bad: BadRows) -> LeftOut:
        """Return what was found in one source."""
        return cls(bad.problems, bad.n_left_out, dict(bad.kinds.most_common()))

    def __add__(self, other: LeftOut) -> LeftOut:
        """Return what both leave out of one source."""
        kinds = Counter(self.kinds) + Counter(other.kinds)
        return LeftOut([*self.problems, *other.problems], self.n_rows + other.n_rows, dict(kinds.most_common()))

    def log(self, split: str, row: str) -> None:
        """Log how many rows of the split were left out, by kind, and the first reasons; `row` is the word for one."""
        if self.problems:
            were = "is bad and was" if self.n_rows == 1 else "are bad and were"
            logger.warning("%s: %s %s left out:", split, plural(self.n_rows, row), were)
        for reason, n_rows in self.kinds.items():
            logger.warning("  %s: %s", plural(n_rows, row), reason)
        for problem in self.problems[:MAX_SHOWN]:
            logger.warning("  %s", problem.what)
        if len(self.problems) > MAX_SHOWN:
            logger.warning("  and %s", plural(len(self.problems) - MAX_SHOWN, "more problem"))

    def write(self, path: Path, on_error: str) -> list[str]:
        """Write what was left out and why, one object for each problem; no file if there is none.

        Returns the name of the file if it was written. `on_error` as in `output_files.stored`.
        """
        if not self.problems:
            return []
        entries = [
            asdict(one) | {"got": None if one.got is None else str(one.got)[:_LONGEST_GOT]} for one in self.problems
        ]
        return [path.name] if output_files.write_result(path, json.dumps(entries, indent=2) + "\n", on_error) else []
