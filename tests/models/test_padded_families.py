"""Models that whet cannot run packed train all the same, padded, and the log says so."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    DebertaV2Config,
    DebertaV2ForQuestionAnswering,
    IBertConfig,
    IBertForQuestionAnswering,
)

import engine
import whet
from tiny import FAMILIES, Pad, arguments, losses, masked_loss, padded, tiny_model, tiny_rows
from whet.data.store import RowStore
from whet.log import logger

_SIZES = {"vocab_size": 200, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_SIZES |= {"intermediate_size": 64, "max_position_embeddings": 80}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def unknown_model(name: str) -> Any:
    """Return a model that whet does not pack: of an unknown family, with a convolution (DeBERTa v2), or a decoder."""
    torch.manual_seed(0)
    if name == "ibert":
        return IBertForQuestionAnswering(IBertConfig(**_SIZES, **_NO_DROPOUT))
    if name == "deberta-v2":
        return DebertaV2ForQuestionAnswering(DebertaV2Config(**_SIZES, **_NO_DROPOUT, conv_kernel_size=3))
    return tiny_model(name, is_decoder=True)


unknown = pytest.mark.parametrize("name", ["ibert", "deberta-v2", "bert", "roberta", "electra"])


@pytest.fixture
def messages() -> Iterator[list[str]]:
    """What whet's log says, wherever an earlier test has sent it."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield found
    logger.removeHandler(handler)
    logger.setLevel(level)


def padded_features(rows: RowStore, pad_id: int) -> list[dict[str, Any]]:
    """Return the rows as somebody's own preprocessing leaves them: padded, with a mask."""
    columns = padded(list(rows), pad_id)
    return [{name: column[row].tolist() for name, column in columns.items()} for row in range(len(rows))]


@unknown
def test_an_unknown_model_trains_padded_and_the_log_says_so(tmp_path: Path, name: str, messages: list[str]) -> None:
    model = unknown_model(name)
    features = padded_features(tiny_rows(24, "roberta"), model.config.pad_token_id)
    trainer = engine.Trainer(model=model, args=arguments(tmp_path, num_train_epochs=4), train_dataset=features)
    assert [line for line in messages if "padded" in line and type(model).__name__ in line] != []
    trainer.train()
    assert not trainer.objective.packed
    assert sum(losses(trainer)[-6:]) < sum(losses(trainer)[:6])


@unknown
def test_its_loss_leaves_padding_out(tmp_path: Path, name: str) -> None:
    """The loss of the first step is that over real tokens, however much padding the rows came with."""
    model, rows = unknown_model(name), tiny_rows(4, "roberta")
    pad_id = model.config.pad_token_id
    with torch.no_grad():
        wanted = float(masked_loss(model, padded(list(rows), pad_id)))
    wide = padded(list(rows), pad_id, length=60)
    features = [{column: wide[column][row].tolist() for column in wide} for row in range(4)]
    trainer = engine.Trainer(model=model, args=arguments(tmp_path, max_steps=1), train_dataset=features)
    trainer.train()
    assert losses(trainer) == pytest.approx([wanted], rel=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_known_encoder_runs_without_padding_and_the_log_says_so(
    tmp_path: Path, family: str, messages: list[str]
) -> None:
    trainer = engine.Trainer(model=tiny_model(family), args=arguments(tmp_path))
    assert trainer.objective.packed
    assert [line for line in messages if line.startswith(f"batches run without padding ({family})")] != []


def test_rows_of_one_length_need_no_mask(tmp_path: Path) -> None:
    """Without a tokenizer and without padding there is nothing that a mask could say."""
    rows = tiny_rows(8, "roberta", lengths=(20, 20))
    with_mask = padded_features(rows, 1)
    curves = []
    for dataset in (with_mask, rows):
        trainer = engine.Trainer(
            model=unknown_model("ibert"), args=arguments(tmp_path, max_steps=3), train_dataset=dataset
        )
        trainer.train()
        curves.append(losses(trainer))
    assert curves[0] == pytest.approx(curves[1], rel=1e-6)


def test_rows_padded_on_the_left_are_refused(tmp_path: Path) -> None:
    """Their answers point at places in the padded row; as in a packed batch, they must not point at another token."""
    rows = [
        {
            "input_ids": [1] * 3 + row["input_ids"],
            "attention_mask": [0] * 3 + [1] * len(row["input_ids"]),
            "start_positions": row["start_positions"] // 2 + 3,
            "end_positions": row["start_positions"] // 2 + 4,
        }
        for row in tiny_rows(4, "roberta", lengths=(20, 20))
    ]
    trainer = engine.Trainer(model=unknown_model("ibert"), args=arguments(tmp_path, max_steps=1), train_dataset=rows)
    with pytest.raises(whet.DataError, match="padded on the left"):
        trainer.train()


def test_rows_that_nobody_can_pad_are_refused(tmp_path: Path) -> None:
    """Of different lengths, without a tokenizer: the error says what to give."""
    rows = tiny_rows(4, "roberta")
    trainer = engine.Trainer(model=unknown_model("ibert"), args=arguments(tmp_path, max_steps=1), train_dataset=rows)
    with pytest.raises(whet.WhetError, match="processing_class"):
        trainer.train()


def test_a_collator_of_the_users_own_is_used(tmp_path: Path) -> None:
    """Then batches are what the collator makes of the rows, and the loss is the model's own."""
    rows, model = tiny_rows(4), tiny_model("bert")
    with torch.no_grad():
        wanted = model(**padded(list(rows), 0, length=50)).loss.item()
    trainer = engine.Trainer(
        model=model, args=arguments(tmp_path, max_steps=1), train_dataset=rows, data_collator=Pad(0, length=50)
    )
    assert not trainer.objective.packed
    trainer.train()
    assert losses(trainer) == pytest.approx([wanted], rel=1e-5)


def test_a_model_that_runs_padded_is_left_as_it_is(tmp_path: Path) -> None:
    model = unknown_model("ibert")
    before = [type(module) for module in model.modules()]
    engine.Trainer(model=model, args=arguments(tmp_path))
    assert [type(module) for module in model.modules()] == before
    assert any(isinstance(module, nn.Dropout) for module in model.modules())
