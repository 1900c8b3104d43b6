"""The three products of a linear layer: GFLOP/s of MKL and oneDNN, which torch carries, and of whet's own operator.

    python benchmarks/cpu/products.py
    python benchmarks/cpu/products.py --bf16
    OMP_NUM_THREADS=1 python benchmarks/cpu/products.py --bf16 --clock cpu    # on a busy machine

2,088 tokens (twelve rows of XQuAD), the shapes of MiniLM and of BERT-base; alternating, medians of fifteen rounds.
With --bf16: torch's products of bf16, the same widened to fp32, and fp32 for comparison. Prints a table and writes
products.json or products-bf16.json in this folder.
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

from whet.kernels.matrix import weight_gradient, weight_gradient_into, widened_product

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from machine import facts

FOLDER = Path(__file__).resolve().parent
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


def bf16_routes(width: int, inner: int) -> dict[str, Callable[[], Tensor]]:
    """Return the same products of bf16: by torch, widened to fp32 (the weight is fp32), and of fp32 by torch."""
    x, weight, grad = torch.randn(TOKENS, width), torch.randn(inner, width), torch.randn(TOKENS, inner)
    x16, weight16, grad16 = x.bfloat16(), weight.bfloat16(), grad.bfloat16()
    total = torch.empty(inner, width)

    def native() -> Tensor:
        weight_gradient_into(total, None, grad16, x16)
        return total

    return {
        "forward torch": lambda: torch.mm(x16, weight16.t()),
        "forward widened": lambda: widened_product(x16, weight, None),
        "forward fp32": lambda: torch.mm(x, weight.t()),
        "input torch": lambda: torch.mm(grad16, weight16),
        "input widened": lambda: widened_product(grad16, weight.t(), None),
        "weight torch": lambda: torch.mm(grad16.t(), x16),
        "weight whet": native,
    }


def seconds(work: Callable[[], Tensor], clock: Callable[[], float]) -> float:
    """Return how long the work takes, once."""
    started = clock()
    work()
    return clock() - started


def main() -> None:
    """Measure every shape, print the table, write products.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bf16", action="store_true", help="products of bf16")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: for a busy machine, one thread")
    parser.add_argument(
        "--output", type=Path, help="file for the results; default: products.json or products-bf16.json"
    )
    options = parser.parse_args()
    clock = time.perf_counter if options.clock == "wall" else time.process_time
    found: dict[str, dict[str, float]] = {}
    for width, inner in SHAPES:
        ways = (bf16_routes if options.bf16 else routes)(width, inner)
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(ROUNDS + 1):
            for name, work in ways.items():
                times[name].append(seconds(work, clock))
        flops = 2 * TOKENS * width * inner
        rates = {name: flops / statistics.median(some[1:]) / 1e9 for name, some in times.items()}
        found[f"{width} -> {inner}"] = rates
        print(f"{width:5} -> {inner:<5}" + "".join(f"  {name} {rate:4.0f}" for name, rate in rates.items()))
    results = options.output or FOLDER / ("products-bf16.json" if options.bf16 else "products.json")
    results.write_text(json.dumps({"gflops_per_s": found, "machine": facts()}, indent=2) + "\n")


if __name__ == "__main__":
    main()
