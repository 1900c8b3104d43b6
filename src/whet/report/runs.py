"""What a run has left in its output folder. Any file may be missing, cut off or damaged: the report then lacks a part.

Read are `run.jsonl`, which whet's commands write, and whet.Trainer if asked; otherwise `trainer_state.json`, which any
Trainer writes; the metrics of `all_results.json`; the worst examples of `errors.jsonl`; and the confusion matrices.
Links are not followed: a report must not carry files out that the folder only points to. Results that are older than
the last step of the training that the record has are of an earlier model, and are left out: a script may train in a
folder that was used before.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whet.config.rules.training import RECORD_NAME
from whet.errors import ConfigError
from whet.watch import record
from whet.watch.record import Attempt, Step
from whet.watch.results import ALL as RESULTS
from whet.watch.results import ERRORS, SEEDS, STATE

WORST = 500
"""Examples of a split that a report shows; the others are counted."""
SPLITS = {"eval": "validation", "start": "validation before training", "predict": "test", "train": "training"}
"""Prefix of a split's metrics -> the words for the split."""
TIMES = {"data": "data", "forward_backward": "forward and backward", "update": "update of the weights",
         "evaluation": "evaluation", "saving": "saving"}  # fmt: skip
"""Parts of the time in a run's record -> the words for them."""
UNKNOWN = "\N{EN DASH}"
"""Shown in place of a number that is not known."""
_SPEED = ("runtime", "_per_second", "samples", "_left_out", "_wrong", "_judged", "_listed", "flos", "padding_avoided",
          "epoch", "seeds", "best_seed")  # fmt: skip


Lack = tuple[str, str]
"""What the report has nothing of, and how to get it."""


@dataclass(frozen=True)
class Examples:
    """The worst examples of one split, worst first."""

    prefix: str
    file: str
    rows: Sequence[Mapping[str, Any]]
    n_more: int
    """Lines of the file that `rows` leaves out, those that are no examples among them."""
    n_wrong: int | None
    """Lines at its beginning that are wrong; the model is unsure of the others. None: nothing is right or wrong."""
    n_wrong_rows: int = 0
    """How many of these are among `rows`."""
    n_judged: int | None = None
    """Examples of the split whose answer is known."""


@dataclass(frozen=True)
class Confusion:
    """How often each label was predicted for each expected one: `counts[expected][predicted]`."""

    prefix: str
    file: str
    labels: Sequence[str]
    counts: Sequence[Sequence[int]]


