"""Mixed precision of accelerate stands around a model's forward: `whet.optimize` still knows what the forward reads."""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from types import MethodType
from typing import Any

import accelerate
import pytest
import torch
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments

import whet
from tiny import DECODERS, tiny_config
from tiny_decoders import collate, tiny_decoder, token_rows
from whet.methods.unpad import method

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


@pytest.fixture
def amounts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How much padding each call without padding computes."""
    found: list[str] = []
    laid_out = method.layout_of

    def spied(mask: Any, amount: Any) -> Any:
        found.append(amount)
        return laid_out(mask, amount)

    monkeypatch.setattr(method, "layout_of", spied)
    return found


def _classifier() -> Any:
    return AutoModelForSequenceClassification.from_config(tiny_config("bert")).train()


def _batch(n_labels: int | None = None) -> dict[str, torch.Tensor]:
    batch = collate(token_rows(6))
    return batch if n_labels is None else batch | {"labels": torch.arange(6) % n_labels}


@pytest.mark.parametrize("order", ["optimize first", "accelerate first"])
@pytest.mark.parametrize("family", DECODERS)
def test_decoders_run_without_padding(family: str, order: str, amounts: list[str]) -> None:
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    model = tiny_decoder(family).train()
    model.config.use_cache = False
    if order == "optimize first":
        whet.optimize(model)
    model = accelerator.prepare(model)
    if order == "accelerate first":
        whet.optimize(model)
    model(**_batch()).loss.backward()
    assert amounts == ["none"]


def test_classifiers_compute_no_padding(amounts: list[str]) -> None:
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    model = accelerator.prepare(whet.optimize(_classifier()))
    model(**_batch(2)).loss.backward()
    assert amounts == ["none"]


def test_transformers_trainer_in_bf16(tmp_path: Path, amounts: list[str]) -> None:
    rows: Any = token_rows(8)
    args = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True, max_steps=2, bf16=True)
    Trainer(whet.optimize(tiny_decoder("llama")), args, collate, rows).train()
    assert amounts == ["none"] * 2


def test_a_wrapper_of_somebody_elses_may_read_anything(amounts: list[str]) -> None:
    """It has the forward's name and signature, as accelerate's has, and its own code."""
    model = whet.optimize(_classifier())
    inner = type(model).forward

    @wraps(inner)
    def forward(self: Any, *given: Any, **options: Any) -> Any:
        return inner(self, *given, **options)

    model.forward = MethodType(forward, model)
    model(**_batch(2)).loss.backward()
    assert amounts == ["sampled"]
