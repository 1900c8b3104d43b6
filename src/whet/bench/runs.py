"""The runs behind the table: each technique in its own process, in alternating order, round by round."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whet.bench.arguments import BenchArguments
from whet.bench.techniques import PLAIN, Base, Technique, why_not
from whet.config.arguments import TrainingArguments
from whet.config.settings import options_of
from whet.errors import hide_secrets
from whet.log import logger
from whet.tasks.qa.arguments import QaArguments

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
    """What each round measured (`whet.bench.child.measure`)."""

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
        command = [sys.executable, "-m", "whet.bench.child", str(result)]
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
        why = " (out of memory?)" if -done.returncode == signal.SIGKILL else ""
        return f"ended by {signal.Signals(-done.returncode).name}{why}"
    last = [line for line in done.stderr.splitlines() if line.strip()]
    return hide_secrets(f"ended with exit code {done.returncode}: {last[-1] if last else 'no message'}")
