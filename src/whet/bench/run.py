"""`whet bench-methods`: run the techniques in turns, compare, show, draw, write."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from whet import json_output, log, system
from whet.bench.arguments import BenchArguments
from whet.bench.techniques import PLAIN, Base, Technique, choose, why_not
from whet.config.arguments import TrainingArguments
from whet.config.settings import options_of, refuse
from whet.errors import EXIT_OK, EXIT_OTHER, OutputError, WhetError, hide_secrets
from whet.hardware import cpu
from whet.log import logger
from whet.strict_json import number_or_null
from whet.tasks.qa.arguments import QaArguments
from whet.tasks.qa.task import TASK
from whet.watch import files as output_files

_MIB = 2**20
_FILE_COLUMNS = 160


def show(found: Sequence[Line], n_steps: int) -> None:
    """Print the table to standard output: measurements, and what the guides say."""
    table = Table(caption="loss: = must equal another technique's, and does; != must and does not", box=None)
    for heading, justify in (
        ("technique", "left"),
        ("steps/s", "right"),
        ("of plain", "right"),
        ("peak MiB", "right"),
        ("of plain", "right"),
        (f"loss after {n_steps}", "right"),
        ("", "left"),
        ("the guides' claim, or the error", "left"),
    ):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for line in found:
        table.add_row(*cells(line))
    # A file or a pipe has no terminal width.
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else _FILE_COLUMNS, markup=False).print(table)


def cells(line: Line) -> list[str]:
    """Return the cells of one line of the table."""
    return [
        line.name,
        _shown(line.steps_per_s, "{:.2f}"),
        _shown(line.speed_ratio, "{:.2f}x"),
        _shown(None if line.peak_bytes is None else line.peak_bytes / _MIB, "{:,.0f}"),
        _shown(line.peak_ratio, "{:.2f}x"),
        _shown(line.loss, "{:.4f}"),
        {None: "", True: "=", False: "!="}[line.equal],
        _words(line),
    ]


def _words(line: Line) -> str:
    if line.error is not None:
        return f"{'WRONG' if line.equal is False else 'CANNOT RUN'}: {line.error}"
    return f"skipped: {line.skipped}" if line.skipped is not None else line.claim


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


_MOST_BARS = 3
"""In each half of the picture; the table shows every technique."""
_CLEARLY = 0.05
"""How far a ratio must be from the plain run's to be shown: smaller differences come from a busy machine."""
_SPEED_COLOUR, _MEMORY_COLOUR, _INK = "#0b6bcb", "#d9580d", "#1f2328"


def draw(found: Sequence[Line], title: str, path: Path) -> None:
    """Write the picture."""
    from matplotlib.figure import Figure

    faster, smaller = fastest(found), smallest(found)
    figure = Figure(figsize=(10, 3.4), layout="constrained", facecolor="white")
    figure.suptitle(finding(faster, smaller), fontsize=13, weight="bold", x=0.01, ha="left", color=_INK)
    figure.supxlabel(f"{title}; plain = 1", fontsize=9, x=0.01, ha="left", color=_INK)
    speed, memory = figure.subplots(1, 2)
    _bars(speed, faster, "steps per second (longer is better)", _SPEED_COLOUR)
    _bars(memory, smaller, "peak memory (shorter is better)", _MEMORY_COLOUR)
    figure.savefig(path, dpi=140)


def fastest(found: Sequence[Line]) -> list[tuple[str, float]]:
    """Return the techniques that are clearly faster than the plain run, with the ratio, fastest first."""
    ratios = [(line.name, line.speed_ratio or 0.0) for line in found if line.equal is not False]
    return sorted([one for one in ratios if one[1] >= 1 + _CLEARLY], key=lambda one: -one[1])[:_MOST_BARS]


def smallest(found: Sequence[Line]) -> list[tuple[str, float]]:
    """Return the techniques that take clearly less memory than the plain run, with the ratio, smallest first."""
    ratios = [(line.name, line.peak_ratio or 1.0) for line in found if line.equal is not False]
    return sorted([one for one in ratios if one[1] <= 1 - _CLEARLY], key=lambda one: one[1])[:_MOST_BARS]


