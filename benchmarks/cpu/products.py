"""The three products of a linear layer: GFLOP/s of MKL and oneDNN, which torch carries, and of whet's own operator.

    python benchmarks/cpu/products.py

2,088 tokens (twelve rows of XQuAD), the shapes of MiniLM and of BERT-base; alternating, medians of fifteen rounds.
Prints a table and writes products.json in this folder.
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
from torch import Tensor

from whet.kernels.products.linear import weight_gradient

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from machine import facts

RESULTS = Path(__file__).with_name("products.json")
TOKENS, ROUNDS = 2088, 15
SHAPES = [(384, 1152), (384, 384), (384, 1536), (1536, 384), (768, 2304), (768, 768), (768, 3072), (3072, 768)]


def onednn(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b transposed through oneDNN."""
    return torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")


def routes(width: int, inner: int) -> dict[str, Callable[[], Tensor]]:
    """Return the products of a layer (inner, width): forward, gradient of the input, gradient of the weight."""
    x, weight, grad = torch.randn(TOKENS, width), torch.randn(inner, width), torch.randn(TOKENS, inner)
    return {
        "forward mkl": lambda: torch.mm(x, weight.t()),
        "forward onednn": lambda: onednn(x, weight),
        "input mkl": lambda: torch.mm(grad, weight),
        "input onednn": lambda: onednn(grad, weight.t()),
        "weight mkl": lambda: torch.mm(grad.t(), x),
        "weight onednn": lambda: onednn(grad.t(), x.t()),
        "weight whet": lambda: weight_gradient(grad, x, bias=False)[0],
    }


def seconds(work: Callable[[], Tensor]) -> float:
    """Return how long the work takes, once."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main() -> None:
    """Measure every shape, print the table, write products.json."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    found: dict[str, dict[str, float]] = {}
    for width, inner in SHAPES:
        ways = routes(width, inner)
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(ROUNDS + 1):
            for name, work in ways.items():
                times[name].append(seconds(work))
        flops = 2 * TOKENS * width * inner
        rates = {name: flops / statistics.median(some[1:]) / 1e9 for name, some in times.items()}
        found[f"{width} -> {inner}"] = rates
        print(f"{width:5} -> {inner:<5}" + "".join(f"  {name} {rate:4.0f}" for name, rate in rates.items()))
    RESULTS.write_text(json.dumps({"gflops_per_s": found, "machine": facts()}, indent=2) + "\n")


if __name__ == "__main__":
    main()
