"""What the Python processes of a script report to `whet run`, and the line that it prints of that at the end."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any

from whet.console import fine_duration, plural

NO_WHET = "no-whet"
"""The file in it that a Python without whet leaves."""
_MOST = 3


@dataclass
class Timed:
    """What a step takes: the fastest of those that ran unchanged, or the median of those after the change."""

    seconds: float
    seconds_per_place: float
    """A place is one of the padded batch, a token or padding; of spaCy's batches, a word."""
    processor_seconds_per_place: float
    """Of all threads: what others do on the machine hardly counts in it."""
    n_steps: int


def median(steps: Sequence[Timed]) -> Timed:
    """Return what a step takes by the medians of these."""
    values = (statistics.median(value) for value in zip(*(astuple(one)[:-1] for one in steps), strict=True))
    return Timed(*values, n_steps=len(steps))


@dataclass
class ModelReport:
    """A model of the script: what was changed in it, and what that has saved."""

    name: str
    """Its class."""
    by: str
    """What it was given to."""
    changed: str | None = None
    left: str | None = None
    """Why it stays as the script has it."""
    untimed: str | None = None
    """Why no step was timed before it was changed."""
    before: Timed | None = None
    after: Timed | None = None

    @property
    def gain(self) -> float | None:
        """How many times as fast a step has become, per place; None: that is not known."""
        if self.before is None or self.after is None:
            return None
        return self.before.seconds_per_place / self.after.seconds_per_place

    def is_slower(self, least_gain: float) -> bool:
        """Return whether a step has gained less than this, by the time and by the time of the processor."""
        before, after = self.before, self.after
        if before is None or after is None:
            return False
        by_processor = before.processor_seconds_per_place / max(after.processor_seconds_per_place, 1e-12)
        return max(before.seconds_per_place / after.seconds_per_place, by_processor) < least_gain


@dataclass
class Report:
    """What a process has done so far."""

    models: list[ModelReport] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What runs as without whet in a model that was changed, and why."""

    def write(self, folder: Path) -> None:
        """Write it where `read` finds it."""
        path = folder / f"{os.getpid()}.json"
        with suppress(OSError):  # `whet run` is gone, and its folder
            path.with_suffix(".part").write_text(json.dumps(asdict(self)), "utf-8")
            path.with_suffix(".part").replace(path)


def read(folder: Path) -> list[Report]:
    """Return what the first ranks among the processes have reported, the first process first."""
    found = []
    for path in sorted(folder.glob("*.json"), key=lambda path: path.stat().st_ctime):
        values = json.loads(path.read_text("utf-8"))
        models = [
            ModelReport(**{
                **one, **{name: Timed(**one[name]) for name in ("before", "after") if one[name] is not None}
            })
            for one in values["models"]
        ]  # fmt: skip
        found.append(Report(models, values["notes"]))
    return found


def as_json(found: Sequence[Report]) -> list[dict[str, Any]]:
    """Return every model that a script gave away: what was changed in it, why not, and what a step has gained."""
    return [asdict(model) | {"gain": model.gain} for report in found for model in report.models]


def line(found: Sequence[Report], *, has_whet: bool) -> str:
    """Return the sentences that say what was changed, what it saved, and what was left alone."""
    models = [model for report in found for model in report.models]
    changed = [model for model in models if model.changed is not None]
    left = _without_repeats(f"{_named(one)} ({one.left})" for one in models if one.left is not None)
    early = [one for one in models if one.changed is None and one.left is None]
    left += _without_repeats(f"{_named(one)} (too few steps to change it)" for one in early)
    left += _without_repeats(note for report in found for note in report.notes)
    if not models:
        why = "no Trainer, accelerate, Lightning or spaCy got a model"
        if not has_whet:
            why += "; or they run in a Python into which whet is not installed"
        return f"nothing was changed: {why}. In a loop of your own, call whet.optimize(model)"
    sentences = [*_without_repeats(_speed(one) for one in changed)]
    sentences += _without_repeats(f"changed: {_named(one)}, {one.changed}" for one in changed)
    if not changed:
        sentences.append("nothing was changed")
    sentences.append(f"left alone: {'; '.join(left)}" if left else "left alone: data, loop and optimizer")
    return ". ".join(sentences)


def _speed(model: ModelReport) -> str:
    before, after = model.before, model.after
    if before is None or after is None:
        why = model.untimed or "too few steps"
        return f"{model.name}: no speed was measured ({why})"
    unit = "update" if model.by == "spaCy" else "step"
    per = "word" if model.by == "spaCy" else "place of the batch"
    which = f"the faster of the first {before.n_steps} {unit}s" if before.n_steps > 1 else f"{unit} 2"
    return (
        f"{model.name}: {model.gain:.2f} times as fast per {per}: {fine_duration(after.seconds)} a {unit} (median of "
        f"{after.n_steps}), and {fine_duration(before.seconds)} when it ran unchanged ({which})"
    )


def _named(model: ModelReport) -> str:
    return f"{model.name} of {model.by}"


def _without_repeats(texts: Iterable[str]) -> list[str]:
    found = list(dict.fromkeys(texts))
    more = len(found) - _MOST
    return found if more <= 0 else [*found[:_MOST], f"and {plural(more, 'other')}"]
