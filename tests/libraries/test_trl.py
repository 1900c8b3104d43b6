"""`whet.optimize` inside TRL: a reward model is an encoder with one score; its trainer keeps its loss and metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from tiny_encoders import sentences
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import whet

pytestmark = pytest.mark.filterwarnings("default")  # those of these libraries are not whet's
trl = pytest.importorskip("trl", reason="needs trl: make test-libraries installs it")

N_STEPS = 50
CURVE_TOLERANCE = 1e-4
"""Of 50 optimizer steps: sums run in another order without padding."""


def preferences(tokenizer: Any) -> Dataset:
    """Return pairs of a chosen and a rejected text, tokenised: TRL would add an end token, which encoders lack."""
    columns = zip(sentences(160, 1), sentences(160, 2), strict=True)
    rows = [
        {
            "chosen_ids": tokenizer(chosen, truncation=True)["input_ids"],
            "rejected_ids": tokenizer(rejected, truncation=True)["input_ids"],
        }
        for chosen, rejected in columns
    ]
    return Dataset.from_list(rows)


def history(folder: Path, out: Path, *, optimized: bool) -> list[dict[str, float]]:
    """Return what TRL logs at each step."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    if optimized:
        whet.optimize(model)
        assert whet.changes(model) is not None
    args = trl.RewardConfig(
        str(out), max_steps=N_STEPS, per_device_train_batch_size=8, learning_rate=1e-3, logging_steps=1, bf16=False,
        save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True, seed=3,
    )  # fmt: skip
    trainer = trl.RewardTrainer(
        model=model, args=args, train_dataset=preferences(tokenizer), processing_class=tokenizer
    )
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def test_reward_trainer_has_the_same_curve(encoder_folder: Path, tmp_path: Path) -> None:
    plain = history(encoder_folder, tmp_path / "plain", optimized=False)
    found = history(encoder_folder, tmp_path / "whet", optimized=True)
    assert len(found) == N_STEPS
    assert plain[0]["loss"] != plain[-1]["loss"]
    for name in ("loss", "mean_reward", "margin"):
        wanted = [entry[name] for entry in plain]
        np.testing.assert_allclose([entry[name] for entry in found], wanted, rtol=CURVE_TOLERANCE, atol=1e-5)
