"""How a task judges its model on one split of the data, and what is written of each example.

A judge returns the metrics of its split and one `Judged` for each example. `write` makes of these, the same for all
tasks: every prediction ({prefix}_predictions.jsonl), the errors with the worst first (errors.jsonl for the validation
split, predict_errors.jsonl for a test split whose answers are known), counts for the results, and the lines in the
terminal that show the worst.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from whet import console
from whet.engine.engine import Engine
from whet.jobs.fields import Pooling
from whet.strict_json import with_plain_ends
from whet.watch import files as output_files
from whet.watch import results

LEAST_SURE = 100
"""How many examples that are not wrong the file of errors has at most: the model is least sure of these."""
_SHOWN = 3
"""Errors in the terminal."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One example of a split: what it shows, what is expected of it, and what the model predicted."""

    row: str
    """Its place in the file, or the name that the file gives it."""
    shown: Mapping[str, Any]
    """What a reader sees of it, in full: `text`, or `question` and `context`."""
    expected: Any = None
    """None: the data does not say it."""
    predicted: Any = None
    probability: float | None = None
    """The model's probability of what is expected; None if it is not known, or there is none."""
    loss: float | None = None
    badness: tuple[float, ...] | None = None
    """Orders the errors, the largest first. None: it is not known what is expected, so that nothing is judged."""
    wrong: bool | None = None
    """None: nothing is right or wrong here, as with numbers, or nothing is judged."""
    of_predictions: Mapping[str, Any] = field(default_factory=dict)
    """What the file of predictions says besides."""
    of_errors: Mapping[str, Any] = field(default_factory=dict)
    """What the file of errors says besides, or in place of `expected` and `predicted`."""

    @property
    def line(self) -> dict[str, Any]:
        """What both files say."""
        judged = {name: getattr(self, name) for name in ("expected", "predicted", "probability", "loss")}
        return {"row": self.row, **self.shown, **judged}

    @property
    def line_of_errors(self) -> dict[str, Any]:
        """What the file of errors says."""
        return {**self.line, **self.of_errors}


@dataclass(frozen=True)
class Judgement:
    """What a judge found on its split."""

    metrics: Mapping[str, float]
    """All names begin with the prefix of the split."""
    examples: Sequence[Judged]
    """All examples in the order of the data."""
    files: Sequence[str] = ()
    """The names of the files that it has written."""


class Judge(Protocol):
    """Judges a model on one split, and writes the files that belong to its task alone."""

    def while_training(self) -> dict[str, Any]:
        """Return the fields of a RunSpec by which this judge computes the metrics of evaluations in a training."""
        ...

    def judge(self, engine: Engine, prefix: str) -> Judgement:
        """Evaluate the model, and return the metrics and every example; all names begin with the prefix."""
        ...


class PredictionJudge(ABC):
    """A judge that sees the predictions for all rows of its split at once."""

    folder: Path
    """Where its files are written."""
    on_error: str
    """What to do if a file cannot be written: "stop", or "continue" without it."""

    @property
    @abstractmethod
    def dataset(self) -> Any:
        """The rows of the split, with their labels."""

    @abstractmethod
    def metrics(self, prediction: Any) -> dict[str, float]:
        """Return the metrics of transformers' EvalPrediction."""

    @abstractmethod
    def examples(self, predictions: Any) -> Sequence[Judged]:
        """Return every example of the split with its prediction, in the order of the data."""

    @abstractmethod
    def write(self, examples: Sequence[Judged], prefix: str) -> list[str]:
        """Write what belongs to this task alone, under names of `watch/results.py`; return the names."""

    def while_training(self) -> dict[str, Any]:
        """Return the fields of a RunSpec by which this judge computes the metrics of evaluations in a training."""
        return {"compute_metrics": self.metrics}

    def judge(self, engine: Engine, prefix: str) -> Judgement:
        """Return the metrics of the engine's model and every example, and write the files of the task."""
        found = engine.predict(self.dataset, prefix, self.metrics)
        examples = self.examples(found.predictions)
        files = self.write(examples, prefix)
        metrics = dict(found.metrics or {})
        engine.log(dict(metrics))
        return Judgement(metrics, examples, files)

    def store(self, name: str, text: str) -> list[str]:
        """Write this text into a file of the folder, and return its name; nothing if it could not be written."""
        return _store(self.folder, name, text, self.on_error)