@dataclass
class Run:
    """What is known of one run; what is not known is empty."""

    folder: Path
    name: str
    begin: Mapping[str, Any] = field(default_factory=dict)
    """What the run recorded at its start: its settings, machine, model and data."""
    forecast: Mapping[str, Any] = field(default_factory=dict)
    """What it was forecast to take, soon after its start."""
    end: Mapping[str, Any] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    """The log of the training. What a resumed run trained again stands in it once."""
    evaluations: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Step -> the metrics of the validation split then."""
    resumed_at: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    """Where the time went, by part. What a resumed run trained again counts each time."""
    seconds_of_last: dict[str, float] = field(default_factory=dict)
    """The same of its last process alone, which the forecast is of."""
    train_s: float | None = None
    """What the training took, of all processes of the run; None if the last one has no end."""
    peak_bytes: float | None = None
    """The most that one of them held; None if the last one has no end."""
    peak_of: str = ""
    """Words for what that is of, unless it is all of the run."""
    metrics: dict[str, Any] = field(default_factory=dict)
    examples: list[Examples] = field(default_factory=list)
    confusions: list[Confusion] = field(default_factory=list)
    read_from: list[str] = field(default_factory=list)
    """The files that were there."""
    changed_s: float | None = None
    """When the model changed last, by the record: what is older is of an earlier one."""
    recorded: list[Mapping[str, Any]] = field(default_factory=list)
    """The metrics that were recorded since then."""
    agreed: set[str] = field(default_factory=set)
    """Prefixes of the splits whose results are those of the record."""
    lacks: list[Lack] = field(default_factory=list)

    @property
    def settings(self) -> Mapping[str, Mapping[str, Any]]:
        """Name of a setting -> {"value": ..., "from": where it came from, if it is not the default}."""
        found = self.begin.get("settings")
        entries = found.items() if isinstance(found, dict) else ()
        return {name: entry if isinstance(entry, dict) else {"value": entry} for name, entry in entries}


def read(folder: str | Path) -> Run:
    """Return the run whose output folder this is; ConfigError if it holds nothing that a report could show."""
    folder = Path(folder)
    run = Run(folder=folder, name=folder.resolve().name or str(folder))
    _read_record(run)
    history = _read_history(run)
    _read_metrics(run, history)
    _read_examples(run)
    _read_confusions(run)
    if not run.read_from:
        raise ConfigError(
            what="the folder holds no files of a run" if folder.is_dir() else "there is no such folder",
            got=str(folder),
            why=f"a report is made of {RECORD_NAME}, {STATE}, {RESULTS} and {ERRORS['eval']}",
            fix="name the --output_dir of a run",
        )
    return run


def name_apart(runs: Sequence[Run]) -> Sequence[Run]:
    """Give runs of one name as much of their paths as tells them apart, and return them."""
    n_parts = 1
    paths = [run.folder.resolve().parts for run in runs]
    while len({path[-n_parts:] for path in paths}) < len({*paths}) and n_parts < max(map(len, paths)):
        n_parts += 1
    for run, path in zip(runs, paths, strict=True):
        run.name = "/".join(path[-n_parts:]) or run.name
    return runs


def number(value: Any) -> float | None:
    """Return the value as a number, NaN and the infinities among them; None if it is none."""
    if isinstance(value, bool) or (isinstance(value, str) and value not in ("NaN", "Infinity", "-Infinity")):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def finite(value: Any) -> float | None:
    """Return the value as a number; None for one that is not finite, too."""
    found = number(value)
    return None if found is None or not math.isfinite(found) else found


def number_text(value: Any) -> str:
    """Return a number as a table shows it."""
    if value is None:
        return UNKNOWN
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if size >= 100:
        return f"{value:.1f}"
    if size >= 10:
        return f"{value:.2f}"
    if not value:
        return "0"
    if size >= 0.001:
        return f"{value:.4f}"
    return f"{value:.2g}"


def words_of(name: str) -> str:
    """Return the name of a metric or a part in words."""
    return name.replace("_", " ")


def judged_names(runs: Sequence[Run]) -> list[str]:
    """Return the metrics of the evaluations that are neither speeds nor details of another."""
    names = dict.fromkeys(name for run in runs for found in run.evaluations.values() for name in found)
    return [one for one in names if judges(one)]


def judges(metric: str) -> bool:
    """Return whether a metric says how good the model is: it is no speed, no count, and no detail of another one."""
    bare = re.sub(rf"^({'|'.join(SPLITS)})_", "", metric)
    return not metric.endswith(_SPEED) and not record.is_squad_detail(bare)


def _read_record(run: Run) -> None:
    try:
        if not _is_file(run.folder / RECORD_NAME) or seeds_in(run.folder):  # each seed has a record of its own
            raise ConfigError.of([record.no_record(run.folder)])
        found = record.read(run.folder)
    except ConfigError:
        lost = "settings, forecast, speed, memory, and where the time went"
        run.lacks.append(
            (lost, f"there is no {RECORD_NAME}: whet's commands write it, and report_to='whet' of whet.Trainer")
        )
        return
    run.read_from.append(RECORD_NAME)
    run.begin, run.forecast, run.end = found.training.begin, found.training.forecast, found.training.end or {}
    run.steps = found.steps
    run.evaluations = _by_step((one.step, one.metrics, not one.apart) for one in found.evaluations)
    _read_changes(run, found.run)
    run.resumed_at = [one for attempt in found.run if isinstance(one := attempt.begin.get("resumed_from"), int)]
    run.seconds, run.seconds_of_last = _seconds(found.run), _seconds([found.training])
    if run.end:
        trained = [one for one in found.run if one.trains] or [found.training]
        peaks = [(peak, one) for one in trained if (peak := finite((one.end or {}).get("peak_bytes"))) is not None]
        if peaks:
            run.peak_bytes, highest = max(peaks, key=lambda pair: pair[0])
            run.peak_of = highest.peak_of
        run.train_s = found.trained_s


def _seconds(attempts: Sequence[Attempt]) -> dict[str, float]:
    found: dict[str, float] = {}
    for step in (one for attempt in attempts for one in attempt.steps):
        for part, seconds in step.seconds.items():
            found[part] = found.get(part, 0.0) + (seconds if math.isfinite(seconds) else 0.0)
    return found


def _read_changes(run: Run, attempts: Sequence[Attempt]) -> None:
    """Take when the model changed last, and what was measured since."""
    for attempt in attempts:
        if attempt.trains and run.changed_s is None:
            run.changed_s = number(attempt.begin.get("time"))
        if attempt.steps:
            run.changed_s, run.recorded = attempt.steps[-1].time, []
        since = attempt.steps[-1].time if attempt.steps else -math.inf
        run.recorded += [one.metrics for one in attempt.evaluations if one.time >= since]
        run.recorded += [attempt.end["metrics"]] if attempt.end else []


def _is_earlier(run: Run, path: Path, prefix: str) -> bool:
    """Return whether what the file says of a split is of an earlier model."""
    return run.changed_s is not None and prefix not in run.agreed and path.stat().st_mtime < run.changed_s


def _agrees(own: Mapping[str, Any], recorded: Mapping[str, Any]) -> bool:
    """Return whether the record has a metric of these, and none with another value."""
    both = own.keys() & recorded.keys()
    return bool(both) and all(str(own[name]).lower() == str(recorded[name]).lower() for name in both)


def seeds_in(folder: Path) -> list[str]:
    """Return the names of the folders of the seeds that the output folder's model is the best of; none without."""
    try:
        found = json.loads((folder / SEEDS).read_bytes())["metrics"]
    except (OSError, ValueError, TypeError, KeyError):
        return []
    return sorted(name for name in found if re.fullmatch(r"seed-\d+", name) and (folder / name).is_dir())


