"""The first lines of a training say what it will take at its peak, and whether that is free."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForQuestionAnswering

from engine import Trainer, TrainingArguments
from text_tasks import save_encoder, topic_rows, words, write_csv
from tiny import tiny_rows
from whet.cli.main import run
from whet.engine import forecast
from whet.hardware import memory


@pytest.fixture
def training(tmp_path: Path) -> list[str]:
    """A command that trains."""
    save_encoder(tmp_path / "model")
    data = write_csv(tmp_path / "train.csv", topic_rows())
    return words("classify", tmp_path / "model", tmp_path / "out", "--do_train", train_file=data, max_steps=1)


def test_the_first_lines_have_the_peak(training: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(training) == 0
    line = next(one for one in capsys.readouterr().out.splitlines() if one.startswith("memory"))
    assert re.match(r"memory     [\d.]+ [MG]B of [\d.]+ [MG]B free forecast, \w+ [\d.]+ [kMG]B", line), line


def test_a_run_that_will_not_fit_is_warned(
    training: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forecast, "available_bytes", lambda: -(memory.resident_bytes() or 0) // 2)
    assert run(training) == 0
    said = capsys.readouterr()
    warned = next(line for line in (said.err + said.out).splitlines() if "is forecast to need" in line)
    assert "--gradient_checkpointing" in warned


class Odd(nn.Module):
    """A model of a user's own, which reads numbers that a rehearsal does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(200, 8)

    def forward(self, input_ids: torch.Tensor, start_positions: torch.Tensor, **_: torch.Tensor) -> dict[str, object]:
        hidden = self.table(input_ids).sum(-1)
        chosen = hidden[hidden > hidden.mean()]  # how many, only the numbers say
        return {"loss": chosen.square().mean() + hidden.square().mean()}


def test_a_model_that_cannot_be_rehearsed_trains_without_a_forecast(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, precision="fp32", max_steps=1)
    rows = tiny_rows(8, lengths=(20, 20))
    trainer = Trainer(Odd(), args, train_dataset=[dict(rows[n]) for n in range(8)])
    trainer.train()
    assert trainer.state.global_step == 1


def test_a_forecast_is_fast(tmp_path: Path) -> None:
    """A start of a training takes two seconds; what a forecast adds must not be seen."""
    model = BertForQuestionAnswering(BertConfig(vocab_size=200, hidden_size=64, num_attention_heads=4))  # of 12 layers
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, precision="fp32", max_steps=1)
    trainer = Trainer(model, args, train_dataset=tiny_rows(64))
    planned, optimizer = trainer.planned(), trainer.new_loop().optimizer
    held = forecast.Held(resident_bytes=1)
    taken = []
    for _ in range(3):
        begin_s = time.process_time()
        assert forecast.at_start(planned, "fp32", optimizer, held, 8) is not None
        taken.append(time.process_time() - begin_s)
    assert min(taken) < 0.3
