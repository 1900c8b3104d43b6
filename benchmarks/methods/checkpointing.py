"""What checkpointing costs and saves: steps side by side, none, selective and whole blocks, in fp32 and in bf16.

    python benchmarks/methods/checkpointing.py --rounds 7

One process and one model of MiniLM's shape (random weights: they change neither time nor memory), the same rows for
everybody in a round, dropout on, forward and backward; alternating, so that a busy moment meets all alike. Memory is
what the C library has given out after the forward pass and not got back (glibc's mallinfo2). Prints medians and what
one block keeps, and writes checkpoint_blocks.json in this folder.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import BertConfig, BertForQuestionAnswering

from whet.config.methods import MethodSettings
from whet.data.store import RowStore
from whet.methods import checkpoint_blocks, fuse
from whet.models.view import ModelView
from whet.objectives.choose import choose
from whet.objectives.span import SPAN_LABELS

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests")]
from machine import facts  # noqa: E402

from usage import in_use_bytes  # noqa: E402

RESULTS = Path(__file__).with_name("checkpoint_blocks.json")
WIDTH, LAYERS, HEADS, ROWS = 384, 6, 12, 12
POLICIES = ("none", "selective", "blocks")


class Bench:
    """One model in training, and the ways to run it."""

    def __init__(self, tokens: int) -> None:
        torch.manual_seed(0)
        shape = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
        config = BertConfig(vocab_size=30522, intermediate_size=4 * WIDTH, **shape)
        self.model = BertForQuestionAnswering(config).train()
        self.spans: Any = choose(self.model, None, lambda rows: {})
        self.view = ModelView(self.model)
        self.fused = fuse.apply(self.view, MethodSettings(operators="auto", row_gradients=True)) is not None
        self.rows = random_rows(tokens)

    def use(self, policy: Any) -> None:
        """Checkpoint by this policy."""
        checkpoint_blocks.restore(self.view)
        if policy != "none":
            checkpoint_blocks.apply(self.view, MethodSettings(checkpointing=policy))

    def step(self, number: int, *, bf16: bool) -> dict[str, float]:
        """Run forward and backward; return seconds, the bytes that the forward pass kept, and the loss."""
        batch = self.spans.batch(self.rows, range(ROWS), 0)
        before, started = in_use_bytes(), time.perf_counter()
        with autocast(bf16):
            loss = self.spans.loss_sum(self.spans.forward(batch, seed=1, step=number), batch)
        forward_s = time.perf_counter() - started
        kept = in_use_bytes() - before
        started = time.perf_counter()
        loss.backward()
        seconds = forward_s + time.perf_counter() - started
        self.model.zero_grad()
        return {"seconds": seconds, "kept_bytes": kept, "loss": loss.item()}


def autocast(bf16: bool) -> AbstractContextManager[object]:
    """Return the context of a forward pass."""
    return torch.autocast("cpu", torch.bfloat16, enabled=bf16)


def random_rows(tokens: int) -> RowStore:
    """Return rows of `tokens` tokens each, give or take a third."""
    numbers = np.random.default_rng(0)
    starts = np.concatenate([[0], np.cumsum(numbers.integers(2 * tokens // 3, 4 * tokens // 3, ROWS))]).astype(np.int64)
    ids = numbers.integers(1000, 30000, starts[-1])
    answers = {name: np.ones(ROWS, dtype=np.int64) for name in SPAN_LABELS}
    return RowStore(cu_seqlens=starts, tokens={"input_ids": ids}, labels=answers)


def kept_by_one_block(bench: Bench, *, bf16: bool) -> list[str]:
    """Return what the second block keeps for backward without checkpointing: each storage once, weights left out."""
    bench.use("none")
    weights = {weight.untyped_storage().data_ptr() for weight in bench.model.parameters()}
    block: Any = bench.model.bert.encoder.layer[1]
    real, found = block.forward, {}

    def keep(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in weights:
            found[place] = (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor)
        return tensor

    def watched(*args: Any, **options: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            return real(*args, **options)

    block.forward = watched
    with autocast(bf16):
        bench.spans.forward(bench.spans.batch(bench.rows, range(ROWS), 0), seed=1, step=1)
    del block.forward
    return [f"{dtype} {shape}" for shape, dtype, _ in found.values()]


def main() -> None:
    """Run the rounds, print the tables, write checkpoint_blocks.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=250, help="tokens of a row, on average")
    options = parser.parse_args()
    bench = Bench(options.tokens)
    results: dict[str, Any] = {"machine": facts(), "options": vars(options), "native": bench.fused}
    for bf16 in (False, True):
        name = "bf16" if bf16 else "fp32"
        runs = measure(lambda number, bf16=bf16: bench.step(number, bf16=bf16), bench, options.rounds)
        results[name] = {"runs": runs, "one_block_keeps": kept_by_one_block(bench, bf16=bf16)}
        show(name, results[name])
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", "utf-8")


def measure(take: Callable[[int], dict[str, float]], bench: Bench, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Return what each policy's steps measured; the first round only warms up."""
    runs: dict[str, list[dict[str, float]]] = {policy: [] for policy in POLICIES}
    for number in range(rounds + 1):
        for policy in POLICIES:
            bench.use(policy)
            found = take(number)
            runs[policy] += [found] if number else []
    return runs


def show(name: str, found: dict[str, Any]) -> None:
    """Print one table: times and bytes against no checkpointing; a block that is computed again is counted in."""
    print(f"\n{name}        median s   against none   kept MiB   saved   loss of the last round")
    runs = found["runs"]
    plain_s, plain = (statistics.median(run[key] for run in runs["none"]) for key in ("seconds", "kept_bytes"))
    for policy in POLICIES:
        seconds, kept = (statistics.median(run[key] for run in runs[policy]) for key in ("seconds", "kept_bytes"))
        peak = kept + (plain / LAYERS if policy == "blocks" else 0)
        print(
            f"{policy:10} {seconds:10.4f} {seconds / plain_s - 1:+13.1%} {peak / 2**20:11.1f} {1 - peak / plain:7.1%}"
            f"   {runs[policy][-1]['loss']!r}"
        )
    print("one block keeps:", ", ".join(found["one_block_keeps"]))


if __name__ == "__main__":
    main()
