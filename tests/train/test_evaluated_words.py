"""Evaluation of masked words computes the logits that somebody reads, and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForMaskedLM

import engine
import whet
from tiny import arguments, padded, tiny_config

_VOCABULARY = 20_000
_TOKENS = 40


class _LargestTensor(TorchDispatchMode):
    """Keeps the size in bytes of the largest tensor that an operator returns."""

    n_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and found.dim() > 1 and found.shape[-1] == _VOCABULARY:
            self.n_bytes = max(self.n_bytes, found.numel() * found.element_size())
        return found


def rows() -> list[dict[str, Any]]:
    """Return rows in which one token of ten is masked."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(10, _VOCABULARY, (8, _TOKENS), generator=generator)
    labels = ids.masked_fill(torch.arange(_TOKENS) % 10 != 3, -100)
    return [{"input_ids": one.tolist(), "labels": label.tolist()} for one, label in zip(ids, labels, strict=True)]


def collate(given: list[dict[str, Any]]) -> dict[str, Tensor]:
    return padded([{"input_ids": row["input_ids"]} for row in given], 0) | {
        "labels": torch.tensor([row["labels"] for row in given])
    }


def trainer(folder: Path, **more: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForMaskedLM.from_config(tiny_config("bert", vocab_size=_VOCABULARY))
    args = arguments(folder, per_device_eval_batch_size=8)
    made = engine.Trainer(model=model, args=args, eval_dataset=rows(), data_collator=collate, **more)
    assert made.objective.packed
    return made


def evaluated(made: Any) -> tuple[float, int]:
    """Return the loss, and the bytes of the largest logits."""
    with _LargestTensor() as largest:
        loss = made.evaluate()["eval_loss"]
    return loss, largest.n_bytes


def test_the_loss_alone_takes_the_memory_of_masked_tokens(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    loss, n_bytes = evaluated(made)
    n_masked = sum(label != -100 for row in rows() for label in row["labels"])
    assert 0 < n_bytes <= n_masked * _VOCABULARY * 4
    with torch.no_grad():
        wanted = float(whet.restore(made.model).eval()(**collate(rows())).loss)
    assert loss == pytest.approx(wanted, rel=1e-5)


def test_metrics_get_the_logits_of_all_tokens(tmp_path: Path) -> None:
    shapes: list[tuple[int, ...]] = []

    def metrics(found: Any) -> dict[str, float]:
        shapes.append(found.predictions.shape)
        return {"seen": 1.0}

    loss, n_bytes = evaluated(trainer(tmp_path, compute_metrics=metrics))
    assert shapes == [(8, _TOKENS, _VOCABULARY)]
    assert n_bytes >= 8 * _TOKENS * _VOCABULARY * 4
    assert loss == pytest.approx(evaluated(trainer(tmp_path))[0], rel=1e-5)


def test_a_prediction_after_an_evaluation_has_all_logits(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    evaluated(made)
    assert made.predict(rows()).predictions.shape == (8, _TOKENS, _VOCABULARY)
