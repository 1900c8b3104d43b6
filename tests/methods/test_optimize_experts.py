"""Decoders with experts in a loop of a user's own: their balance loss is that of the untouched model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optimized import inputs
from torch import Tensor

import whet
from tiny_decoders import tiny_decoder

_FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")


def _model(family: str, **changes: Any) -> Any:
    return tiny_decoder(family, use_cache=False, router_aux_loss_coef=0.5, **changes).train()


def _batch(*, masked: bool) -> dict[str, Tensor]:
    if not masked:
        ids = inputs(13, 13, 13)["input_ids"]
        return {"input_ids": ids, "labels": ids}
    batch = inputs(5, 13, 1, 9)
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


@pytest.mark.parametrize("masked", [True, False], ids=["with padding", "without a mask"])
@pytest.mark.parametrize("asked", ["configuration", "call"])
@pytest.mark.parametrize("family", _FAMILIES)
def test_the_balance_of_experts_is_that_of_the_tokens(family: str, asked: str, masked: bool) -> None:
    changes = {"output_router_logits": True} if asked == "configuration" else {}
    batch: dict[str, Any] = _batch(masked=masked)
    batch |= {"output_router_logits": True} if asked == "call" else {}
    real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).flatten().bool()
    found: list[Any] = []
    for model in (_model(family, **changes), whet.optimize(_model(family, **changes))):
        out = model(**batch)
        out.loss.backward()
        gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
        found.append((out, gradients))
    (wanted, exact), (ours, gradients) = found
    torch.testing.assert_close(ours.aux_loss, wanted.aux_loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.loss, wanted.loss, rtol=1e-5, atol=1e-6)
    assert len(ours.router_logits) == len(wanted.router_logits)
    for one, other in zip(ours.router_logits, wanted.router_logits, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one[real], other[real], rtol=0, atol=1e-5)
    assert gradients.keys() == exact.keys()
    for name, gradient in exact.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=2e-5, msg=name)
