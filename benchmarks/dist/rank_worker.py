"""One rank of `scaling.py`: trains a model on rows of fixed lengths, and writes how long its steps took.

    python benchmarks/dist/rank_worker.py SETTINGS.json

RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say which rank it is. `side` is whet (the engine of the commands) or
torch: transformers' model, padded, in torch's DistributedDataParallel with fused AdamW, float32.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForQuestionAnswering, TrainerCallback

SHAPES: dict[str, dict[str, Any]] = {
    "minilm": {"type": "bert", "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12,
               "intermediate_size": 1536},
    "distilbert": {"type": "distilbert"},
}  # fmt: skip
LENGTHS = (384, 96, 320, 160, 256, 224, 288, 192, 352, 128, 240, 272)
"""Tokens of the rows, again and again: 12 rows of every rank have as many tokens."""


def main() -> None:
    """Train, and write the seconds of each step and what the model of cost needs."""
    asked = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    torch.manual_seed(0)
    shape = dict(SHAPES[asked["model"]])
    model = AutoModelForQuestionAnswering.from_config(AutoConfig.for_model(shape.pop("type"), **shape))
    found = (_whet if asked["side"] == "whet" else _torch)(model, asked)
    tables = {id(one.weight) for one in model.modules() if isinstance(one, torch.nn.Embedding)}
    dense = sum(one.numel() for one in model.parameters() if id(one) not in tables)
    found |= {"dense": dense, "width": model.config.hidden_size, "precision": found.get("precision", "fp32")}
    if os.environ.get("RANK", "0") == "0":
        Path(asked["out"]).write_text(json.dumps(found), "utf-8")


def _rows(asked: dict[str, Any], n_ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Return token ids of all rows of a run, end to end, and the rows' lengths."""
    lengths = np.resize(LENGTHS[: asked["rows"]], asked["rows"] * n_ranks * asked["steps"])
    return np.random.default_rng(0).integers(1000, 4000, lengths.sum()), lengths


class _Clock(TrainerCallback):
    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.times.append(time.perf_counter())


def _whet(model: Any, asked: dict[str, Any]) -> dict[str, Any]:
    from whet.config import arguments as settings
    from whet.data.store import RowStore
    from whet.engine.engine import Engine, RunSpec

    n_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    ids, lengths = _rows(asked, n_ranks)
    labels = np.ones(len(lengths), dtype=np.int64)
    starts = np.append(0, lengths.cumsum()).astype(np.int64)
    rows = RowStore(cu_seqlens=starts, tokens={"input_ids": ids}, labels={"start_positions": labels,
                                                                          "end_positions": labels + 1})  # fmt: skip
    clock = _Clock()
    with tempfile.TemporaryDirectory() as folder:
        args = settings.TrainingArguments(
            output_dir=folder, per_device_train_batch_size=asked["rows"], num_train_epochs=1, save_strategy="no",
            precision=asked["precision"], train_sampling_strategy="sequential", logging_strategy="no",
            disable_tqdm=True, log_level="error", ddp_comm_hook=asked.get("hook", "none"),
        )  # fmt: skip
        trainer = Engine(RunSpec(model=model, args=args, train_dataset=rows, callbacks=[clock]))
        trainer.train()
    used = len(np.unique(ids[: starts[asked["rows"] * n_ranks]])) if n_ranks > 1 else 0
    return {"step_s": np.diff(clock.times).tolist(), "table_rows": used, "precision": trainer.precision.name}


def _torch(model: Any, asked: dict[str, Any]) -> dict[str, Any]:
    rank, n_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    ids, lengths = _rows(asked, n_ranks)
    if n_ranks > 1:
        torch.distributed.init_process_group("gloo")
        trained: Any = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    else:
        trained = model
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, fused=True)
    starts, times = np.append(0, lengths.cumsum()), []
    for step in range(asked["steps"]):
        first = (step * n_ranks + rank) * asked["rows"]
        own = range(first, first + asked["rows"])
        padded = np.zeros((len(own), lengths[own].max()), dtype=np.int64)
        for n, row in enumerate(own):
            padded[n, : lengths[row]] = ids[starts[row] : starts[row + 1]]
        tokens, labels = torch.from_numpy(padded), torch.ones(len(own), dtype=torch.int64)
        outputs = trained(input_ids=tokens, attention_mask=tokens.ne(0), start_positions=labels, end_positions=labels)
        outputs.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter())
    if n_ranks > 1:
        torch.distributed.barrier()  # a rank that is first to leave takes its connections from the other
        torch.distributed.destroy_process_group()
    return {"step_s": np.diff(times).tolist(), "table_rows": 0}


if __name__ == "__main__":
    main()
