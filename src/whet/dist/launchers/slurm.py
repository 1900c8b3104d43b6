"""Where rank 0 is in a step of Slurm: on the first node of its list."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping

_ENTRY = re.compile(r"(?:[^,\[\]]|\[[^\[\]]+\])+")
"""An entry of a list: node7, node[01-03,7]x or rack[1-2]node[1-3]."""
_BRACKETS = re.compile(r"\[([^\[\]]+)\]")
_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_LOWEST_PORT, _N_PORTS = 20000, 20000


def nodes(environment: Mapping[str, str]) -> list[str]:
    """Return the names of the step's nodes, in order; none if Slurm does not list them, or in another form."""
    return [name for entry in _entries(listed(environment)) for name in _expanded(entry.strip()) if name]


def listed(environment: Mapping[str, str]) -> str:
    """Return Slurm's list of the step's nodes as it is, "" if there is none."""
    return next((environment[name] for name in _LISTS if environment.get(name)), "")


def port(environment: Mapping[str, str]) -> int:
    """Return a port that follows from the step, so that the steps of a node do not meet each other."""
    job, step = (_number(environment, name) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return _LOWEST_PORT + (job * 7 + step) % _N_PORTS


def _entries(text: str) -> list[str]:
    """Return the entries of a list; none if they do not make up the complete list."""
    text = text.rstrip(", ")
    found = _ENTRY.findall(text)
    return found if ",".join(found) == text else []


def _expanded(entry: str) -> Iterator[str]:
    """Yield the names of one entry; the last bracket changes first, as in Slurm's own order."""
    texts = _BRACKETS.split(entry)  # every second one is what a bracket holds
    choices = [_choices(text) if place % 2 else [text] for place, text in enumerate(texts)]
    yield from ("".join(parts) for parts in itertools.product(*choices))


def _choices(ranges: str) -> list[str]:
    """Return what the ranges of a bracket stand for: numbers with leading zeros, or words as they are."""
    found: list[str] = []
    for part in ranges.split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdigit() or not (last or first).isdigit():
            found.append(part.strip())
        else:
            found += [f"{number:0{len(first)}}" for number in range(int(first), int(last or first) + 1)]
    return found


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    return int(text) if text.isdigit() else 0
