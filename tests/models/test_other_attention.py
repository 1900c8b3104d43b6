"""What is said of models whose attention whet does not know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

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


def test_a_mixture_of_experts_gets_a_fix_that_works(tmp_path: Path) -> None:
    """Its batches run padded whatever is left out, so leaving something out is no fix."""
    rows = [{"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}] * 4
    with pytest.raises(ConfigError) as found:
        whet.Trainer(_moe(), arguments(tmp_path, precision="int8"), train_dataset=rows)
    assert "--attn_implementation" not in str(found.value)
    with pytest.raises(ConfigError, match=r"or with whet\.Trainer, which runs other models"):
        whet.optimize(_moe())
    whet.Trainer(_moe(), arguments(tmp_path, precision="auto", max_steps=1), train_dataset=rows).train()
