"""Which parts of the recipe for little data help: each part alone, in pairs of runs with the same seed.

    python benchmarks/recipes/few_samples.py --data FOLDER --jobs intents
    python benchmarks/recipes/few_samples.py --data FOLDER --jobs questions --seeds 1 2 3 --parts updates compound
    python benchmarks/recipes/few_samples.py --data FOLDER --jobs intents --parts recipe
    python benchmarks/recipes/few_samples.py --table

FOLDER holds the folders banking77 and xquad. MiniLM is trained in bf16 through `whet classify` and `whet qa`:

- intents: 10 examples of each of the 77 labels of BANKING77, batches of 16, learning rate 2e-4; accuracy on every
  second row of its test set. Three epochs are 147 updates (`defaults`); the other parts take 300.
- questions: 300 training questions of XQuAD about paragraphs of at most 110 words, batches of 4, learning rate 1e-4; F1
  on dev.json. All parts take 200 updates, so that runs are short: this job does not judge the number of updates.

A seed stands for the examples that are drawn, the new weights of the head and the order of the rows. Each part is
compared with another one, seed by seed; the interval is Student's, at 95 %. Runs are kept in few_samples.json as they
end; runs that are there are not repeated, so the script continues where it was stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "xquad"))
from machine import facts
from run import MODEL
from study import interval

from whet.cli.main import run as whet

RESULTS = Path(__file__).with_name("few_samples.json")
SEEDS = tuple(range(1, 9))
N_QUESTIONS, N_OF_EACH_LABEL, MOST_WORDS = 300, 10, 110
WARMUP = ("--warmup_steps", "0.1")


@dataclass(frozen=True)
class Part:
    """Settings, and the part that they are compared with."""

    flags: tuple[str, ...] = ()
    against: str = "updates"
    jobs: tuple[str, ...] = ("intents", "questions")
    of_length: bool = True
    """Whether the run is as long as the job says, and not as long as these settings or the defaults say."""


PARTS: Mapping[str, Part] = {
    "defaults": Part(against="", jobs=("intents",), of_length=False),
    "updates": Part(against="defaults"),
    "warmup": Part(WARMUP),
    "layer_rates": Part(("--layerwise_lr_decay", "0.9")),
    "new_layer": Part(("--reinit_layers", "1")),
    "average": Part(
        (*WARMUP, "--weight_averaging_start", "0.5", "--lr_scheduler_type", "constant_with_warmup"), against="warmup"
    ),
    "compound": Part(("--span_loss", "compound"), jobs=("questions",)),
    "recipe": Part(("--recipe", "few_samples"), against="defaults", jobs=("intents",), of_length=False),
}


@dataclass(frozen=True)
class Job:
    """A training: its command, its flags, its length, and the metric that judges it."""

    command: str
    flags: tuple[str, ...]
    length: tuple[str, ...]
    metric: str
    unit: float
    """What makes points of the metric."""


JOBS = {
    "intents": Job(
        "classify",
        ("--max_seq_length", "128", "--per_device_train_batch_size", "16", "--learning_rate", "2e-4",
         "--text_column_names", "text", "--label_column_name", "category"),
        ("--min_steps", "300"), "eval_accuracy", 100.0,
    ),
    "questions": Job(
        "qa",
        ("--max_seq_length", "384", "--doc_stride", "128", "--per_device_train_batch_size", "4",
         "--learning_rate", "1e-4"),
        ("--max_steps", "200"), "eval_f1", 1.0,
    ),
}  # fmt: skip


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write_rows(path: Path, rows: Sequence[dict[str, str]]) -> Path:
    """Write the rows to a CSV file; return its path."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_intents(data: Path, seed: int, folder: Path) -> tuple[Path, Path]:
    """Write the examples of the seed; return the files to train and to evaluate on."""
    rows, tested = (read_rows(data / "banking77" / f"{name}.csv") for name in ("train", "test"))
    draws, of_label = random.Random(seed), dict[str, list[dict[str, str]]]()
    for row in rows:
        of_label.setdefault(row["category"], []).append(row)
    chosen = [row for label in sorted(of_label) for row in draws.sample(of_label[label], N_OF_EACH_LABEL)]
    return write_rows(folder / "train.csv", chosen), write_rows(folder / "test.csv", tested[::2])


def write_questions(data: Path, seed: int, folder: Path) -> tuple[Path, Path]:
    """Write the questions of the seed; return the files to train and to evaluate on."""
    articles = json.loads((data / "xquad" / "train.json").read_text("utf-8"))["data"]
    paragraphs = [
        one for article in articles for one in article["paragraphs"] if len(one["context"].split()) <= MOST_WORDS
    ]
    asked = [(paragraph["context"], question) for paragraph in paragraphs for question in paragraph["qas"]]
    chosen = [
        {"context": context, "qas": [question]} for context, question in random.Random(seed).sample(asked, N_QUESTIONS)
    ]
    path = folder / "train.json"
    path.write_text(json.dumps({"version": "1.1", "data": [{"title": "", "paragraphs": chosen}]}), "utf-8")
    return path, data / "xquad" / "dev.json"


