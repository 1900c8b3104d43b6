"""What follows a backward pass (norm, clipping, AdamW) where the vocabulary is large: XLM-R-base's weights.

    python benchmarks/cpu/large_table.py --threads 2 --rounds 9 --json large_table.json

A table of 250,002 x 768 and 86 million other weights. Each step's gradient is in 2,000 rows of the table out of the
12,000 that a language's fine-tuning uses, as after a packed batch. torch: `clip_grad_norm_` and AdamW with fused=True;
whet: `--optim auto`, which passes the unused rows by. In turns; medians, least and most of milliseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from machine import facts

from whet.kernels.adamw import gradient_norm
from whet.kernels.embedding import RowGradient
from whet.optim.optimizers.native import WhetAdamW

ENTRIES, WIDTH, OTHERS = 250_002, 768, 112_000
IN_USE, A_STEP = 12_000, 2_000
MAX_NORM = 1.0


class Weights:
    """The table, whose gradient comes as in training, and all other weights as one matrix."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.table = nn.Parameter(torch.randn(ENTRIES, WIDTH, generator=generator))
        self.others = nn.Parameter(torch.randn(OTHERS, WIDTH, generator=generator))
        self.rows = RowGradient(self.table)
        self.words = torch.randperm(ENTRIES, generator=generator)[:IN_USE]

    @property
    def all(self) -> list[nn.Parameter]:
        return [self.table, self.others]

    def new_gradient(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        ids = self.words[torch.randint(0, IN_USE, (A_STEP,), generator=generator)]
        self.table.grad = None
        self.rows.add(ids, torch.full((A_STEP, WIDTH), 1e-3), None)
        self.others.grad = torch.full_like(self.others, 1e-3)


def torchs(weights: Weights) -> Callable[[], None]:
    """Return torch's way."""
    optimizer = torch.optim.AdamW(weights.all, lr=1e-5, weight_decay=0.0, fused=True)

    def run() -> None:
        nn.utils.clip_grad_norm_(weights.all, MAX_NORM)
        optimizer.step()

    return run


def whets(weights: Weights) -> Callable[[], None]:
    """Return the way of whet's Trainer."""
    optimizer = WhetAdamW(weights.all, lr=1e-5, betas=(0.9, 0.999), eps=1e-8)

    def run() -> None:
        norm = gradient_norm([weight.grad for weight in weights.all if weight.grad is not None])
        optimizer.grad_scale = min(1.0, MAX_NORM / (norm + 1e-6))
        optimizer.step()

    return run


def main() -> None:
    """Print a line each, and write everything with --json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write all measured seconds here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    seconds: dict[str, list[float]] = {}
    ways = {name: (weights := Weights(), make(weights)) for name, make in {"torch": torchs, "whet": whets}.items()}
    for number in range(args.rounds + 2):
        for name, (weights, run) in ways.items():
            weights.new_gradient(number)
            started_s = time.perf_counter()
            run()
            if number >= 2:  # the first two make the state and its memory
                seconds.setdefault(name, []).append(time.perf_counter() - started_s)
    for name, found in seconds.items():
        print(f"{name:6s} {1e3 * statistics.median(found):6.0f} ms ({1e3 * min(found):.0f} to {1e3 * max(found):.0f})")
    if args.json:
        args.json.write_text(
            json.dumps({"machine": facts(), "threads": args.threads, "seconds": seconds}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
