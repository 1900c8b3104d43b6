"""A worker that trains or predicts with whet's own Trainer, on the rows that each command names."""

from __future__ import annotations

import argparse
import dataclasses
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gate import Gate
from protocol import Channel
from transformers import set_seed

from whet.config import arguments as settings
from whet.data.store import RowStore
from whet.engine.engine import Engine, RunSpec
from whet.kernels.library import library
from whet.models.loading.load import ModelSource, load_qa_model

SEED = 42


@dataclass(frozen=True)
class AskedRows(RowStore):
    """The rows of a store, of which every step gets those that the command named."""

    turn: dict[str, Any] = field(default_factory=dict)

    def take(self, rows: Any) -> RowStore:
        return super().take(self.turn.get("rows", rows))


def arguments(options: argparse.Namespace) -> settings.TrainingArguments:
    """Return the guides' settings; `precision` where this whet has the choice."""
    known = {one.name for one in dataclasses.fields(settings.TrainingArguments)}
    chosen = {"precision": options.precision} if "precision" in known else {}
    return settings.TrainingArguments(
        output_dir=options.folder, per_device_train_batch_size=options.batch, learning_rate=3e-5, seed=SEED,
        max_steps=100_000, save_strategy="no", logging_strategy="no", use_cpu=True, disable_tqdm=True, **chosen,
    )  # fmt: skip


def train(options: argparse.Namespace, model: Any, rows: RowStore, channel: Channel) -> None:
    """Take a step for each request."""
    asked = AskedRows(rows.cu_seqlens, rows.tokens, rows.labels)

    def facts(known: dict[str, Any]) -> dict[str, Any]:
        taken = asked.turn["rows"]
        return {"rows": taken, "n_tokens": int(rows.lengths[taken].sum()), "loss": known["meter"].last_loss}

    gate = Gate(channel, lambda: about(trainer, trainer.precision.name), asked.turn.update, facts)
    trainer = Engine(RunSpec(model=model, args=arguments(options), train_dataset=asked, callbacks=[gate]))
    trainer.train()


def predict(options: argparse.Namespace, model: Any, rows: RowStore, channel: Channel) -> None:
    """Predict the rows of each command."""
    trainer = Engine(RunSpec(model=model, args=arguments(options)))
    channel.answer(**about(trainer, trainer.evaluation_precision(rows).name))
    while (command := channel.read())["do"] != "stop":
        taken = rows.take(np.asarray(command["rows"]))
        started_s = time.perf_counter()
        logits = trainer.predict(taken).predictions
        channel.answer(seconds=time.perf_counter() - started_s, start_logit_sum=float(logits[0][:, 0].sum()))


def about(trainer: Engine, precision: str) -> dict[str, Any]:
    """Return what the benchmark should know of this process."""
    found, table = library(), trainer.model.get_input_embeddings().weight
    return {
        "precision": precision,
        "instruction_set": found.isa if found else "none: plain torch",
        "n_threads": torch.get_num_threads(),
        "model": type(trainer.objective).__name__,
        "n_dense": sum(one.numel() for one in trainer.model.parameters() if one is not table),
    }


def main() -> None:
    """Serve requests until the request to stop."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--precision", choices=("auto", "fp32", "bf16", "int8"), default="auto")
    parser.add_argument("--mode", choices=("train", "predict"), default="train")
    options, channel = parser.parse_args(), Channel()
    set_seed(SEED)
    model, rows = load_qa_model(ModelSource(model=options.model)), RowStore.load(options.rows)
    (train if options.mode == "train" else predict)(options, model, rows, channel)


if __name__ == "__main__":
    main()
