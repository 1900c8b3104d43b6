"""The exception of readers for bad data; a caller that knows the position converts it to a `DataError`."""

from __future__ import annotations

from whet.errors import DataError, Problem


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
