"""Errors on the terminal: every problem with what, got, why and fix."""

import sys

from whet.errors import WhetError

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

    console = Console(stderr=True)
    for problem in error.problems:
        what, *rest = str(problem).splitlines()
        console.print(Text.assemble(("error: ", "bold red"), (what, "bold")), soft_wrap=True)
        for line in rest:
            console.print(Text(line, style=_STYLES.get(line[:6], "")), soft_wrap=True)
