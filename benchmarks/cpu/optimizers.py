"""One step of AdamW over 8.4 million parameters: torch's, whet's own, whet's of 8 bits, and bitsandbytes'.

    python benchmarks/cpu/optimizers.py --threads 2 --rounds 21 --json optimizers.json

All in one process, in turns, so that a busy moment hits them alike: medians of milliseconds, and gigabytes a second of
what a step has to move, compared with a plain copy of as many bytes (its source and its target counted).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from machine import facts

from whet.config.arguments import TrainingArguments
from whet.kernels.library import library
from whet.optim import registry

WIDTH, N_LAYERS = 512, 4
"""The feed-forward layers of four blocks of a transformer: 8.4 million parameters."""
BYTES = {"adamw_torch_fused": 28, "adamw_whet": 28, "adamw_whet_8bit": 16 + 16 / 256, "adamw_bnb_8bit": 16 + 16 / 256}
"""A parameter: gradient read; weight and two moments read and written; for 8 bits the scales of 256 as well."""


@dataclass(frozen=True)
class Runner:
    """Something that is measured, and how many bytes it moves."""

    name: str
    run: Callable[[], object]
    n_bytes: float


def model() -> nn.Module:
    """Linear layers and norms of those shapes, with gradients."""
    sizes = [(WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)] * N_LAYERS
    made = nn.Sequential(*(nn.Sequential(nn.Linear(*size), nn.LayerNorm(size[1])) for size in sizes))
    for parameter in made.parameters():
        parameter.grad = torch.randn_like(parameter) * 1e-3
    return made


def copy_of(n_bytes: float) -> Runner:
    """A copy that reads and writes this many bytes together."""
    source = torch.randn(int(n_bytes) // 8)
    target = torch.empty_like(source)
    return Runner("copy", lambda: target.copy_(source), 8.0 * source.numel())


def runners(names: list[str]) -> list[Runner]:
    """The copy, and a step of each optimizer over a model of its own."""
    n = sum(parameter.numel() for parameter in model().parameters())
    print(f"{n / 1e6:.2f} million parameters")
    found = [copy_of(28 * n)]
    for name in names:
        optimizer = registry.build(model(), TrainingArguments(optim=name, weight_decay=0.01))
        found.append(Runner(name, optimizer.step, BYTES[name] * n))
    return found


def alternate(given: list[Runner], rounds: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Return the seconds of each, measured in turns; the first two rounds warm caches and state."""
    seconds: dict[str, list[float]] = {one.name: [] for one in given}
    for number in range(rounds + 2):
        for one in given:
            start = clock()
            one.run()
            if number >= 2:
                seconds[one.name].append(clock() - start)
    return seconds


def summary(given: list[Runner], seconds: dict[str, list[float]]) -> list[dict[str, object]]:
    """Return a line for each: median, spread, rate, and the rate as a part of the copy's in the same round."""
    copied = [given[0].n_bytes / one for one in seconds["copy"]]
    lines: list[dict[str, object]] = []
    for one in given:
        times = seconds[one.name]
        rates = [one.n_bytes / second for second in times]
        low, _, high = statistics.quantiles(times, n=4)
        part = statistics.median(rate / copy for rate, copy in zip(rates, copied, strict=True))
        lines.append({"name": one.name, "ms": 1e3 * statistics.median(times), "ms_quartiles": [1e3 * low, 1e3 * high],
                      "GB_per_s": statistics.median(rates) / 1e9, "of_copy": part, "all_s": times})  # fmt: skip
    return lines


def main() -> None:
    """Print one line each, and write everything with --json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: for a busy machine, one thread")
    parser.add_argument("--json", type=Path, help="write all measured seconds here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    names = [name for name in BYTES if name != "adamw_bnb_8bit" or importlib.util.find_spec("bitsandbytes")]
    native = library()
    print(f"{args.threads} threads, instruction set {native.isa if native else 'none: plain torch'}")
    given = runners(names)
    clock = time.process_time if args.clock == "cpu" else time.perf_counter
    lines = summary(given, alternate(given, args.rounds, clock))
    for line in lines:
        print("{name:20s} {ms:8.2f} ms {GB_per_s:8.1f} GB/s {of_copy:6.2f} of the copy's".format(**line))
    if args.json:
        found = {"machine": facts(), "threads": args.threads, "clock": args.clock, "lines": lines}
        args.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
