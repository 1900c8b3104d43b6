"""Settings that reach the Trainer: smoothed labels, unread columns; whet's settings in transformers' Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from override_runs import losses, ours, pad, theirs, token_rows
from tiny_runs import tiny_bert
from transformers import BertForSequenceClassification

import engine


def classifier() -> Any:
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 3}
    return tiny_bert(BertForSequenceClassification, **still)


def test_smoothed_labels_and_all_columns_by_setting(tmp_path: Path) -> None:
    seen: list[set[str]] = []

    def collate(rows: Any) -> Any:
        seen.append(set(rows[0]))
        return pad(rows)

    rows = [row | {"extra": 1} for row in token_rows()]
    found = []
    for base, made in ((engine.Trainer, ours), (transformers.Trainer, theirs)):
        args = made(tmp_path / base.__module__, label_smoothing_factor=0.2, remove_unused_columns=False)
        trainer = base(classifier(), args, collate, rows)
        trainer.train()
        found.append(losses(trainer))
    assert all("extra" in names for names in seen)
    assert found[0] == pytest.approx(found[1], rel=1e-4)
