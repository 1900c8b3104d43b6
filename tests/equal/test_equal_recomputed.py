"""What is computed again in backward is what was computed before: one loss curve, bit for bit, dropout on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import SqueezeBertConfig, SqueezeBertForQuestionAnswering

import engine
from tiny import FAMILIES, arguments, losses, plain_torch, tiny_model, tiny_rows, weights_of

POLICIES = ("blocks", "selective")
BF16 = pytest.param(True, id="bf16"), pytest.param(False, id="fp32")
Run = tuple[list[float], dict[str, Tensor]]


def run(folder: Path, model: Any, family: str = "bert", *, lengths: tuple[int, int] = (6, 40), **changes: Any) -> Run:
    """Train over accumulated batches; return losses and weights."""
    usual = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "max_steps": 3, "seed": 5}
    trainer = engine.Trainer(
        model=model, args=arguments(folder, **(usual | changes)), train_dataset=tiny_rows(18, family, lengths=lengths)
    )
    trainer.train()
    return losses(trainer), weights_of(trainer.model)


def squeezebert() -> Any:
    """A model that whet does not know: it runs padded, and its masks come from torch's generator."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 200, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    return SqueezeBertForQuestionAnswering(
        SqueezeBertConfig(**sizes, intermediate_size=64, embedding_size=32, max_position_embeddings=80)
    )


def assert_identical(found: Run, wanted: Run) -> None:
    assert found[0] == wanted[0]
    assert [name for name, value in wanted[1].items() if not torch.equal(found[1][name], value)] == []


@pytest.mark.each_value
@pytest.mark.parametrize("bf16", BF16)
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_models_are_equal_in_every_bit(tmp_path: Path, family: str, bf16: bool) -> None:
    """The masks are functions of their place, the operators are deterministic: nothing may differ."""
    plain = run(tmp_path, tiny_model(family, dropout=0.1), family, bf16=bf16)
    for policy in POLICIES:
        asked = {"bf16": bf16, "gradient_checkpointing": True, "checkpointing_policy": policy}
        assert_identical(run(tmp_path, tiny_model(family, dropout=0.1), family, **asked), plain)


@pytest.mark.parametrize(("family", "bf16"), [("albert", True), ("bert", False)])
def test_so_they_are_in_plain_torch(tmp_path: Path, family: str, bf16: bool) -> None:
    with plain_torch():
        plain = run(tmp_path, tiny_model(family, dropout=0.1), family, bf16=bf16)
        for policy in POLICIES:
            asked = {"bf16": bf16, "gradient_checkpointing": True, "checkpointing_policy": policy}
            assert_identical(run(tmp_path, tiny_model(family, dropout=0.1), family, **asked), plain)


@pytest.mark.each_value
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "make",
    [squeezebert, lambda: tiny_model("bert", dropout=0.1, is_decoder=True, use_cache=False)],
    ids=["squeezebert", "decoder"],
)
def test_padded_models_are_equal_in_every_bit(tmp_path: Path, make: Callable[[], Any], policy: str) -> None:
    """torch puts its generator back before it computes again. (A cache, which checkpointing switches off, would make
    attention round otherwise.)"""
    asked = {"gradient_checkpointing": True, "checkpointing_policy": policy}
    even = {"lengths": (24, 24)}
    assert_identical(run(tmp_path, make(), **even, **asked), run(tmp_path, make(), **even))
