"""When `whet plan` says that a run ends, and when it does: a run of five minutes and one of an hour.

    python benchmarks/plan/ends.py                 # both
    python benchmarks/plan/ends.py --minutes 5     # one of about so many minutes

BERT base's size learns to sort made-up texts, judged and saved four times on the way. The plan of twenty steps says how
many steps make the minutes; the plan of these is the forecast. Measured is the time on the clock from the command to
its end. The forecast that the run itself gives after its first seconds is next to it, with the time of its training.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import machine
from made_up import BERT_BASE, VOCABULARY, word, write_model

RESULTS = Path(__file__).with_name("ends.json")
N_ROWS = {"train": 8000, "validation": 320}
WORDS = (20, 240)
_TO_SIZE = 20
"""Steps of the plan that says how many make the minutes."""
_PARTS = 4
"""Evaluations and checkpoints of a run."""


@dataclass(frozen=True)
class End:
    """What was forecast for a run, and what it took, in seconds."""

    minutes: float
    steps: int
    planned_s: float
    """From the command to its end, by `whet plan`."""
    measured_s: float
    own_train_s: float | None
    """The training, as the run itself forecast it after its first seconds; None: it gave none."""
    train_s: float

    def line(self) -> str:
        """Return it as a line of text."""
        own = "none" if self.own_train_s is None else f"{self.own_train_s / self.train_s:.3f}"
        return (
            f"{self.minutes:g} min, {self.steps:,} steps: planned {self.planned_s:,.0f} s, took {self.measured_s:,.0f}"
            f" s (forecast / measured {self.planned_s / self.measured_s:.3f}); the run's own of its training {own}"
        )


def write_rows(path: Path, n_rows: int) -> None:
    """Write texts of made-up words with one of two labels, which the first word tells."""
    numbers = random.Random(path.name)
    with path.open("w", encoding="utf-8") as file:
        for n in range(n_rows):
            words = [word(numbers.randrange(VOCABULARY - 5)) for _ in range(numbers.randint(*WORDS))]
            file.write(json.dumps({"text": " ".join([word(n % 2), *words]), "label": "ab"[n % 2]}) + "\n")


def options(folder: Path, steps: int) -> list[str]:
    """Return the options of the run, after the name of its task."""
    each = str(max(steps // _PARTS, 1))
    return [
        "--model_name_or_path", str(folder / "bert"), "--train_file", str(folder / "train.jsonl"),
        "--validation_file", str(folder / "validation.jsonl"), "--max_seq_length", "256", "--do_train", "--do_eval",
        "--per_device_train_batch_size", "32", "--max_steps", str(steps), "--eval_strategy", "steps", "--eval_steps",
        each, "--save_strategy", "steps", "--save_steps", each, "--save_total_limit", "1", "--use_cpu",
        "--output_dir", str(folder / "out"), "--overwrite_output_dir",
    ]  # fmt: skip


def planned(folder: Path, steps: int) -> dict[str, Any]:
    """Return the time by the plan of so many steps."""
    words = [sys.executable, "-m", "whet", "plan", "classify", *options(folder, steps), "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)["time"]
    return found


def end(folder: Path, minutes: float) -> End:
    """Plan a run of so many minutes, and train it."""
    small = planned(folder, _TO_SIZE)
    other_s = small["total_s"] - _TO_SIZE * small["step_s"]
    steps = max(int((minutes * 60 - other_s) / small["step_s"]) // _PARTS * _PARTS, _PARTS)
    forecast_s = planned(folder, steps)["total_s"]
    print(f"{minutes:g} min: {steps:,} steps, forecast {forecast_s:,.0f} s", flush=True)
    begin_s = time.perf_counter()
    words = [sys.executable, "-m", "whet", "classify", *options(folder, steps)]
    with (folder / "output.txt").open("w") as output:
        status = subprocess.run(words, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
    measured_s = time.perf_counter() - begin_s
    if status:
        raise SystemExit((folder / "output.txt").read_text())
    events = [json.loads(line) for line in (folder / "out" / "run.jsonl").read_text("utf-8").splitlines()]
    last = max(n for n, event in enumerate(events) if event["event"] == "begin")
    own = next((event["forecast"]["train_s"] for event in events[last:] if event["event"] == "forecast"), None)
    took = json.loads((folder / "out" / "train_results.json").read_text("utf-8"))["train_runtime"]
    return End(minutes, steps, forecast_s, measured_s, own, took)


def main(words: Sequence[str] | None = None) -> None:
    """Run them, print what was forecast and what it took, and keep it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, nargs="+", default=[5.0, 60.0])
    asked = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="whet-bench-ends-") as made:
        folder = Path(made)
        write_model(folder / "bert", "bert", BERT_BASE, "AutoModelForSequenceClassification", n_positions=512)
        for name, n_rows in N_ROWS.items():
            write_rows(folder / f"{name}.jsonl", n_rows)
        for minutes in asked.minutes:
            found = end(folder, minutes)
            print(found.line(), flush=True)
            kept = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
            kept[f"{minutes:g} minutes"] = {"machine": machine.facts(), **asdict(found)}
            RESULTS.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
