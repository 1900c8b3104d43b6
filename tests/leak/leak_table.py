"""Print how far one changed row moves the others: whet's ways of running a batch, and what transformers offers.

`make test-leak` runs it: it fails if a single bit of another row moves in one of whet's ways. docs/same-results.md sums
up its output. Rows that a caller lays end to end are measured under `whet.optimize` and in transformers: whet may let
rows see each other only if transformers does. Families on the command line: these alone.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from leak_runs import (
    EVERY,
    FORMATS,
    FORMS,
    TASKS,
    WAYS,
    Moved,
    has_task,
    measure,
    measure_form,
    most,
    moved,
    takes,
)
from peers import peers

from tiny import DECODERS, FAMILIES

_HEADER = ("", "logits", "gradients", "models x tasks")


def run(families: Sequence[str]) -> list[str]:
    """Print the table, at most 80 columns wide, line by line; return what of whet's own leaks."""
    leaks: list[str] = []
    print(_line(*_HEADER))
    for way in WAYS:
        for number_format in FORMATS:
            cells = [(one, task) for one in families if one in EVERY for task in TASKS if has_task(one, task)]
            measured = {cell: measure(*cell, way, number_format) for cell in cells}
            found = {cell: one for cell, one in measured.items() if one is not None}
            leaks += [f"{way}, {number_format}, {cell}: {one}" for cell, one in found.items() if _leaks(one)]
            _print(f"whet {way}, {number_format}", found.values())
    for form in FORMS:
        leaks += _end_to_end([one for one in families if one in (*FAMILIES, *DECODERS) and takes(one, form)], form)
    for name, (model, rows) in peers().items():
        print(_line(name, *_largest([moved(model, rows, "tag")]), "1"), flush=True)
    return leaks


def _end_to_end(families: Sequence[str], form: str) -> list[str]:
    """Print what moves if a caller's rows lie end to end; return what leaks under whet and not in transformers."""
    leaks: list[str] = []
    for number_format in FORMATS:
        measured = {family: measure_form(family, form, number_format) for family in families}
        found = {family: one for family, one in measured.items() if one is not None}
        _print(f"whet {form}, {number_format}", found.values())
        theirs = {family: measure_form(family, form, number_format, by_whet=False) for family in found}
        _print(f"  transformers {form}, {number_format}", (one for one in theirs.values() if one is not None))
        for family, one in found.items():
            other = theirs[family]
            if _leaks(one, most(family)) and not (form == "mask of ones" and other is not None and _leaks(other)):
                leaks.append(f"{form}, {number_format}, {family}: {one}")
    return leaks


def _leaks(found: Moved, within: float = 0.0) -> bool:
    """Return whether a single bit of another row moved, or nothing at all did: then nothing was measured."""
    return found.logits > within or found.gradients > within or not found.own > 0.0


def _print(name: str, found: Iterable[Moved]) -> None:
    if measured := list(found):
        print(_line(name, *_largest(measured), str(len(measured))), flush=True)


def _largest(found: list[Moved]) -> tuple[str, str]:
    return _shown(max(one.logits for one in found)), _shown(max(one.gradients for one in found))


def _shown(value: float) -> str:
    return "0" if value == 0.0 else f"{value:.1e}"


def _line(name: str, *cells: str) -> str:
    return f"{name:<46}{cells[0]:>8}{cells[1]:>11}{cells[2]:>15}"


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    found = run(sys.argv[1:] or (*EVERY, *DECODERS))
    for one in found:
        print(f"LEAK: {one}", file=sys.stderr)
    sys.exit(1 if found else 0)
