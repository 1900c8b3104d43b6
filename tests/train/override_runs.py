"""Models, rows and settings for subclasses of whet's and of transformers' Trainer, run side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tiny_runs import arguments
from torch import nn

import engine


class Smoothed(nn.Module):
    """Takes loss kwargs or not, as transformers' models do and older ones did not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.head(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def class_rows(n: int = 14) -> list[dict[str, Any]]:
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(5))
    return [{"x": row, "labels": torch.tensor(i % 3)} for i, row in enumerate(x)]


def token_rows(n: int = 14) -> list[dict[str, Any]]:
    numbers = torch.Generator().manual_seed(3)
    lengths = [4 + (5 * i) % 13 for i in range(n)]
    ids = [torch.randint(5, 50, (length,), generator=numbers).tolist() for length in lengths]
    return [{"input_ids": row, "attention_mask": [1] * len(row), "labels": i % 3} for i, row in enumerate(ids)]


def pad(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    width = max(len(row["input_ids"]) for row in rows)
    return {
        "input_ids": torch.tensor([row["input_ids"] + [0] * (width - len(row["input_ids"])) for row in rows]),
        "attention_mask": torch.tensor([row["attention_mask"] + [0] * (width - len(row["input_ids"])) for row in rows]),
        "labels": torch.tensor([row["labels"] for row in rows]),
    }


def theirs(folder: Path, **changes: Any) -> transformers.TrainingArguments:
    usual: dict[str, Any] = {
        "output_dir": str(folder), "use_cpu": True, "per_device_train_batch_size": 4, "learning_rate": 1e-2,
        "train_sampling_strategy": "sequential", "save_strategy": "no", "num_train_epochs": 1, "logging_steps": 1,
        "report_to": [], "disable_tqdm": True, "optim": "adamw_torch",
    }  # fmt: skip
    return transformers.TrainingArguments(**(usual | changes))


def ours(folder: Path, **changes: Any) -> engine.TrainingArguments:
    return arguments(folder, **({"optim": "adamw_torch", "logging_steps": 1, "precision": "fp32"} | changes))


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