@dataclass(frozen=True)
class Written:
    """What was written of the examples of a split."""

    counts: Mapping[str, float]
    """For the results."""
    lines: Sequence[str]
    """For people: the worst examples."""
    files: Sequence[str]
    """Names."""


def write(examples: Sequence[Judged], prefix: str, unit: str, folder: Path, on_error: str) -> Written:
    """Write every prediction, and the errors.

    `unit` is the word for several examples. Without anything that is judged, there is no file of errors. All wrong
    examples are in it, and of the others the LEAST_SURE first.
    """
    predictions = [{**one.line, **one.of_predictions} for one in examples]
    files = _store(folder, f"{prefix}_predictions.jsonl", _json_lines(predictions), on_error)
    judged = sorted((one for one in examples if one.badness is not None), key=_badness, reverse=True)
    wrong, others = [one for one in judged if one.wrong], [one for one in judged if not one.wrong]
    listed, name = [*wrong, *others[:LEAST_SURE]], results.ERRORS[prefix]
    if not judged:
        return Written({}, [], files)
    files += _store(folder, name, _json_lines([one.line_of_errors for one in listed]), on_error)
    tells_wrong = any(one.wrong is not None for one in judged)
    counts = {"wrong": len(wrong)} if tells_wrong else {}
    counts |= {"judged": len(judged), "listed": len(listed)}
    lines = _table(listed, f"{len(judged):,} {unit}", name, n_wrong=len(wrong) if tells_wrong else None)
    return Written({f"{prefix}_{unit}_{count}": number for count, number in counts.items()}, lines, files)


def _badness(one: Judged) -> tuple[float, ...]:
    """Return what orders this example; what is not a number counts as the worst."""
    return tuple(math.inf if math.isnan(value) else value for value in one.badness or ())


def _table(listed: Sequence[Judged], of_all: str, name: str, *, n_wrong: int | None) -> list[str]:
    """Return a line that says how many are wrong and names the file, and the worst examples, a line each."""
    if n_wrong == 0:
        return console.paragraph(f"wrong: none of {of_all}, the least sure first in {name}", "  ").splitlines()
    head = f"the worst of {of_all} first" if n_wrong is None else f"wrong: {n_wrong:,} of {of_all}, the worst first"
    worst = [one.line_of_errors for one in listed[: _SHOWN if n_wrong is None else min(_SHOWN, n_wrong)]]
    rows = [(_words(one["expected"]), _words(one["predicted"]), one.get("question") or one["text"]) for one in worst]
    rows.insert(0, ("expected", "predicted", "question" if "question" in worst[0] else "text"))
    most = (console.width() - 6) * 3 // 10
    widths = [min(most, max(console.columns(row[at]) for row in rows)) for at in (0, 1)]
    widths.append(console.width() - 6 - sum(widths))
    cells = (zip(row, widths, strict=True) for row in rows)
    shown = ["  ".join(console.cell(" ".join(text.split()), width) for text, width in row).rstrip() for row in cells]
    return [*console.paragraph(f"{head} in {name}", "  ").splitlines(), *(f"  {line}" for line in shown)]


def _words(answer: Any) -> str:
    """Return what is expected or predicted, for people."""
    if isinstance(answer, list | tuple):
        return ", ".join(map(_words, answer)) or "nothing"
    if isinstance(answer, float):
        return f"{answer:.4g}"
    return "nothing" if answer in (None, "") else str(answer)


def _json_lines(lines: Sequence[Mapping[str, Any]]) -> str:
    return with_plain_ends(
        "".join(f"{json.dumps(_finite(line), ensure_ascii=False, allow_nan=False)}\n" for line in lines)
    )


def _finite(value: Any) -> Any:
    """Return the value with None in place of every number that is not finite, which JSON does not have."""
    if isinstance(value, Mapping):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _store(folder: Path, name: str, text: str, on_error: str) -> list[str]:
    return [name] if output_files.write_result(folder / name, text, on_error) else []


def pooled(logits: np.ndarray, group_of: np.ndarray, pooling: Pooling = "mean") -> np.ndarray:
    """Return the logits of each group, (groups, labels); `group_of` (rows,) does not decrease and leaves none out."""
    starts = np.flatnonzero(np.diff(group_of, prepend=-1))
    if len(starts) == len(group_of):
        return logits
    if pooling == "max":
        return np.maximum.reduceat(logits, starts)
    counts = np.diff(np.append(starts, len(group_of)))
    return np.add.reduceat(logits.astype(np.float64), starts) / counts[:, None]
