"""What whet tells while it works goes to standard error, whatever that is when it speaks."""

from __future__ import annotations

import contextlib
import io

from whet.log import logger, set_up


def test_a_new_standard_error_gets_the_next_lines() -> None:
    """A notebook gives each cell its own."""
    first, second = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(first):
        set_up()
        logger.info("one")
    with contextlib.redirect_stderr(second):
        set_up()
        logger.info("two")
    assert (first.getvalue(), second.getvalue()) == ("whet: one\n", "whet: two\n")


def test_every_line_comes_once() -> None:
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        set_up()
        set_up()
        logger.warning("only")
    assert told.getvalue() == "whet: only\n"
