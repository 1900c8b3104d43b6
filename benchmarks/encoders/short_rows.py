"""How fast MiniLM trains on short rows once training is under way: batches of 8, 16 and 32 intents.

    python benchmarks/encoders/short_rows.py --data FOLDER --peers .venv-peers/bin/python

FOLDER holds banking77. Each side trains in a process of its own, the sides by turns: transformers' Trainer with its
best options (rows grouped by length, fused AdamW, bf16 or fp32), and whet, on the same batches. A run takes 90 steps in
a row, of which the first 30 do not count: until then both get memory from the system. (`steps.py` takes single steps
with pauses in between, which short steps notice.) A line has the medians over runs of a run's median step, and the
ratio with its range over pairs of runs. Where torch has no bf16 products for the processor, fp32 alone is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from encoder_worker import build
from jobs import JOBS, make_model, tokenizer_of
from machine import has_bf16_products
from transformers import TrainerCallback

N_STEPS, N_WARM = 90, 30
SIZES = (8, 16, 32)
FORMATS = {"bf16": ("best_bf16", "whet_auto"), "fp32": ("best_fp32", "whet_fp32")}


class Clock(TrainerCallback):
    """Notes when each step ends."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter())


def one(options: argparse.Namespace) -> None:
    """Train in this process and print the milliseconds of the median step."""
    trainer, clock = build(options, json.loads(options.batches.read_text("utf-8"))), Clock()
    trainer.add_callback(clock)
    trainer.train()
    ends = clock.ends[N_WARM:]
    print(json.dumps(1000 * statistics.median(b - a for a, b in pairwise(ends))))


def run(side: str, python: str, threads: int, folder: Path) -> float:
    """Train one side in a process of its own; return the milliseconds of its median step."""
    given = {
        "--one": side,
        "--model": folder / "model",
        "--batches": folder / "batches.json",
        "--folder": folder / side,
    }
    words = [word for option in given.items() for word in option]
    command = [python, __file__, *map(str, words)]
    env = os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def batches_of(rows: list[Any], size: int) -> list[list[Any]]:
    """Return batches of rows of like length, in random order."""
    ordered = sorted(rows[: 2 * size * N_STEPS], key=lambda row: len(row["input_ids"]))
    split = [ordered[at : at + size] for at in range(0, len(ordered) - size + 1, size)]
    return [[dict(row) for row in batch] for batch in random.Random(1).sample(split, min(N_STEPS, len(split)))]


def main() -> None:
    """Run the sides by turns and print a line for each size and format."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with banking77")
    parser.add_argument("--peers", default=".venv-peers/bin/python", help="Python of the peers' environment")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    for hidden in ("--one", "--model", "--folder"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--batches", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        options.side, options.head = options.one, JOBS["intents"].head
        one(options)
        return
    if options.data is None:
        parser.error("--data is needed: the folder with banking77")
    rows = list(JOBS["intents"].rows(options.data, tokenizer_of("minilm")))
    with tempfile.TemporaryDirectory(prefix="whet-bench-") as name:
        folder = Path(name)
        make_model("minilm", JOBS["intents"], folder / "model")
        for size in SIZES:
            batches = batches_of(rows, size)
            (folder / "batches.json").write_text(json.dumps(batches), "utf-8")
            n_tokens = statistics.mean(sum(len(row["input_ids"]) for row in batch) for batch in batches)
            for kind, (peer, whet) in FORMATS.items():
                if kind == "bf16" and not has_bf16_products():
                    continue
                pythons = {peer: options.peers, whet: sys.executable}
                found: dict[str, list[float]] = {peer: [], whet: []}
                for number in range(options.rounds):
                    for side in list(pythons)[:: 1 if number % 2 else -1]:
                        found[side].append(run(side, pythons[side], options.threads, folder))
                ratios = [a / b for a, b in zip(found[peer], found[whet], strict=True)]
                medians = ", ".join(f"{side} {statistics.median(times):.1f} ms" for side, times in found.items())
                print(
                    f"{size:2} rows, {n_tokens:.0f} tokens, {kind}: {medians}; {statistics.median(ratios):.2f}x"
                    f" ({min(ratios):.2f} to {max(ratios):.2f})",
                    flush=True,
                )


if __name__ == "__main__":
    main()
