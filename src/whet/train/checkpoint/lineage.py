"""The lineage of a checkpoint: the run that wrote it, and the checkpoints that this run resumed from.

A run that resumes from an older checkpoint begins a new lineage, with a random id. Every manifest holds that id and the
parents. A run uses only checkpoints of its own lineage; paths, steps and time stamps do not matter. Checkpoints that
were written before there were ids share one unnamed lineage.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet.train.checkpoint import manifest

_ID = re.compile(r"[0-9a-f]{32}")
_SHOWN = 8


@dataclass(frozen=True)
class Lineage:
    """`run` is the id; `parents` are the checkpoints that it resumed from, as (run, step), the nearest first."""

    run: str | None
    parents: tuple[tuple[str | None, int], ...] = ()

    @property
    def name(self) -> str:
        """A short name for folders and messages."""
        return "unnamed" if self.run is None else self.run[:_SHOWN]

    def facts(self) -> dict[str, Any]:
        """Return the lineage as a manifest holds it."""
        return {"run": self.run, "parents": [list(parent) for parent in self.parents]}

    def includes(self, run: str | None, step: int) -> bool:
        """Return whether the checkpoint of that run and step belongs to this lineage or to its ancestors."""
        return run == self.run or any(run == parent and step <= last for parent, last in self.parents)

    def rewound_past(self, run: str | None, step: int) -> bool:
        """Return whether this lineage began by going back to before that checkpoint."""
        return any(run == parent and step > last for parent, last in self.parents) and not self.includes(run, step)

    def shares_steps_with(self, other: Lineage) -> bool:
        """Return whether one went back to a checkpoint of the other, or both to one of the same run."""
        return bool({self.run, *dict(self.parents)} & {other.run, *dict(other.parents)})

    def branched(self, step: int) -> Lineage:
        """Return a new lineage that begins at a checkpoint of this one."""
        return Lineage(uuid.uuid4().hex, ((self.run, step), *self.parents))


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder, with the step and the lineage in its manifest."""

    folder: Path
    step: int
    lineage: Lineage


def new_lineage() -> Lineage:
    """Return the lineage of a run that starts at its first step."""
    return Lineage(uuid.uuid4().hex)


def read_checkpoints(folders: Sequence[Path]) -> list[Checkpoint]:
    """Return the checkpoints in these folders; those whose manifest cannot be read are left out."""
    found = ((folder, manifest.facts_of(folder)) for folder in folders)
    return [Checkpoint(folder, facts["step"], lineage_in(facts)) for folder, facts in found if facts is not None]


def abandoned(folders: Sequence[Path]) -> list[Path]:
    """Return the abandoned checkpoints: those that the run of another one of these went back to before."""
    found = read_checkpoints(folders)
    return [
        one.folder for one in found if any(other.lineage.rewound_past(one.lineage.run, one.step) for other in found)
    ]


def lineage_in(facts: Mapping[str, Any]) -> Lineage:
    """Return the lineage in a manifest or of `Lineage.facts`; the unnamed one if it is not in the form of `facts`."""
    run, parents = facts.get("run"), facts.get("parents")
    if not isinstance(run, str) or not _ID.fullmatch(run) or not isinstance(parents, list):
        return Lineage(None)
    pairs = [parent for parent in parents if isinstance(parent, list) and len(parent) == 2]
    known = [(old, step) for old, step in pairs if isinstance(step, int) and (old is None or isinstance(old, str))]
    return Lineage(run, tuple(known))
