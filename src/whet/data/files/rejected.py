"""The exception that readers raise for bad data; whoever knows its place turns it into a `DataError`."""

from __future__ import annotations

from whet.errors import DataError, Problem


class Rejected(Exception):  # noqa: N818 - the readers catch it, and it says what happened to the data
    """A piece of data that breaks a rule, without its place: the one who catches it adds that."""

    def __init__(self, what: str, *, why: str, fix: str, got: object = None) -> None:
        super().__init__(what)
        self.what = what
        self.got = got
        self.why = why
        self.fix = fix

    def at(self, place: str) -> Problem:
        """Return the problem as the user reads it, with the place where it stands."""
        return Problem(what=f"{place}: {self.what}", got=self.got, why=self.why, fix=self.fix)

    def error(self, place: str) -> DataError:
        """Return the error that reports this problem alone."""
        return DataError(what=f"{place}: {self.what}", got=self.got, why=self.why, fix=self.fix)