def finding(faster: Sequence[tuple[str, float]], smaller: Sequence[tuple[str, float]]) -> str:
    """Return what the picture shows, in one sentence."""
    parts = [f"{name} trains {ratio:.2f} times as fast as the plain run" for name, ratio in faster[:1]]
    parts += [f"{name} takes {ratio:.2f} of its memory" for name, ratio in smaller[:1]]
    return ",\n".join(parts) or "No technique is clearly faster or smaller than the plain run"


def _bars(axes: Any, shown: Sequence[tuple[str, float]], title: str, colour: str) -> None:
    names, values = [name for name, _ in shown], [ratio for _, ratio in shown]
    axes.set_title(title, fontsize=10, loc="left", color=_INK)
    axes.barh(range(len(shown)), values, color=colour, height=0.6)
    axes.axvline(1.0, color=_INK, linewidth=1, linestyle=":")
    axes.set_yticks(range(len(shown)), names, fontsize=10)
    axes.set_ylim(_MOST_BARS - 0.4, -0.6)
    for at, ratio in enumerate(values):
        axes.annotate(
            f"{ratio:.2f}",
            (0, at),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            color="white",
            weight="bold",
        )
    axes.set_xlim(0, 1.05 * max([1.0, *values]))
    axes.tick_params(length=0, colors=_INK)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)


_MEASURED = {
    "do_train": True, "do_eval": False, "do_predict": False, "eval_strategy": "no", "eval_on_start": False,
    "save_strategy": "no", "load_best_model_at_end": False, "resume_from_checkpoint": None,
    "overwrite_output_dir": False, "logging_strategy": "steps", "logging_steps": 1, "report_to": (),
    "disable_tqdm": True, "profile": False,
}  # fmt: skip
"""Settings of every run: train, log each step, and do nothing else."""


@dataclass
class Row:
    """A technique and its runs."""

    technique: Technique
    skipped: str | None = None
    """Why it was not tried or was refused, mostly because this machine lacks something."""
    error: str | None = None
    """The error that ended its run; it is not tried again."""
    runs: list[dict[str, Any]] = field(default_factory=list)
    """What each round measured (`whet.bench.__main__.measure`)."""

    @property
    def works(self) -> bool:
        """Whether it has results, or may still get some."""
        return self.skipped is None and self.error is None


def plain_settings(args: TrainingArguments, n_steps: int) -> dict[str, Any]:
    """Return the fields of the plain run: the user's, in fp32 by default, without saving or evaluating.

    Every step is logged, because its loss is compared.
    """
    own: dict[str, Any] = {name: getattr(args, name) for name in options_of(TrainingArguments)}
    precision = "fp32" if args.precision == "auto" else args.precision
    length = {"max_steps": n_steps, "min_steps": None, "recipe": None}  # the other values of a recipe are kept
    return own | _MEASURED | length | {"precision": precision, "bf16": None, "fp16": None}


def measure(
    asked: BenchArguments,
    qa: QaArguments,
    base: Base,
    techniques: Sequence[Technique],
    after_run: Callable[[Sequence[Row]], None] = lambda _: None,
) -> list[Row]:
    """Return a row for each technique, with one run per round; the first technique is the plain one.

    `after_run` gets the rows so far after each run.
    """
    rows = [Row(technique, skipped=why_not(technique, base)) for technique in techniques]
    secret = {name: getattr(qa, name) for name in options_of(QaArguments)}  # in a pipe: a command line shows it
    for number in range(asked.rounds):
        for row in _in_turn(rows, number):
            changes = row.technique.changes(base)
            logger.info("round %d of %d: %s", number + 1, asked.rounds, row.technique.name)
            told = run_child(
                {"qa": secret, "args": {**base.settings, **changes}, "warmup": asked.warmup}, asked.limit_s
            )
            _take(row, told)
            if not rows[0].works:
                return rows
            after_run(rows)
    return rows


def _take(row: Row, result: dict[str, Any]) -> None:
    """Store the result of a run in its row: its measurements, why whet refuses it here, or its error."""
    if "error" not in result:
        row.runs.append(result)
    elif result.get("refused") and row.technique.name != PLAIN:
        row.skipped = f"{result['error']} ({result['why']})"
    else:
        row.error = result["error"]


