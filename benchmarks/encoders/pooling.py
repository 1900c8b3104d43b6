"""A SentenceTransformer that pools one token of each row: its last block computes all tokens, or those that are pooled.

    .venv-libraries/bin/python benchmarks/encoders/pooling.py

The pretrained MiniLM, 32 rows of 6 to 24 and 8 rows of 40 to 384 random tokens, one thread, processor time. A step is
two forward passes (in-batch negatives) and one backward pass without the optimizer; encode is a pass without gradients.
The sides take turns within one process; medians. Environment: `make test-libraries` makes it.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from jobs import minilm
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling

import whet

ROWS = {"short": (32, 6, 24), "long": (8, 40, 384)}
"""Rows of a batch, and their fewest and most tokens."""


def features(rows: str, seed: int) -> dict[str, torch.Tensor]:
    n_rows, fewest, most = ROWS[rows]
    numbers = torch.Generator().manual_seed(seed)
    mask = torch.arange(most) < torch.randint(fewest, most + 1, (n_rows, 1), generator=numbers)
    ids = torch.randint(1000, 30_000, mask.shape, generator=numbers)
    longest = int(mask.sum(1).max())
    return {"input_ids": (ids * mask)[:, :longest], "attention_mask": mask[:, :longest].long()}


def step(model: Any, rows: str) -> None:
    one, other = (model(features(rows, seed))["sentence_embedding"] for seed in (1, 2))
    torch.nn.functional.cross_entropy(one @ other.T, torch.arange(len(one))).backward()
    model.zero_grad()


def encode(model: Any, rows: str) -> None:
    with torch.no_grad():
        model(features(rows, 1))


def seconds(work: Callable[[Any, str], None], model: Any, rows: str) -> float:
    model.train(work is step)
    begin = time.process_time()
    work(model, rows)
    return time.process_time() - begin


def measure(sides: dict[str, Any], work: Callable[[Any, str], None], rows: str, n_rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(n_rounds + 1):
        for side, model in sides.items():
            found = seconds(work, model, rows)
            if number:
                times[side].append(found)
    return {side: statistics.median(found) for side, found in times.items()}


def main() -> None:
    """Measure both jobs for both poolings and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for pooling in ("cls", "lasttoken"):
        plain = SentenceTransformer(modules=[Transformer(minilm()), Pooling(384, pooling)], device="cpu")
        sides = {
            "plain": plain,
            "all": whet.optimize(copy.deepcopy(plain), last_block_tokens="all"),
            "read": whet.optimize(copy.deepcopy(plain)),
        }
        for work in (step, encode):
            for rows in ROWS:
                found = measure(sides, work, rows, options.rounds)
                times = ", ".join(f"{side} {1000 * value:.1f} ms" for side, value in found.items())
                print(
                    f"{pooling:9} {work.__name__:6} {rows:5} {times}; read / all {found['read'] / found['all']:.3f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
