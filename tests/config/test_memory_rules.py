"""What saves memory: which settings go together, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest

from engine import TrainingArguments
from whet import ConfigError


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"checkpointing_policy": "selective"},
            "checkpointing_policy would change nothing without",
        ),
        ({"gradient_checkpointing_kwargs": {"use_reentrant": False}}, "without gradient_checkpointing"),
        ({"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}, "holds what"),
        ({"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"debug": True}}, "holds what"),
        ({"activation_offload": True, "use_cpu": True}, "activation_offload goes with a GPU"),
        (
            {"activation_offload": True, "gradient_checkpointing": True, "checkpointing_policy": "selective"},
            "does not go with checkpointing_policy selective",
        ),
        ({"torch_empty_cache_steps": 0}, "torch_empty_cache_steps is below 1"),
        ({"max_tokens_per_batch": 0}, "max_tokens_per_batch is below 1"),
        ({"attn_implementation": "flash_attention_2"}, "does not compute in float32"),
        ({"attn_implementation": "sdpa", "max_tokens_per_batch": 100}, "goes with packed batches"),
        ({"attn_implementation": "flash"}, "attn_implementation does not fit"),
    ],
)
def test_contradicting_memory_settings_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TrainingArguments(**given)


@pytest.mark.parametrize("given", [{"bf16": True}, {"fp16": True}, {"precision": "bf16"}])
def test_flash_attention_accepts_half_precision_and_token_limits(given: dict[str, Any]) -> None:
    args = TrainingArguments(attn_implementation="flash_attention_2", max_tokens_per_batch=100, **given)
    assert args.bf16 or args.fp16


def test_older_and_newer_names_are_accepted() -> None:
    old = TrainingArguments(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False})
    new = TrainingArguments(activation_checkpointing=True, activation_checkpointing_kwargs={"use_reentrant": False})
    assert old == new


@pytest.mark.parametrize("given", [{"bf16": True}, {"fp16": True}, {"precision": "fp16"}])
def test_flash_attention_accepts_both_16_bit_formats(given: dict[str, Any]) -> None:
    assert TrainingArguments(attn_implementation="flash_attention_2", **given).attn_implementation is not None
