"""The attention switch: whatever computes it, one loss curve; and what was asked for is what runs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import AttentionInterface

import engine
import whet
from tiny import FAMILIES, arguments, losses, tiny_model, tiny_rows
from whet.kernels import gpu_attention
from whet.log import logger
from whet.models import attention
from whet.models.known import known
from whet.objectives.choose import choose

IMPLEMENTATIONS = ("whet", "eager", "sdpa")
# The same sums of float32 in another order, through other kernels, over six steps; seen: 4e-7.
TOLERANCE = 3e-6


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which attention functions were called. Eager is none of the interface's: models then call their own."""
    found: list[str] = []

    def watched(name: str, real: Any) -> Any:
        return lambda *args, **options: found.append(name) or real(*args, **options)

    attention.register()
    for name in ("whet", "sdpa"):
        monkeypatch.setitem(AttentionInterface._global_mapping, name, watched(name, AttentionInterface()[name]))
    return found


def trainer_of(folder: Path, family: str, name: str | None, **changes: Any) -> engine.Trainer:
    rows = tiny_rows(24, family, lengths=(24, 24))
    args = arguments(folder, attn_implementation=name, max_steps=6, **changes)
    return engine.Trainer(model=tiny_model(family), args=args, train_dataset=rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_loss_curve(tmp_path: Path, family: str) -> None:
    """Without dropout, whose masks are whet's own in packed batches and torch's in padded ones.

    A model whose attention does not call the AttentionInterface has no sdpa in transformers.
    """
    names = IMPLEMENTATIONS[:2] if known()[family].adds_masks else IMPLEMENTATIONS
    curves = {}
    for name in names:
        trainer = trainer_of(tmp_path, family, name)
        assert trainer.objective.packed == (name == "whet")
        trainer.train()
        curves[name] = losses(trainer)
    for name in names[1:]:
        assert curves[name] == pytest.approx(curves["whet"], rel=TOLERANCE)


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_a_padded_run_goes_through_what_was_chosen(tmp_path: Path, calls: list[str], name: str) -> None:
    trainer = trainer_of(tmp_path, "bert", name)
    trainer.train()
    assert calls == (["sdpa"] * 2 * 6 if name == "sdpa" else [])
    assert trainer.model.config._attn_implementation == name


def test_the_log_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger.name):
        trainer_of(tmp_path, "bert", "eager")
    assert "attention: transformers' own eager, asked for by attn_implementation" in caplog.text
    assert "batches run padded (BertForQuestionAnswering): attention eager does not support packed rows" in caplog.text


def test_a_model_that_ran_packed_before_runs_padded_when_told(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    trainer = trainer_of(tmp_path, "bert", None)
    assert trainer.objective.packed
    calls = request.getfixturevalue("calls")
    again = engine.Trainer(
        model=trainer.model,
        args=arguments(tmp_path, attn_implementation="sdpa", max_steps=1),
        train_dataset=trainer.train_dataset,
    )
    again.train()
    assert calls == ["sdpa"] * 2


def test_whets_own_is_refused_where_it_cannot_serve(tmp_path: Path) -> None:
    with pytest.raises(whet.ConfigError, match="whet's attention does not serve this model"):
        engine.Trainer(model=tiny_model("bert", is_decoder=True), args=arguments(tmp_path, attn_implementation="whet"))


@pytest.mark.parametrize(
    ("name", "kernel"), [(None, "auto"), ("whet", "whet"), ("flash_attention_2", "flash_attention_2")]
)
def test_three_names_run_packed(monkeypatch: pytest.MonkeyPatch, name: str | None, kernel: str) -> None:
    """On a GPU they differ in what may compute; here nothing but the choice is seen."""
    monkeypatch.setattr(gpu_attention, "have", lambda device: gpu_attention.Have(torch=True))
    found = choose(tiny_model("bert"), None, dict, attn=name)
    assert found.packed
    assert found.packed_model is not None
    assert found.packed_model.placement.kernel == kernel


def test_flash_names_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(whet.ConfigError, match="no GPU that torch can use"):
        trainer_of(tmp_path, "bert", "flash_attention_2", bf16=True)
    padded = arguments(tmp_path, attn_implementation="flash_attention_2", bf16=True)
    with pytest.raises(whet.ConfigError, match="no GPU that torch can use and no package flash-attn"):
        engine.Trainer(model=tiny_model("bert", is_decoder=True), args=padded)
    with pytest.raises(whet.ConfigError, match="does not compute in float32"):
        arguments(tmp_path, attn_implementation="flash_attention_2")
