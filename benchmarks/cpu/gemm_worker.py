"""A worker that measures how long the matrix products of linear layers take on this machine, and nothing else.

Each product is tried in every way torch offers (MKL through torch.mm, oneDNN's inner product), and the fastest counts:
on some processors one library runs at half of the other's rate, and the machine's limit is the better one's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from protocol import Channel
from torch import Tensor

Product = Callable[[], Tensor]
_COPIED, _N_COPIES = 1 << 28, 9
"""Bytes that a copy moves, far more than any cache holds, and how often."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def one_dnn(a: Tensor, w: Tensor) -> Tensor:
    """Return a @ w.T by oneDNN's inner product."""
    return torch.ops.mkldnn._linear_pointwise(a, w, None, "none", [], "")


def products(n: int, k: int, m: int, dtype: torch.dtype) -> dict[str, dict[str, Product]]:
    """Return the three products of a linear layer (k -> m) over n tokens, each in all ways."""
    x, w, g = (torch.randn(shape).to(dtype) for shape in ((n, k), (m, k), (n, m)))
    return {
        "output": {"mm": lambda: torch.mm(x, w.t()), "oneDNN": lambda: one_dnn(x, w)},
        "input gradient": {"mm": lambda: torch.mm(g, w), "oneDNN": lambda: one_dnn(g, w.t())},
        "weight gradient": {
            "mm": lambda: torch.mm(g.t(), x),
            "oneDNN": lambda: one_dnn(g.t(), x.t()),
            "oneDNN, transposed": lambda: one_dnn(x.t(), g.t()).t(),
        },
    }


def agreeing(ways: dict[str, Product]) -> dict[str, Product]:
    """Return the ways that this torch has and that give the product (to a hundredth of its largest entry)."""
    wanted = ways["mm"]().float()
    kept = {}
    for name, way in ways.items():
        try:
            gap = (way().float() - wanted).abs().max()
        except (RuntimeError, AttributeError):
            continue
        if gap <= 0.01 * wanted.abs().max():
            kept[name] = way
    return kept


def median_s(product: Product, n_runs: int) -> float:
    """Return the median seconds of a product."""
    seconds = []
    for _ in range(n_runs):
        started_s = time.perf_counter()
        product()
        seconds.append(time.perf_counter() - started_s)
    return statistics.median(seconds)


@torch.no_grad()
def measure(n_tokens: int, layers: list[list[int]], dtype: torch.dtype, n_runs: int) -> dict[str, Any]:
    """Return the seconds of all products of these layers (k, m, count), and of each which way was the fastest."""
    total, chosen = 0.0, {}
    for k, m, count in layers:
        for name, ways in products(n_tokens, k, m, dtype).items():
            found = {way: median_s(run, n_runs) for way, run in agreeing(ways).items()}
            best = min(found, key=lambda way: found[way])
            total += count * found[best]
            chosen[f"{k}x{m} {name}"] = {"fastest": best, "flops_per_s": 2 * n_tokens * k * m / found[best]}
    return {"seconds": total, "products": chosen}


@torch.no_grad()
def copy_rate(n_bytes: int, n_runs: int) -> float:
    """Return the bytes that a copy reads and writes in a second, in tensors that no cache holds."""
    source = torch.ones(n_bytes // 4)
    target = torch.empty_like(source)
    return 2 * n_bytes / median_s(lambda: target.copy_(source), n_runs)


def main() -> None:
    """Measure for each request."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    channel = Channel()
    torch.manual_seed(0)
    channel.answer(n_threads=torch.get_num_threads(), torch=torch.__version__)
    while (command := channel.read())["do"] != "stop":
        if command["do"] == "copy":
            channel.answer(bytes_per_s=copy_rate(_COPIED, _N_COPIES))
            continue
        dtype = DTYPES[command["dtype"]]
        channel.answer(**measure(command["n_tokens"], command["layers"], dtype, command["n_runs"]))


if __name__ == "__main__":
    main()
