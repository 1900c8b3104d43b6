"""Modules of the user's own that hold an encoder, in the engine: as they are, or as whet.optimize has changed them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import arguments, weights_of
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import AutoModel

import engine
import whet
from tiny import FIRST_WORD, VOCABULARY, tiny_config
from whet.errors import ConfigError


class Classifier(nn.Module):
    """An encoder under a name of one's own, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.head = AutoModel.from_config(tiny_config("bert", dropout=0.1)), nn.Linear(32, 2)

    def forward(self, ids: torch.Tensor, answers: torch.Tensor) -> dict[str, torch.Tensor]:
        states = self.encoder(input_ids=ids, attention_mask=(ids > 0).long()).last_hidden_state
        return {"loss": cross_entropy(self.head(states[:, 0]), answers)}


def rows() -> list[dict[str, Any]]:
    numbers = torch.Generator().manual_seed(3)
    ids = [torch.randint(FIRST_WORD, VOCABULARY, (n,), generator=numbers) for n in range(5, 37)]
    return [{"ids": one, "answers": int(one[0]) % 2} for one in ids]


def collate(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    ids = nn.utils.rnn.pad_sequence([row["ids"] for row in batch], batch_first=True)
    return {"ids": ids, "answers": torch.tensor([row["answers"] for row in batch])}


def trained(folder: Path, model: nn.Module, **changes: Any) -> dict[str, torch.Tensor]:
    """Return the weights after a short run of the engine."""
    args = arguments(folder, per_device_train_batch_size=8, learning_rate=1e-3, **changes)
    engine.Trainer(model, args, data_collator=collate, train_dataset=rows()).train()
    return weights_of(model)


def test_a_module_that_holds_its_encoder_trains_as_it_is(tmp_path: Path) -> None:
    model = Classifier()
    before = {name: weight.clone() for name, weight in weights_of(model).items()}
    found = trained(tmp_path, model)
    assert whet.changes(model) is None
    assert any(not torch.equal(found[name], weight) for name, weight in before.items())


@pytest.mark.parametrize("policy", ["blocks", "selective"])
def test_checkpointing_changes_no_weight_of_an_optimized_module(tmp_path: Path, policy: str) -> None:
    plain = trained(tmp_path / "plain", whet.optimize(Classifier()))
    model = whet.optimize(Classifier())
    again = trained(tmp_path / "again", model, gradient_checkpointing=True, checkpointing_policy=policy)
    assert whet.changes(model) is not None
    for name, weight in plain.items():
        torch.testing.assert_close(again[name], weight, rtol=0, atol=1e-6, msg=name)


def test_token_budget_is_refused_for_a_module_of_the_users(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_tokens_per_batch goes with packed batches"):
        trained(tmp_path, Classifier(), max_tokens_per_batch=64)
