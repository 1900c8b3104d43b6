"""Where rank 0 is in a step of Slurm: on the first node of its list."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

_PART = re.compile(r"([^,\[\]]*)(?:\[([^\]]*)\])?([^,\[\]]*)(?:,|$)")
_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_LOWEST_PORT, _N_PORTS = 20000, 20000


def nodes(environment: Mapping[str, str]) -> list[str]:
    """Return the names of the step's nodes, in order; none if Slurm does not list them."""
    text = next((environment[name] for name in _LISTS if environment.get(name)), "")
    return [name for match in _PART.finditer(text) if match[0] for name in _expanded(match)]


def port(environment: Mapping[str, str]) -> int:
    """Return a port that follows from the step, so that the steps of a node do not meet each other."""
    job, step = (_number(environment, name) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return _LOWEST_PORT + (job * 7 + step) % _N_PORTS


def _expanded(match: re.Match[str]) -> Iterator[str]:
    """Yield the names of one entry, such as node[01-03,7]x."""
    before, ranges, after = match.groups()
    if ranges is None:
        yield before
        return
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        for number in range(int(first), int(last or first) + 1):
            yield f"{before}{number:0{len(first)}}{after}"


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    return int(text) if text.isdigit() else 0
