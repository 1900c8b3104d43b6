"""Text for people: how wide it may be, how it is shortened, how amounts and times are written."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from whet.errors import escape_controls

USUAL = 80
"""Columns of a terminal that does not say, and of a file."""
_WIDEST = 100
_NARROWEST = 30
_ELLIPSIS = "..."
_UNIT = re.compile(
    r"""(?:run:[ ])[^;]+;?          # a command
      | --[\w-]+[ ](?:'[^']*'|"[^"]*"|[^\s-])\S*  # a flag with its value
      | [^\s(]+\((?:[^()]|\([^()]*\))*\)[^\s()]*  # a call
      | \S*(?P<quote>['"])(?:(?!(?P=quote)).)*(?P=quote)\S*
      | \S+""",
    re.VERBOSE,
)
"""The parts of a message that stay on one line."""


def is_terminal(stream: Any) -> bool:
    """Return whether a person sees what is written there at once."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError, OSError):  # none, closed, or gone
        return False


def can_be_drawn_over(stream: Any) -> bool:
    """Return whether a line that is written there can be replaced by the next one: not in a cell of a notebook.

    A command of a cell (`!whet ...`) has a terminal as well, but what it writes is kept, each state of a line too.
    """
    kernel = os.environ.get("JPY_PARENT_PID") or (os.environ.get("TERM"), os.environ.get("GIT_PAGER")) == _OF_KERNELS
    return is_terminal(stream) and not kernel


_OF_KERNELS = ("xterm-color", "cat")
"""What IPython's kernel sets for the commands of its cells; some editors start it without its server's variable."""


def width() -> int:
    """Return how many columns a line may have: those of the terminal, at most 100; 80 without one."""
    return max(_NARROWEST, min(shutil.get_terminal_size((USUAL, 24)).columns, _WIDEST))


def shorten(text: str, most: int) -> str:
    """Return the text with its middle left out if it is longer than `most`: the end of a path says the most."""
    if len(text) <= most:
        return text
    if most <= len(_ELLIPSIS):
        return text[:most]
    kept = most - len(_ELLIPSIS)
    return text[: kept // 3] + _ELLIPSIS + text[len(text) - (kept - kept // 3) :]


def columns(text: str) -> int:
    """Return how many columns of a terminal the text takes: Chinese, Japanese and Korean characters take two."""
    return len(text) if text.isascii() else sum(map(_columns_of, text))


def _columns_of(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def cell(text: str, most: int) -> str:
    """Return the beginning of the text on one line, filled up to this many columns; "…" stands for what is cut off."""
    shown = escape_controls(text)
    if columns(shown) > most:
        kept, room = "", most - 1
        for char in shown:
            if (room := room - _columns_of(char)) < 0:
                break
            kept += char
        shown = f"{kept}…"
    return shown + " " * (most - columns(shown))


def fit(parts: Sequence[str], most: int, between: str = ", ") -> str:
    """Return as many of the first parts on one line as there is room for; the first is shortened if need be."""
    line = shorten(parts[0], most) if parts else ""
    for part in parts[1:]:
        if len(line) + len(between) + len(part) > most:
            break
        line += between + part
    return line


def folded(parts: Sequence[str], most: int, between: str = "  ", indent: str = "  ") -> list[str]:
    """Return all parts on as many lines as they need, none longer than `most`; later lines are indented."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + len(between) + len(part) <= most:
            lines[-1] += between + part
        else:
            start = indent if lines else ""
            lines.append(start + shorten(part, most - len(start)))
    return lines


def own_program() -> str:
    """Return how this shell starts `whet`: by that name if it finds it, else as this process was started."""
    if shutil.which("whet"):
        return "whet"
    started = Path(sys.argv[0])
    return shlex.quote(sys.argv[0]) if started.name == "whet" else f"{shlex.quote(sys.executable)} -m whet"


def paragraph(text: str, indent: str = "") -> str:
    """Return the text in lines between words, none longer than the terminal is wide unless a word is."""
    return textwrap.fill(text, width(), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def folded_message(text: str, most: int, indent: str) -> list[str]:
    """Return one line of a message in lines of at most `most` columns, later ones indented.

    Lines end between words; what a reader copies stays on one line, even a longer one: commands after "run:", a flag
    with its value, calls, quoted text and paths.
    """
    start = text[: len(text) - len(text.lstrip())]
    lines: list[str] = []
    for unit in (match[0] for match in _UNIT.finditer(text)):
        if lines and len(lines[-1]) + 1 + len(unit) <= most:
            lines[-1] += f" {unit}"
        else:
            lines.append((indent if lines else start) + unit)
    return lines or [text]


def duration(seconds: float) -> str:
    """Return a time as 42s, 3m10s or 2h05m."""
    total_s = max(0, round(seconds))
    if total_s < 60:
        return f"{total_s}s"
    if total_s < 3600:
        return f"{total_s // 60}m{total_s % 60:02}s"
    return f"{total_s // 3600}h{total_s % 3600 // 60:02}m"


def between(middle_s: float, low_s: float, high_s: float) -> str:
    """Return a time that is roughly known, with its range: 50 s (43 to 58), 14 min (12 to 16) or 2.5 h (2.2 to 2.9)."""
    unit, size = next((unit, size) for unit, size in _UNITS_OF_TIME if middle_s >= size or size == 1.0)
    form = ".1f" if middle_s < 10 * size else ".0f"
    low, middle, high = (format(seconds / size, form) for seconds in (low_s, middle_s, high_s))
    return f"{middle} {unit} ({low} to {high})"


_UNITS_OF_TIME = (("h", 3600.0), ("min", 60.0), ("s", 1.0))


def fine_duration(seconds: float) -> str:
    """Return a short time to three digits, as 0.250 ms, 42.0 ms, 0.684 s or 12.5 s: times of steps are compared."""
    value, unit = (seconds, "s") if seconds >= 0.1 else (1e3 * seconds, "ms")
    return f"{value:.0f} {unit}" if value >= 99.95 else f"{value:#.3g} {unit}"


def amount(n_bytes: float) -> str:
    """Return an amount of memory, as 12 kB, 361 MB or 1.8 GB."""
    if n_bytes < 999_500:
        return f"{max(n_bytes / 1e3, 1):,.0f} kB"
    return f"{n_bytes / 1e9:,.1f} GB" if n_bytes >= 0.9995e9 else f"{n_bytes / 1e6:,.0f} MB"


def count(number: float) -> str:
    """Return a count as 490, 67,620 or 22.6 million."""
    return f"{number / 1e6:,.1f} million" if number >= 999_950 else f"{number:,.0f}"


def plural(number: float, noun: str) -> str:
    """Return "1 row", "2 rows"."""
    return f"{count(number)} {noun}" if number == 1 else f"{count(number)} {noun}s"


_MOST_COLUMNS = 30
"""Columns of a table in a line for people."""


def columns_line(read: Mapping[str, str | Sequence[str]], not_read: Sequence[str]) -> str:
    """Return for people which columns are read as what, and which are not read: text: title + body; not read: id."""
    named = {what: " + ".join([names] if isinstance(names, str) else names) or "none" for what, names in read.items()}
    if not_read:
        rest = len(not_read) - _MOST_COLUMNS
        shown = ", ".join(str(name) if str(name).strip() else "(no name)" for name in not_read[:_MOST_COLUMNS])
        named["not read"] = f"{shown} and {rest:,} more" if rest > 0 else shown
    return "; ".join(f"{what}: {names}" for what, names in named.items())
