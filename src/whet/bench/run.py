"""`whet bench-methods`: run, compare, show, write."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from whet import log
from whet.bench import plot, runs, show, table
from whet.bench.arguments import BenchArguments
from whet.bench.techniques import Base, choose
from whet.config.arguments import TrainingArguments
from whet.config.settings import refuse
from whet.errors import EXIT_OK, EXIT_OTHER, ConfigError, OutputError, WhetError
from whet.hardware import cpu
from whet.tasks.qa.arguments import QaArguments, check_run
from whet.train.output import files as output_files


def run_bench_methods(asked: BenchArguments, qa: QaArguments, args: TrainingArguments) -> int:
    """Print the table and write it; return 0, or 1 if losses that must be equal are not."""
    log.set_up()
    args = replace(args, do_train=True)
    refuse(check_run(qa, args))
    folder = _folder(args.output_dir)
    load = cpu.load()
    base = Base(runs.plain_settings(args, asked.warmup + asked.steps), qa.max_seq_length)

    def write(so_far: Sequence[runs.Row], *, finished: bool = False) -> None:
        report = _report(asked, qa, base, table.lines(so_far)) | {"load_before": load, "finished": finished}
        _write(folder / "methods.json", report)

    rows = runs.measure(asked, qa, base, choose(asked.only, asked.skip), write)
    if rows[0].error is not None:
        raise _plain_failed(rows[0].error)
    found = table.lines(rows)
    write(rows, finished=True)
    show.show(found, asked.warmup + asked.steps)
    print(f"written: {folder / 'methods.json'}", file=sys.stderr)
    _draw(found, f"{qa.model_name_or_path}: {asked.rounds} x {asked.steps} steps", folder / "methods.png")
    return EXIT_OTHER if any(line.equal is False for line in found) else EXIT_OK


def _report(asked: BenchArguments, qa: QaArguments, base: Base, found: Sequence[table.Line]) -> dict[str, Any]:
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


def _draw(found: Sequence[table.Line], title: str, path: Path) -> None:
    """Draw the picture, or print what it needs; the table does not depend on it."""
    try:
        plot.draw(found, title, path)
    except ConfigError as error:
        print(f"no picture: {error.problems[0].what}; {error.problems[0].fix}", file=sys.stderr)
    else:
        print(f"written: {path}", file=sys.stderr)


def _plain_failed(why: str) -> WhetError:
    return WhetError(
        what="the plain run failed",
        got=why,
        why="every technique is compared with it",
        fix="run whet qa --do_train with the same options but those of the measurement, such as --steps and --only; it "
        "reports more",
    )