def _by_step(evaluations: Iterable[tuple[int, Mapping[str, Any], bool]]) -> dict[int, dict[str, Any]]:
    """Return the metrics of the validation split, by step, of evaluations of which each says whether its step is sure.

    Of two evaluations at one step, the later counts if it is: another one may be of other weights, or other data.
    """
    found: dict[int, dict[str, Any]] = {}
    for step, metrics, is_sure in evaluations:
        if judged := {name: value for name, value in metrics.items() if name.startswith("eval_")}:
            before = found.get(step, {})
            found[step] = before | judged if is_sure else judged | before
    return dict(sorted(found.items()))


def _read_history(run: Run) -> Mapping[str, Any]:
    """Take the log of a Trainer where the run has no record of its own; return the last metrics in it."""
    is_recorded = run.changed_s is not None or record.OTHER_MODEL in run.begin
    path = None if is_recorded else _state_file(run.folder)  # it may be the state of an earlier training
    state = {} if path is None else _object(path, run)
    history = state.get("log_history")
    entries = [one for one in history if isinstance(one, dict)] if isinstance(history, list) else []
    if path is None:
        if not run.steps:
            run.lacks.append(
                ("the curves of the training", f"there is no {STATE}: call trainer.save_state(), or train with whet")
            )
        return [*run.evaluations.values()][-1] if is_recorded and run.evaluations else {}
    run.read_from.append(str(path.relative_to(run.folder)))
    entries = [one for one in entries if isinstance(one.get("step"), int)]
    n_training = next((n for n, one in enumerate(entries) if "train_runtime" in one), len(entries))
    evaluations = _by_step((one["step"], one, n < n_training) for n, one in enumerate(entries))
    run.steps = run.steps or [_step(one, state.get("max_steps")) for one in entries if "loss" in one]
    run.evaluations = run.evaluations or evaluations
    final = [one for one in entries if "train_runtime" in one][-1:]
    metrics = [*final, *[*evaluations.values()][-1:]]
    return {name: value for one in metrics for name, value in one.items() if name not in ("step", "epoch")}


def _step(entry: Mapping[str, Any], of: Any) -> Step:
    known = {name: number(entry.get(name)) for name in ("epoch", "loss", "learning_rate", "grad_norm")}
    unknown = dict.fromkeys(("tokens_per_s", "rows_per_s", "resident_bytes", "eta_s"))
    steps = of if isinstance(of, int) else None
    return Step(time=math.nan, step=entry["step"], of=steps, seconds={}, **known, **unknown)


def _state_file(folder: Path) -> Path | None:
    """Return the state of the Trainer: the folder's own, or that of its newest checkpoint."""
    if _is_file(folder / STATE):
        return folder / STATE
    by_step = {
        int(step): path
        for path in folder.glob(f"checkpoint-*/{STATE}")
        if (step := path.parent.name.removeprefix("checkpoint-")).isdecimal()
        and _is_file(path)
        and not path.parent.is_symlink()
    }
    return by_step[max(by_step)] if by_step else None


