"""Settings that torch or transformers would refuse are refused where whet's operators take the place of theirs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, default_data_collator

import engine
import whet
from tiny import DECODERS, FAMILIES, arguments, tiny_config
from tiny_decoders import tiny_decoder
from whet.errors import ConfigError

_RATES = ("attention_dropout", "dropout_prob", "activation_dropout", "dropout")
_PAD, _FIRST_WORD = 1, 10


def _model(family: str) -> Any:
    torch.manual_seed(0)
    auto = AutoModelForCausalLM if family in DECODERS else AutoModelForSequenceClassification
    config = tiny_config(family, dropout=0.1, pad_token_id=_PAD)
    return auto.from_config(config).train()


def _places(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield one module of each kind that has a probability, and the probability's name."""
    seen = set()
    for name, module in model.named_modules():
        rates = (
            ["p"]
            if isinstance(module, nn.Dropout)
            else [one for one in _RATES if type(module.__dict__.get(one)) is float]
        )
        for rate in rates:
            kind = (name.rpartition(".")[2], rate)
            if kind not in seen:
                seen.add(kind)
                yield module, rate


def _batch(family: str) -> dict[str, Tensor]:
    ids, mask = torch.arange(_FIRST_WORD, _FIRST_WORD + 14).view(2, 7), torch.ones(2, 7, dtype=torch.int64)
    ids[1, 5:], mask[1, 5:] = _PAD, 0
    labels = ids.masked_fill(mask == 0, -100) if family in DECODERS else torch.tensor([0, 1])
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize("family", [*FAMILIES, *DECODERS])
def test_what_is_no_probability_is_refused_at_every_dropout(family: str) -> None:
    """The model is changed after `whet.optimize`; torch refuses the same in the modules that it runs."""
    model = _model(family)
    whet.optimize(model)
    places = list(_places(model))
    assert places
    for module, rate in places:
        before = getattr(module, rate)
        for odd in (5.0, -1.0, math.nan):
            setattr(module, rate, odd)
            with pytest.raises((ConfigError, ValueError, RuntimeError), match="probability"):
                model(**_batch(family))
        for fine in (0, 1.0, True, before):
            setattr(module, rate, fine)
            model(**_batch(family)).loss.backward()


@pytest.mark.parametrize("rate", [5.0, -1.0])
@pytest.mark.parametrize("family", ["llama", "modernbert"])
def test_dropout_of_a_config_file_is_refused_in_training(tmp_path: Path, family: str, rate: float) -> None:
    _model(family).save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | {"attention_dropout": rate}), "utf-8")
    auto = AutoModelForCausalLM if family in DECODERS else AutoModelForSequenceClassification
    batch = _batch(family)
    rows: Any = [{name: values[row] for name, values in batch.items()} for row in (0, 1)]

    def train() -> None:
        """Load and train; torch refuses the modules of some families when the model is made."""
        model = auto.from_pretrained(tmp_path / "model")
        engine.Trainer(model, arguments(tmp_path / "out"), default_data_collator, rows).train()

    with pytest.raises((ConfigError, ValueError), match="probability"):
        train()


@pytest.mark.parametrize("window", [0, -3])
def test_window_without_a_token_is_refused(window: int) -> None:
    model = tiny_decoder("mistral", sliding_window=window).train()
    whet.optimize(model)
    with pytest.raises(ConfigError, match="a window of the model's attention holds no token"):
        model(**_batch("mistral"))