def _in_turn(rows: Sequence[Row], number: int) -> Iterator[Row]:
    """Yield the rows that still work, every other round in reverse: a machine that slows down affects all alike."""
    ordered = [rows[0], *(rows[:0:-1] if number % 2 else rows[1:])]
    return (row for row in ordered if row.works)


def run_child(spec: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
    """Return the measurements of a child process with these settings, or {"error": its first line}."""
    with tempfile.TemporaryDirectory(prefix="whet-bench-") as folder:
        result = Path(folder) / "result.json"
        words = json.dumps({**spec, "args": {**spec["args"], "output_dir": f"{folder}/run"}})
        command = system.python("-m", "whet.bench", str(result))
        try:
            done = subprocess.run(  # noqa: S603
                command, input=words, capture_output=True, text=True, timeout=limit_s, check=False, errors="replace"
            )
        except subprocess.TimeoutExpired:
            return {"error": f"not finished after {limit_s:g} s (--limit_s)"}
        if result.is_file():
            return json.loads(result.read_text("utf-8"))
        return {"error": _ending(done)}


def _ending(done: subprocess.CompletedProcess[str]) -> str:
    """Return how a process without a result ended."""
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        return f"ended by {name}{' (out of memory?)' if name == 'SIGKILL' else ''}"
    last = [line for line in done.stderr.splitlines() if line.strip()]
    return hide_secrets(f"ended with exit code {done.returncode}: {last[-1] if last else 'no message'}")


def run_bench_methods(asked: BenchArguments, qa: QaArguments, args: TrainingArguments) -> int:
    """Print the table and write it; return 0, or 1 if losses that must be equal are not."""
    log.set_up()
    args = replace(args, do_train=True)
    refuse(TASK.problems(qa, args))
    folder = _folder(args.output_dir)
    load = cpu.load()
    base = Base(plain_settings(args, asked.warmup + asked.steps), qa.max_seq_length)

    def write(so_far: Sequence[Row], *, finished: bool = False) -> None:
        report = _report(asked, qa, base, lines(so_far)) | {"load_before": load, "finished": finished}
        _write(folder / "methods.json", report)

    rows = measure(asked, qa, base, choose(asked.only, asked.skip), write)
    if rows[0].error is not None:
        raise _plain_failed(rows[0].error)
    found = lines(rows)
    write(rows, finished=True)
    json_output.add(techniques=[line.to_dict() for line in found])
    json_output.add_outputs(measurements=folder / "methods.json", picture=folder / "methods.png")
    show(found, asked.warmup + asked.steps)
    draw(found, f"{qa.model_name_or_path}: {asked.rounds} x {asked.steps} steps", folder / "methods.png")
    print(f"written: {folder / 'methods.json'} and methods.png", file=sys.stderr)
    return EXIT_OTHER if any(line.equal is False for line in found) else EXIT_OK


def _report(asked: BenchArguments, qa: QaArguments, base: Base, found: Sequence[Line]) -> dict[str, Any]:
    """Return the figures, and everything needed to repeat them."""
    args = TrainingArguments(**base.settings)
    return {
        "machine": {"processor": cpu.model_name(), "usable_cores": cpu.usable_cores(), **found[0].runs[0]["facts"]},
        "steps": asked.steps,
        "warmup": asked.warmup,
        "rounds": asked.rounds,
        "qa": qa.to_dict(),
        "plain": args.to_dict(),
        "techniques": [line.to_dict() for line in found],
    }


def _folder(name: str) -> Path:
    try:
        Path(name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            what="the output folder cannot be created",
            got=str(error),
            why="methods.json and methods.png are written there",
            fix="use another --output_dir",
        ) from error
    return Path(name)


def _write(path: Path, report: dict[str, Any]) -> None:
    """Replace the file atomically, so that a stopped command keeps its measurements."""
    with output_files.stored(f"{path.name} cannot be written", path.parent):
        output_files.write_text(path, json.dumps(report, indent=2) + "\n")


def _plain_failed(why: str) -> WhetError:
    return WhetError(
        what="the plain run failed",
        got=why,
        why="every technique is compared with it",
        fix="run whet qa --do_train with the same options but those of the measurement, such as --steps and --only; it "
        "reports more",
    )


TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 2e-2, "int8": 5e-2}
"""Relative difference allowed between losses that must be equal. Sums in another order differ by 1e-7 (fp32) or 4e-3
(half precision) in a product, and by 1e-2 in 8 bits because of stochastic rounding. AdamW divides by gradients that are
near 0 at the start, so the difference grows over the steps."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of the table; None for a value that was not measured."""

    name: str
    claim: str
    error: str | None = None
    skipped: str | None = None
    steps_per_s: float | None = None
    speed_ratio: float | None = None
    """Steps per second, divided by those of the plain run in the same round."""
    peak_bytes: int | None = None
    """Peak memory of model and training, above what the process held before the model was loaded."""
    peak_ratio: float | None = None
    loss: float | None = None
    """The loss of the last step."""
    losses: tuple[float, ...] = ()
    equal_to: str | None = None
    equal: bool | None = None
    """Whether the losses equal those of `equal_to`, to rounding."""
    largest_difference: float | None = None
    """Largest relative difference of a loss from that of `equal_to`."""
    precision: str | None = None
    runs: tuple[Mapping[str, Any], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return every field, ready for JSON; NaN and infinities become null."""
        fields = asdict(self)
        fields["losses"] = [number_or_null(loss) for loss in self.losses]
        fields["loss"] = number_or_null(self.loss)
        fields["largest_difference"] = number_or_null(self.largest_difference)
        fields["runs"] = [{**run, "losses": [number_or_null(loss) for loss in run["losses"]]} for run in self.runs]
        return fields


def lines(rows: Sequence[Row]) -> list[Line]:
    """Return the table; the first row is the plain run."""
    by_name = {row.technique.name: row for row in rows}
    return [_line(row, rows[0], by_name) for row in rows]


def _line(row: Row, plain: Row, by_name: Mapping[str, Row]) -> Line:
    one = row.technique
    if not row.works or not row.runs:
        return Line(name=one.name, claim=one.claim, error=row.error, skipped=row.skipped, equal_to=one.equal_to)
    pairs = list(zip(row.runs, plain.runs, strict=False))
    losses = tuple(row.runs[0]["losses"])
    other = by_name[one.equal_to] if one.equal_to else None
    differs = largest_difference(losses, other.runs[0]["losses"]) if other is not None and other.runs else None
    allowed = TOLERANCE.get(row.runs[0]["precision"], TOLERANCE["fp32"])
    equal = None if differs is None else differs <= allowed
    peaks = [run["peak_bytes"] for run in row.runs if run["peak_bytes"] is not None]
    return Line(
        name=one.name,
        claim=one.claim,
        error=None if equal in (None, True) else _unequal(one.equal_to, differs),
        steps_per_s=median(steps_per_s(run) for run in row.runs),
        speed_ratio=median(steps_per_s(run) / steps_per_s(plain_run) for run, plain_run in pairs),
        peak_bytes=int(median(peaks)) if peaks else None,
        peak_ratio=_peak_ratio(pairs),
        loss=losses[-1] if losses else None,
        losses=losses,
        equal_to=one.equal_to,
        equal=equal,
        largest_difference=differs,
        precision=row.runs[0]["precision"],
        runs=tuple(row.runs),
    )


def steps_per_s(run: Mapping[str, Any]) -> float:
    """Return the speed of one run: all timed steps together, because some techniques act only at some steps."""
    return len(run["step_s"]) / max(sum(run["step_s"]), 1e-9)


def largest_difference(losses: Sequence[float], wanted: Sequence[float]) -> float:
    """Return the largest relative difference of a loss from the loss it must be equal to; infinite for NaN."""
    if len(losses) != len(wanted) or not losses:
        return math.inf
    gaps = [abs(a - b) / max(abs(b), 1e-9) for a, b in zip(losses, wanted, strict=True)]
    return math.inf if any(math.isnan(gap) for gap in gaps) else max(gaps)


def _peak_ratio(pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> float | None:
    known = [
        run["peak_bytes"] / plain_run["peak_bytes"]
        for run, plain_run in pairs
        if run["peak_bytes"] is not None and plain_run["peak_bytes"]
    ]
    return median(known) if known else None


def _unequal(name: str | None, differs: float | None) -> str:
    return f"its losses must equal those of {name}, and differ by up to {differs or 0:.2g} of them"
