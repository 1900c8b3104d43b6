"""Bad data: what is wrong with a row, and the bad rows of a source, all counted and the first reported in one error."""

from __future__ import annotations

import gc
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from whet.errors import DataError, Problem

MAX_SHOWN = 10
"""Problems reported in full; more would hide the first."""

_PARTICULARS = re.compile(r"'[^']*'|\"[^\"]*\"|\d[\d,.]*")
"""What differs between two messages about the same kind of problem: quoted values and numbers."""

Place = Callable[[], str]
"""Returns the position of a row. A function, because the text is needed only for bad data."""


class Rejected(Exception):  # noqa: N818 - the readers catch it, and it says what happened to the data
    """Data that breaks a rule, without its position: the code that catches it adds that."""

    def __init__(self, what: str, *, why: str, fix: str, got: object = None) -> None:
        super().__init__(what)
        self.what = what
        self.got = got
        self.why = why
        self.fix = fix

    def at(self, place: str) -> Problem:
        """Return the problem for the user, with its position."""
        return Problem(what=f"{place}: {self.what}", got=self.got, why=self.why, fix=self.fix)

    def error(self, place: str) -> DataError:
        """Return an error with only this problem."""
        return DataError(what=f"{place}: {self.what}", got=self.got, why=self.why, fix=self.fix)


class BadRows:
    """The problems of one source: the first ones, or all of them if bad rows are skipped."""

    def __init__(self, source: str, *, skip_bad: bool = False) -> None:
        self.source = source
        self.skip_bad = skip_bad
        self.problems: list[Problem] = []
        self.n_left_out = 0
        """Rows that these problems make unusable."""
        self.kinds: Counter[str] = Counter()
        """Kind of problem -> the rows that it makes unusable."""
        self._n_problems = 0

    def add(self, problem: Rejected, place: Place, n_rows: int = 1) -> None:
        """Count a problem and its unusable rows; store it if it is one of the first, or if all are reported."""
        self._n_problems += 1
        self.n_left_out += n_rows
        self.kinds[_PARTICULARS.sub("...", problem.what)] += n_rows
        if self.skip_bad or len(self.problems) < MAX_SHOWN:
            self.problems.append(problem.at(f"{self.source}: {place()}"))

    def refuse(self, n_good: int, row: str) -> None:
        """Raise one DataError about the problems, or about an empty source; `row` is the word for a row."""
        if self._n_problems and not (self.skip_bad and n_good):
            raise DataError.of([*self.problems[:MAX_SHOWN], *self._summary(n_good, row)])
        if not n_good:
            raise DataError(
                what=f"{self.source}: there is no {row} in it",
                why="there is nothing to train on, to evaluate or to predict",
                fix="name another file or split",
            )

    def _summary(self, n_good: int, row: str) -> list[Problem]:
        if self._n_problems <= MAX_SHOWN and n_good:
            return []
        found = f"{self._n_problems} problem{'' if self._n_problems == 1 else 's'} in all"
        more = f"; the first {MAX_SHOWN} are listed above" if self._n_problems > MAX_SHOWN else ""
        none = "" if n_good else f"; not one {row} can be used"
        return [
            Problem(
                what=f"{self.source}: {found}{more}{none}",
                why="a run on what is left would be a run on other data than you named",
                fix="correct the data" + (", or leave these out: --skip_bad" if n_good else ""),
            )
        ]


@contextmanager
def no_cycle_search() -> Iterator[None]:
    """Disable Python's search for reference cycles within the block.

    Reading makes a million objects without cycles; searching them repeatedly took as long as the reading.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
