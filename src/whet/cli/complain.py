"""Errors on the terminal: every problem with what, got, why and fix."""

import sys

from whet import console
from whet.errors import WhetError

_ERROR = "error: "
_STYLES = {"  got:": "yellow", "  fix:": "green"}


def complain(error: WhetError) -> None:
    """Print the problems to standard error, in colour where that is a terminal."""
    if sys.stderr.isatty():
        _in_colour(error)
    else:
        print("\n".join(f"error: {problem}" for problem in error.problems), file=sys.stderr)


def _in_colour(error: WhetError) -> None:
    from rich.console import Console
    from rich.text import Text

    shown, width = Console(stderr=True), console.width()
    for problem in error.problems:
        what, *rest = str(problem).splitlines()
        first, *others = console.folded_message(f"{_ERROR}{what}", width, "  ")
        shown.print(Text.assemble((_ERROR, "bold red"), (first.removeprefix(_ERROR), "bold")), soft_wrap=True)
        for line in others:
            shown.print(Text(line, style="bold"), soft_wrap=True)
        for line in rest:
            for part in console.folded_message(line, width, " " * 7):
                shown.print(Text(part, style=_STYLES.get(line[:6], "")), soft_wrap=True)
