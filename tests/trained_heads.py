"""Tiny models with every head that has its own loss, rows for them, and short runs of the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

import engine
from tiny import tiny_config

N_ROWS = 24
_PAD = {"roberta": 1, "xlm-roberta": 1}
SETTINGS: dict[str, Any] = {
    "num_train_epochs": 2, "per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "learning_rate": 5e-4,
    "logging_steps": 1, "use_cpu": True, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "seed": 7,
    "per_device_eval_batch_size": 5,
}  # fmt: skip


@dataclass(frozen=True)
class Head:
    """A head, what its rows have as labels, and what its configuration says."""

    auto: Any
    label: Callable[[np.random.Generator, list[int]], Any]
    config: dict[str, Any]
    by_token: bool = False
    n_choices: int = 1


def _masked(_: np.random.Generator, ids: list[int]) -> list[int]:
    return [token if place % 5 == 2 else -100 for place, token in enumerate(ids)]


HEADS = {
    "classes": Head(transformers.AutoModelForSequenceClassification, lambda _, ids: len(ids) % 3, {"num_labels": 3}),
    "several labels": Head(
        transformers.AutoModelForSequenceClassification,
        lambda r, _: r.integers(0, 2, 4).astype(float).tolist(),
        {"num_labels": 4, "problem_type": "multi_label_classification"},
    ),
    "regression": Head(
        transformers.AutoModelForSequenceClassification, lambda _, ids: len(ids) / 20, {"num_labels": 1}
    ),
    "tokens": Head(
        transformers.AutoModelForTokenClassification,
        lambda _, ids: [-100 if token % 4 == 0 else token % 5 for token in ids],
        {"num_labels": 5},
        by_token=True,
    ),
    "masked words": Head(transformers.AutoModelForMaskedLM, _masked, {}, by_token=True),
    "choices": Head(transformers.AutoModelForMultipleChoice, lambda _, ids: len(ids) % 2, {}, n_choices=2),
}


def rows_for(head: Head, n_rows: int = N_ROWS, seed: int = 1) -> list[dict[str, Any]]:
    """Return rows of many lengths for this head."""
    numbers = np.random.default_rng(seed)
    rows = []
    for _ in range(n_rows):
        choices = [numbers.integers(10, 198, n).tolist() for n in numbers.integers(5, 40, head.n_choices)]
        ids = choices if head.n_choices > 1 else choices[0]
        rows.append({"input_ids": ids, "labels": head.label(numbers, choices[0])})
    return rows


def collator(family: str) -> Callable[[list[dict[str, Any]]], dict[str, Tensor]]:
    """Return what pads rows of any of these heads on the right."""
    pad_id = _PAD.get(family, 0)

    def wide(values: list[Any], fill: int, length: int) -> Any:
        return [value + [fill] * (length - len(value)) for value in values]

    def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        nested = isinstance(rows[0]["input_ids"][0], list)
        flat = [ids for row in rows for ids in (row["input_ids"] if nested else [row["input_ids"]])]
        longest = max(map(len, flat))
        shape = (len(rows), -1, longest) if nested else (len(rows), longest)
        batch = {
            "input_ids": torch.tensor(wide(flat, pad_id, longest)).view(shape),
            "attention_mask": torch.tensor(wide([[1] * len(ids) for ids in flat], 0, longest)).view(shape),
        }
        if "labels" in rows[0]:
            labels = [row["labels"] for row in rows]
            by_token = isinstance(labels[0], list) and isinstance(labels[0][0], int)
            batch["labels"] = torch.tensor(wide(labels, -100, longest) if by_token else labels)
        return batch

    return collate


def model_of(head: Head, family: str, *, dropout: float = 0.0, **changes: Any) -> Any:
    """Return a tiny model with this head, the same each time."""
    torch.manual_seed(3)
    rates = {"seq_classif_dropout": dropout} if family == "distilbert" else {"classifier_dropout_prob": dropout}
    rates |= {"summary_last_dropout": dropout} if family == "electra" else {}
    return head.auto.from_config(tiny_config(family, dropout=dropout, **rates, **head.config, **changes))


def losses_of(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def trainer_for(head: Head, family: str, out: Path, **changes: Any) -> engine.Trainer:
    """Return whet's Trainer for a tiny model with this head.

    Besides changes of the settings: `dropout`, entries of the model's `config` and its `attn`, or a `model` and a
    `collate` of one's own.
    """
    model, collate, config = (changes.pop(name, None) for name in ("model", "collate", "config"))
    dropout, attn = changes.pop("dropout", 0.0), changes.pop("attn", None)
    made = model_of(head, family, dropout=dropout, **(config or {}), **({"attn_implementation": attn} if attn else {}))
    settings: dict[str, Any] = SETTINGS | {"precision": "fp32"} | changes
    return engine.Trainer(
        model=made if model is None else model,
        args=engine.TrainingArguments(output_dir=str(out), **settings),
        train_dataset=rows_for(head),
        data_collator=collate or collator(family),
    )
