"""What is said of models whose attention whet does not know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import engine
import whet
from tiny import arguments, tiny_model
from whet.errors import ConfigError


class BertSelfAttention(nn.Module):
    """Has the name of transformers' class, and computes something else."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        return self.mix(hidden_states.cumsum(1)), None


def test_an_attention_of_another_package_is_named_with_it() -> None:
    model = tiny_model("bert")
    for layer in model.bert.encoder.layer:
        layer.attention.self = BertSelfAttention(model.config.hidden_size)
    with pytest.raises(ConfigError) as found:
        whet.optimize(model)
    said = f"{BertSelfAttention.__module__}.BertSelfAttention in place of BertSelfAttention of transformers.models.bert"
    assert said in str(found.value)


def _moe() -> Any:
    return AutoModelForCausalLM.from_config(
        Qwen3MoeConfig(
            vocab_size=64, hidden_size=16, intermediate_size=16, moe_intermediate_size=16, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_experts=2, num_experts_per_tok=1,
        )
    )  # fmt: skip


def test_a_mixture_of_experts_trains_packed_and_takes_optimize(tmp_path: Path) -> None:
    rows = [{"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}] * 4
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    model = _moe().eval()
    with torch.no_grad():
        before = model(ids, labels=ids).loss
        assert torch.allclose(whet.optimize(model)(ids, labels=ids).loss, before, rtol=1e-5)  # fp32 sums
    trainer = engine.Trainer(_moe(), arguments(tmp_path, precision="auto", max_steps=1), train_dataset=rows)
    assert trainer.objective.packed
    trainer.train()
