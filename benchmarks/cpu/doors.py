"""A step of the engine of the commands, of `whet.Trainer` and of transformers' Trainer, on the same rows by turns.

    python benchmarks/cpu/doors.py --data FOLDER_WITH_XQUAD

Question and context pairs for answers, and short texts with a class each, in batches of 12 rows and of 32. A step is
the time from the end of one to the end of the next, in processor time with --clock cpu; a turn is a training of 14
steps, of which the last ten count. Printed: the median step, and the ratio to the first door's in the same round
(median, least, most).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForQuestionAnswering, AutoModelForSequenceClassification, TrainerCallback

import whet
from bench import Bench
from whet.config.arguments import TrainingArguments
from whet.data.store import RowStore
from whet.engine.engine import Engine, RunSpec

N_STEPS, N_COUNTED = 14, 10


class Steps(TrainerCallback):
    """Notes when each step ended."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock, self.ends = clock, list[float]()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Note the end of a step."""
        self.ends.append(self.clock())

    @property
    def step_s(self) -> float:
        """The median step of those that count."""
        pairs = zip(self.ends[:-1], self.ends[1:], strict=True)
        return statistics.median([end - begin for begin, end in pairs][-N_COUNTED:])


def pad(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Return rows as one batch, padded to the longest."""
    longest = max(len(row["input_ids"]) for row in rows)
    found = {
        name: torch.tensor([[*row[name], *[0] * (longest - len(row[name]))] for row in rows])
        for name in rows[0]
        if isinstance(rows[0][name], list)
    }
    return found | {name: torch.tensor([row[name] for row in rows]) for name in rows[0] if name not in found}


def spans(store: RowStore, n_rows: int) -> list[dict[str, Any]]:
    """Return the first rows of a store as a script would have them."""
    found = []
    for number in range(n_rows):
        begin, end = int(store.cu_seqlens[number]), int(store.cu_seqlens[number + 1])
        row: dict[str, Any] = {name: column[begin:end].tolist() for name, column in store.tokens.items()}
        row["attention_mask"] = [1] * (end - begin)
        found.append(row | {name: int(column[number]) for name, column in store.labels.items()})
    return found


def classes(rows: list[dict[str, Any]], longest: int) -> list[dict[str, Any]]:
    """Return the beginnings of rows, up to so many tokens, each with a class."""
    return [
        {name: row[name][: 6 + number * 7 % longest] for name in ("input_ids", "attention_mask")}
        | {"labels": number % 2}
        for number, row in enumerate(rows)
    ]


def trained(door: str, make: Callable[[], Any], rows: Any, n_rows: int, precision: str, clock: Any) -> float:
    """Return the median step of one training."""
    steps = Steps(clock)
    common: dict[str, Any] = {
        "per_device_train_batch_size": n_rows, "max_steps": N_STEPS, "save_strategy": "no", "logging_strategy": "no",
        "use_cpu": True, "disable_tqdm": True, "report_to": "none", "bf16": precision == "bf16",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        given: dict[str, Any] = {"data_collator": pad, "train_dataset": rows, "callbacks": [steps]}
        if door == "engine":
            common |= {"padding_in_loss": "sampled"} if "start_positions" in rows[0] else {}
            args: Any = TrainingArguments(folder, precision=precision, **common)
            Engine(RunSpec(model=make(), args=args, **given)).train()
        elif door == "whet.Trainer":
            whet.Trainer(make(), whet.TrainingArguments(folder, precision=precision, **common), **given).train()
        else:
            transformers.Trainer(make(), transformers.TrainingArguments(folder, **common), **given).train()
    return steps.step_s


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with train.json of XQuAD")
    parser.add_argument("--models", nargs="+", default=["minilm"])
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--doors", nargs="+", default=["engine", "whet.Trainer", "transformers"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.clock == "cpu" else time.perf_counter
    with tempfile.TemporaryDirectory() as temporary:
        bench = Bench(options.data, Path(temporary), sys.executable, options.threads, n_questions=2000)
        store = RowStore.load(bench.train_rows)
        pairs = spans(store, 600)
        jobs: dict[str, tuple[Any, Any, int]] = {
            "answers": (AutoModelForQuestionAnswering, pairs, 12),
            "classes": (AutoModelForSequenceClassification, classes(pairs, 40), 32),
        }
        for model in options.models:
            for job, (auto, rows, n_rows) in jobs.items():
                make = lambda auto=auto, model=model: auto.from_pretrained(bench.model(model))  # noqa: E731
                for precision in options.precisions:
                    found: dict[str, list[float]] = {door: [] for door in options.doors}
                    for _ in range(options.rounds):
                        for door in options.doors:
                            found[door].append(trained(door, make, rows, n_rows, precision, clock))
                    for door, seconds in found.items():
                        ratios = [one / base for one, base in zip(seconds, found[options.doors[0]], strict=True)]
                        print(
                            f"{model}, {job}, {precision}: {door} {statistics.median(seconds):.3f} s, "
                            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
                            flush=True,
                        )


if __name__ == "__main__":
    main()
