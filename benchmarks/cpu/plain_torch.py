"""What a machine without the native library pays: training steps of MiniLM's size with it and without it, in turns.

    python benchmarks/cpu/plain_torch.py --threads 2 --rounds 5 --json benchmarks/cpu/plain_torch.json

Each run is a process of its own, whole steps of whet's Trainer in fp32: 12 rows of 60 to 384 tokens (2,088 in all),
6 layers of width 384 with random weights, dropout 0.1. The second of a pair finds no library, as on a machine without
a compiler, and runs every operator in plain torch. `--clock cpu` counts the process's own time, for a busy machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

LENGTHS = [384, 290, 240, 210, 180, 160, 146, 130, 112, 96, 80, 60]
WIDTH, N_LAYERS, VOCABULARY = 384, 6, 30522
WARMUP = 2


def worker(asked: dict[str, Any]) -> None:
    """Train some steps with the library or without; print the seconds of each after the warm-up."""
    if not asked["native"]:
        os.environ["WHET_KERNELS"] = "reference"
    import torch
    from transformers import BertConfig, BertForQuestionAnswering, TrainerCallback

    from whet.config import arguments as settings
    from whet.engine.engine import Engine, RunSpec
    from whet.kernels import library

    torch.set_num_threads(asked["threads"])
    clock: Callable[[], float] = time.process_time if asked["clock"] == "cpu" else time.perf_counter
    ended_s: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ended_s.append(clock())

    torch.manual_seed(0)
    config = BertConfig(vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=N_LAYERS, num_attention_heads=12,
                        intermediate_size=4 * WIDTH)  # fmt: skip
    rows = [
        {"input_ids": torch.randint(5, VOCABULARY, (n,)).tolist(), "start_positions": n // 3, "end_positions": n // 2}
        for n in LENGTHS
    ]
    with tempfile.TemporaryDirectory() as folder:
        args = settings.TrainingArguments(
            output_dir=folder, use_cpu=True, precision="fp32", per_device_train_batch_size=len(LENGTHS),
            max_steps=WARMUP + asked["steps"], save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        model = BertForQuestionAnswering(config)
        Engine(RunSpec(model=model, args=args, train_dataset=rows, callbacks=[Clock()])).train()
    assert (library.library() is None) != asked["native"]
    seconds = [after - before for before, after in zip(ended_s[WARMUP - 1 : -1], ended_s[WARMUP:], strict=True)]
    print(json.dumps(seconds))


def run(asked: dict[str, Any]) -> float:
    """Return the median seconds of a step in a process of its own."""
    command = [sys.executable, __file__, "--worker", json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return statistics.median(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Print the medians and their ratio; write all with --json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(json.loads(args.worker))
        return
    asked = {"threads": args.threads, "steps": args.steps, "clock": args.clock}
    pairs = []
    for number in range(args.rounds):
        pairs.append([run({**asked, "native": native}) for native in (True, False)])
        print(f"round {number + 1}: native {pairs[-1][0]:.3f} s, plain torch {pairs[-1][1]:.3f} s", flush=True)
    ratios = [plain / native for native, plain in pairs]
    print(f"plain torch takes {statistics.median(ratios):.2f} times as long ({min(ratios):.2f} to {max(ratios):.2f})")
    if args.json:
        from machine import facts

        report = {**asked, "step_s": pairs, "ratio": statistics.median(ratios), "machine": facts()}
        args.json.write_text(json.dumps(report, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
