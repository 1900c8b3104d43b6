"""What `whet predict` does for every task: find the model's head, run its rows, write the predictions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from whet.config.arguments import TrainingArguments
from whet.errors import ConfigError, escape_controls
from whet.jobs.predict import models
from whet.jobs.predict.fields import PredictFields
from whet.jobs.predict.trained import read_reading
from whet.models.loading.heads import HEADS, Head
from whet.train.output import files as output_files
from whet.train.trainer import Trainer


def head_of(asked: PredictFields) -> Head:
    """Return the head that the model's configuration or its adapter names; raises ConfigError for any other head."""
    head, named = models.head_of(asked.model)
    if head is not None and head in HEADS.values():
        return head
    raise ConfigError(
        what="the model has no head that whet predicts with",
        got=f"{asked.model}: {named}",
        why="the architecture says the task: question answering, sequence classification or token classification",
        fix="name a model that whet qa, whet classify or whet tag trained",
    )


def reading_of(asked: PredictFields, task: str) -> dict[str, Any]:
    """Return how the model read its training data; empty if that is not known."""
    return read_reading(Path(asked.model), task)


def trainer_of(asked: PredictFields, model: Any, tokenizer: Any, **more: Any) -> Trainer:
    """Return a Trainer that predicts with this model: without padding and with native operators if they can serve.

    `more` is given to the Trainer too.
    """
    args = TrainingArguments(
        output_dir=str(Path(asked.output).parent),  # nothing is written there
        precision=asked.precision,
        per_device_eval_batch_size=asked.per_device_eval_batch_size,
        report_to=("none",),
        disable_tqdm=True,
        log_level="warning",
    )
    return Trainer(model=model, args=args, processing_class=tokenizer, **more)


def write(asked: PredictFields, trainer: Trainer, entries: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object a line, and print how many, where, and how the model ran."""
    lines = [json.dumps(entry, ensure_ascii=False) for entry in entries]
    path = Path(asked.output)
    with output_files.stored(f"{path} cannot be written", path.parent):
        output_files.write_text(path, "".join(f"{line}\n" for line in lines))
    padding = "with" if trainer.objective.packed_model is None else "without"
    name = trainer.evaluation_precision(()).name
    precision = "fp32" if name == "auto" else name  # auto without a measurement computes in fp32
    count = f"{len(lines)} prediction{'' if len(lines) == 1 else 's'}"
    print(f"{count} in {escape_controls(str(path))} ({precision}, {padding} padding)")