WRITERS = {"intents": write_intents, "questions": write_questions}


def train(name: str, part: str, seed: int, data: Path) -> dict[str, Any]:
    """Train and evaluate; return the quality, the steps, the mean loss and the seconds of training."""
    job = JOBS[name]
    with tempfile.TemporaryDirectory() as temporary:
        train_file, validation_file = WRITERS[name](data, seed, Path(temporary))
        out = Path(temporary) / "out"
        words = [
            *(job.command, "--model_name_or_path", str(MODEL), "--output_dir", str(out), "--do_train", "--do_eval"),
            *("--train_file", str(train_file), "--validation_file", str(validation_file), "--seed", str(seed)),
            *("--save_strategy", "no", "--bf16", "--use_cpu", "--per_device_eval_batch_size", "32"),
            *("--logging_strategy", "no", "--log_level", "warning"),
            *job.flags, *(job.length if PARTS[part].of_length else ()), *PARTS[part].flags,
        ]  # fmt: skip
        shown, began_s = io.StringIO(), time.process_time()
        with contextlib.redirect_stdout(shown):
            code = whet(words)
        if code:
            raise SystemExit(f"whet {' '.join(words)} ended with {code}\n{shown.getvalue()}")
        found = json.loads((out / "all_results.json").read_text("utf-8"))
        state = json.loads((out / "trainer_state.json").read_text("utf-8"))
    return {
        "quality": found[job.metric] * job.unit, "steps": state["global_step"], "train_loss": found["train_loss"],
        "seconds": found["train_runtime"], "processor_seconds": time.process_time() - began_s,
        "load": os.getloadavg()[0], "machine": facts(),
    }  # fmt: skip


def kept() -> dict[str, Any]:
    """Return the runs on file: job -> part -> seed -> what was found."""
    return json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}


def record(job: str, part: str, seed: int, found: Mapping[str, Any]) -> None:
    """Add one run to few_samples.json; several processes may do so at once."""
    with FileLock(RESULTS.with_suffix(".lock")):
        results = kept()
        results.setdefault(job, {}).setdefault(part, {})[str(seed)] = found
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", "utf-8")


def run_all(data: Path, jobs: Sequence[str], parts: Sequence[str], seeds: Sequence[int]) -> None:
    """Run what is missing, seed by seed, and keep each run."""
    for seed in seeds:
        for job in jobs:
            for part in (one for one in parts if job in PARTS[one].jobs):
                if str(seed) in kept().get(job, {}).get(part, {}):
                    continue
                found = train(job, part, seed, data)
                record(job, part, seed, found)
                print(f"{job} {part} seed {seed}: {found['quality']:.2f} in {found['seconds']:.0f} s", flush=True)


def table() -> list[str]:
    """Return the lines of the table: mean and spread of each part, and its difference from the part next to it."""
    lines = [
        "| job | part | mean | standard deviation | difference, 95 % interval | seeds | updates |",
        "|---|---|---|---|---|---|---|",
    ]
    for job, found in kept().items():
        for part in (one for one in PARTS if one in found):
            runs, other = found[part], PARTS[part].against
            scores = [run["quality"] for run in runs.values()]
            both = sorted(runs.keys() & found.get(other, {}).keys(), key=int)
            difference = ""
            if len(both) > 1:
                pairs = [runs[seed]["quality"] - found[other][seed]["quality"] for seed in both]
                mean, half = interval(pairs)
                difference = f"{mean:+.2f} ± {half:.2f} from {other}"
            spread = f"{statistics.stdev(scores):.2f}" if len(scores) > 1 else ""
            steps = statistics.median(run["steps"] for run in runs.values())
            lines.append(
                f"| {job} | {part} | {statistics.mean(scores):.2f} | {spread} | {difference} | {len(scores)} | "
                f"{steps:.0f} |"
            )
    return lines


def main() -> None:
    """Run the parts that are missing, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with banking77 and xquad")
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[one for one in PARTS if one != "recipe"])
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--table", action="store_true", help="print what is on file, train nothing")
    options = parser.parse_args()
    if options.table:
        print("\n".join(table()))
    elif options.data is None:
        parser.error("--data is needed to train")
    else:
        run_all(options.data.resolve(), options.jobs, options.parts, options.seeds)


if __name__ == "__main__":
    main()
