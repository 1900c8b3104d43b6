"""What `whet predict` does for every task: find the model's head, run its rows, write the predictions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from whet.data.batch import Batch
from whet.errors import ConfigError
from whet.jobs.predict_fields import PredictFields
from whet.jobs.trained import read_reading
from whet.models.loading.heads import Head, head_named
from whet.models.loading.load import ModelSource, load_config
from whet.objectives.base import Objective
from whet.objectives.choose import choose
from whet.precision.policy import Float32
from whet.train.compat.collate import default_collator
from whet.train.evaluate import forward_batches
from whet.train.output import files as output_files


def source_of(asked: PredictFields) -> ModelSource:
    """Return where the model comes from."""
    return ModelSource(model=asked.model, flag="--model")


def head_of(asked: PredictFields) -> Head:
    """Return the head that the model's configuration names; raises ConfigError for any other head."""
    config = load_config(source_of(asked))
    head = head_named(config.architectures)
    if head is not None:
        return head
    raise ConfigError(
        what="the model has no head that whet predicts with",
        got=f"{asked.model}: architectures {config.architectures}",
        why="the architecture says the task: question answering, sequence classification or token classification",
        fix="name a model that whet qa, whet classify or whet tag trained",
    )


def reading_of(asked: PredictFields, task: str) -> dict[str, Any]:
    """Return how the model read its training data; empty if that is not known."""
    return read_reading(Path(asked.model), task)


def outputs_of(model: Any, tokenizer: Any, rows: Any, rows_at_once: int) -> Iterator[tuple[Objective, Batch, Any]]:
    """Yield the objective, each batch and the model's output for it, over all rows in their order."""
    objective = choose(model, None, default_collator(tokenizer, model))
    for batch, output in forward_batches(model, objective, rows, rows_at_once, Float32()):
        yield objective, batch, output


def logits_of(model: Any, tokenizer: Any, rows: Any, rows_at_once: int) -> Iterator[torch.Tensor]:
    """Yield the logits of each batch: (rows, labels), or (rows, T, labels) where places without a token are filled."""
    for objective, batch, output in outputs_of(model, tokenizer, rows, rows_at_once):
        yield torch.from_numpy(objective.logits(output, batch)[0])


def write(asked: PredictFields, entries: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object a line, and print how many and where."""
    lines = [json.dumps(entry, ensure_ascii=False) for entry in entries]
    path = Path(asked.output)
    with output_files.stored(f"{path} cannot be written", path.parent):
        output_files.write_text(path, "".join(f"{line}\n" for line in lines))
    print(f"{len(lines)} predictions in {path}")
