"""Whole training steps of whet in fp32, bf16 and int8, in turns: medians of seconds, and fp32's time over the others'.

    python benchmarks/cpu/int8.py --threads 2 --rounds 7 --json int8.json
    python benchmarks/cpu/int8.py --threads 1 --clock cpu        # processor time, on a machine with other work

With WHET_ISA=v4 it measures a processor without the instructions for bf16, with v3 one without AVX-512.

12 rows of 60 to 288 random tokens (2,088 in all, as many as twelve rows of XQuAD have), dropout on, clipping and AdamW
in the step. The models have random weights: BERT-base's size, and MiniLM's (6 layers of 384).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForQuestionAnswering

from whet.config import arguments as settings
from whet.data.store import RowStore
from whet.engine import step
from whet.engine.engine import Engine, RunSpec
from whet.engine.update import ClipInOwnPass
from whet.kernels.adamw import gradient_norm
from whet.optim import registry
from whet.precision import policy

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from machine import facts

SIZES: dict[str, dict[str, int]] = {
    "bert-base": {},
    "minilm": {
        "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536,
    },
}  # fmt: skip
FORMATS = ("fp32", "bf16", "int8")
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def rows() -> RowStore:
    """Return twelve rows of evenly spread lengths, 174 on average."""
    lengths = np.linspace(60, 288, 12).round().astype(np.int64)
    starts = np.concatenate([[0], lengths.cumsum()])
    ids = np.random.default_rng(0).integers(1000, 30_000, starts[-1])
    tokens = {"input_ids": ids, "token_type_ids": np.zeros_like(ids)}
    return RowStore(starts, tokens, {"start_positions": lengths // 3, "end_positions": lengths // 2})


def steps(size: str, folder: str) -> dict[str, Callable[[int], float]]:
    """Return a training step of one model in each format; it takes the step's number and returns the loss."""
    torch.manual_seed(0)
    model = AutoModelForQuestionAnswering.from_config(AutoConfig.for_model("bert", **SIZES[size]))
    data = rows()
    args = settings.TrainingArguments(output_dir=folder, precision="fp32", learning_rate=3e-5, use_cpu=True)
    trainer = Engine(RunSpec(model=model, args=args, train_dataset=data))
    optimizer = registry.build(model, args)
    parameters = list(model.parameters())
    clip = ClipInOwnPass(parameters)
    batch = trainer.objective.batch(data, range(12), 0)
    model.train()

    def one(precision: policy.Precision, number: int) -> float:
        loss = step.ObjectiveGradients(objective=trainer.objective, precision=precision, seed=1)([batch], number).total
        norm = gradient_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        clip.prepare(min(1.0, 1.0 / (norm + 1e-6)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss)

    return {name: partial(one, policy.make(name, trainer.device)) for name in FORMATS}


def alternate(
    ways: dict[str, Callable[[int], float]], n_rounds: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Return the seconds of each way, round by round; the first round warms caches and counts not."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(n_rounds + 1):
        for name, run in ways.items():
            started_s = clock()
            run(number)
            if number:
                seconds[name].append(clock() - started_s)
    return seconds


def summary(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Return medians, and the medians of fp32's time over each one's in the same round."""
    fp32 = seconds["fp32"]
    return {
        name: {
            "median_s": statistics.median(one),
            "best_s": min(one),
            "speedup": statistics.median(a / b for a, b in zip(fp32, one, strict=True)),
            "all_s": one,
        }
        for name, one in seconds.items()
    }


def main() -> None:
    """Measure each size, print a line for each format, and write everything with --json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--json", type=Path, help="write all measured seconds here")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    os.environ.setdefault("WHET_INT8", "both")  # also on a processor where whet refuses it
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for size in options.sizes:
            found[size] = summary(alternate(steps(size, folder), options.rounds, CLOCKS[options.clock]))
            for name, one in found[size].items():
                print(f"{size:10} {name:5} {one['median_s']:7.3f} s a step   {one['speedup']:.2f} times fp32's speed")
    if options.json:
        about = {
            "machine": facts(),
            "threads": options.threads,
            "clock": options.clock,
            "tokens": int(rows().cu_seqlens[-1]),
        }
        options.json.write_text(json.dumps(about | {"sizes": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
