"""Ranks that find different things, and exchanges that are compared with their plain forms."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs_of_ranks
import numpy as np
import torch
from tiny_runs import Toy, toy_rows
from torch import nn

import engine
from tiny import tiny_model, tiny_rows
from whet.dist import group
from whet.dist.tables import TableSum
from whet.engine.trials import batch_size, precision
from whet.kernels.embedding import RowGradient
from whet.store import best

_ENTRIES, _WIDTH = 40, 3


def planted(job: dict[str, Any], rank: int) -> dict[str, Any]:
    """Train a module while this rank finds something else than the other one."""
    _PLANTS[job["plant"]](rank)
    counts = {"training": 0}
    model, rows = Toy(), toy_rows(32)
    model.register_forward_hook(lambda *_: counts.update(training=counts["training"] + model.training))
    trainer = engine.Trainer(model, jobs_of_ranks.arguments(job), train_dataset=rows, eval_dataset=toy_rows(11))
    counts["training"] = 0
    trainer.train()
    kept = [trainer.state.best_global_step, Path(trainer.state.best_model_checkpoint or "none").name]
    return jobs_of_ranks.left_by(trainer, passes=counts["training"], best=kept)


def _plant_precision(rank: int) -> None:
    precision.PrecisionChoice._measured = lambda *_: "bf16" if rank else "fp32"


def _plant_batch_size(rank: int) -> None:
    batch_size._largest = lambda *_: 1 if rank else 4


def _plant_best(rank: int) -> None:
    """Rank 0 finds the first evaluation best, rank 1 each one."""
    best.is_better = lambda _, state, __: rank == 1 or state.best_metric is None


_PLANTS: dict[str, Callable[[int], None]] = {
    "nothing": lambda _: None,
    "precision": _plant_precision,
    "batch size": _plant_batch_size,
    "best": _plant_best,
}


def dealt(job: dict[str, Any], rank: int) -> dict[str, Any]:
    """Train on rows of very different lengths; return the tokens of each forward pass of this rank."""
    model, rows = tiny_model("bert"), tiny_rows(16, lengths=(4, 60), seed=3)
    tokens: list[int] = []
    model.get_input_embeddings().register_forward_pre_hook(
        lambda _, given: tokens.append(given[0].numel()) if model.training else None
    )
    trainer = engine.Trainer(model, jobs_of_ranks.arguments(job), train_dataset=rows)
    tokens.clear()
    trainer.train()
    return jobs_of_ranks.left_by(trainer, tokens=tokens, longest=int(rows.lengths.max()))


def evaluated(job: dict[str, Any], rank: int) -> dict[str, Any]:
    """Evaluate rows of one number each; return the numbers that this rank's passes computed, and all predictions."""
    rows = [{"x": torch.full((4,), float(n)), "labels": torch.tensor(float(n))} for n in range(job["n_rows"])]
    seen: list[float] = []

    class Watched(Toy):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            seen.extend(x[:, 0].tolist())
            return {"loss": (x[:, 0] ** 2).mean(), "logits": x[:, 0] + 0 * self.head.bias}

    args = jobs_of_ranks.arguments(job | {"args": {"per_device_eval_batch_size": 2}})
    trainer = engine.Trainer(Watched(), args, train_dataset=toy_rows(8), eval_dataset=rows)
    seen.clear()
    predictions = trainer.predict(rows)
    return {"seen": seen, "predictions": np.asarray(predictions.predictions).tolist()}


def tables(job: dict[str, Any], rank: int) -> dict[str, Any]:
    """Sum the gradient of a table by its rows, and once more as a complete table; return both."""
    joined = group.join("gloo", 20)
    assert joined is not None
    table = nn.Parameter(torch.zeros(_ENTRIES, _WIDTH))
    gradient, sums = RowGradient(table), list[Any]()
    exchange = TableSum(joined, [gradient])
    for rows in job["rows"][rank]:
        table.grad = None
        if rows is not None:
            numbers = torch.Generator().manual_seed(100 * rank + len(sums))
            gradient.add(torch.tensor(rows, dtype=torch.int64), torch.randn(len(rows), _WIDTH, generator=numbers), None)
        dense = joined.sum_of(torch.zeros_like(table) if table.grad is None else table.grad.clone())
        exchange.reduce(0.5)
        held = torch.zeros_like(table) if table.grad is None else table.grad
        known = gradient.rows_now()
        sums.append(
            {
                "far": float((held - 0.5 * dense).abs().max()),
                "large": float(dense.abs().max()),
                "rows": None if known is None else sorted(known.tolist()),
            }
        )
    return {"sums": sums}