def _read_metrics(run: Run, logged: Mapping[str, Any]) -> None:
    path = run.folder / RESULTS
    if _is_file(path):
        run.read_from.append(RESULTS)
        _take_results(run, path)
        return
    ended = run.end.get("metrics")
    run.metrics = dict(ended) if isinstance(ended, dict) else dict(logged)
    if not run.metrics:
        run.lacks.append(("the final metrics", f"there is no {RESULTS}: evaluate with --do_eval"))


def _take_results(run: Run, path: Path) -> None:
    """Take the results of each split, or what the record has of it if they are of an earlier model.

    A script adds results of one split to those of others: how old they are, the file of each split says.
    """
    by_split: dict[str, dict[str, Any]] = {}
    for name, value in _object(path, run).items():
        prefix = name.partition("_")[0]
        is_split = prefix in SPLITS or _is_file(path.with_name(f"{prefix}_results.json"))
        by_split.setdefault(prefix if is_split else "train", {})[name] = value
    run.agreed = {split for split, own in by_split.items() if any(_agrees(own, one) for one in run.recorded)}
    run.agreed |= {"start"} if "eval" in run.agreed else set()
    for split, own in by_split.items():
        file = path.with_name(f"{'eval' if split == 'start' else split}_results.json")
        if _is_earlier(run, file if _is_file(file) else path, split):
            words = SPLITS.get(split, split)
            run.lacks.append((f"what {path.name} says of the {words} split", "it is of an earlier model"))
            own = {name: value for one in run.recorded for name, value in one.items() if name.startswith(f"{split}_")}
        run.metrics |= own


def _read_examples(run: Run) -> None:
    for prefix, name in ERRORS.items():
        path, n_damaged = run.folder / name, 0
        if not _is_file(path) or _is_earlier(run, path, prefix):
            if prefix == "eval":
                how = "--do_eval writes it; for a trained model, --model_name_or_path OUT --do_eval without --do_train"
                if any(metric.startswith("eval_") for metric in run.metrics):
                    how = "the evaluation of this task writes none"
                run.lacks.append(("the examples that the model gets wrong", f"there is no {name}: {how}"))
            continue
        run.read_from.append(name)
        n_wrong, n_judged = (_counted(run, prefix, what) for what in ("wrong", "judged"))
        rows, n_lines, n_wrong_rows = [], 0, 0
        for row in _lines(path):
            n_lines += 1
            if row is None:
                n_damaged += 1
            elif len(rows) < WORST:
                rows.append(row)
                n_wrong_rows += n_lines <= (n_wrong or 0)
        if n_damaged:
            run.lacks.append((f"some examples of {name}", f"{n_damaged} of its lines are not JSON objects"))
        run.examples.append(Examples(prefix, name, rows, n_lines - len(rows), n_wrong, n_wrong_rows, n_judged))


def _counted(run: Run, prefix: str, what: str) -> int | None:
    """Return how many examples of the split are wrong, or judged; the name of the metric has a word for examples."""
    found = (value for name, value in run.metrics.items() if re.fullmatch(rf"{prefix}_[a-z]+_{what}", name))
    return next((value for value in found if isinstance(value, int)), None)


def _read_confusions(run: Run) -> None:
    for prefix in ERRORS:
        name = f"{prefix}_confusion.csv"
        path = run.folder / name
        if not _is_file(path) or _is_earlier(run, path, prefix):
            continue
        try:
            with path.open(encoding="utf-8", newline="") as file:
                (_, *labels), *rows = csv.reader(file)
            counts = [[int(count) for count in row[1:]] for row in rows]
        except (OSError, ValueError, csv.Error) as error:
            run.lacks.append((f"the confusion matrix of {name}", f"it cannot be read: {error}"))
            continue
        if not labels or [len(labels)] * len(labels) != [len(row) for row in counts]:
            run.lacks.append((f"the confusion matrix of {name}", "it has not as many rows as columns"))
            continue
        run.read_from.append(name)
        run.confusions.append(Confusion(prefix, name, labels, counts))


def _is_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _object(path: Path, run: Run) -> dict[str, Any]:
    """Return the JSON object of the file; an empty one, noted as lacking, if there is none."""
    try:
        return dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        run.lacks.append((f"what {path.name} says", f"it cannot be read: {error}"))
        return {}


def _lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """Yield the JSON object of each of the file's lines, however long that is; None for a line that is none."""
    with path.open("rb") as file:
        for line in filter(bytes.strip, file):
            try:
                found = json.loads(line)
            except (ValueError, RecursionError):
                found = None
            yield found if isinstance(found, dict) else None
