"""Passes of an optimised model within passes, and passes that end in the middle: nothing of one is left in another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimized import Inputs, gradients, inputs, logits
from torch import Tensor, nn

import whet
from tiny import tiny_model

BATCH, OTHER = inputs(9, 14, 3), inputs(11, 6, seed=4)
PADDED_LEFT = {name: column.flip(1) for name, column in OTHER.items()}
"""Runs with its padding."""


def middle(model: Any) -> nn.Module:
    """Return a module in the middle of the first block."""
    return model.bert.encoder.layer[0].attention


def outermost(run: Callable[[], Any]) -> Callable[..., None]:
    """Return a hook that runs this, but not within itself; a recomputation of the block runs it again."""
    within: list[bool] = []

    def hook(*_: Any) -> None:
        if within:
            return
        within.append(True)
        run()
        within.pop()

    return hook


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("inner", [OTHER, PADDED_LEFT], ids=["packed", "padded"])
@pytest.mark.parametrize("same", [True, False], ids=["of itself", "of another"])
def test_a_model_called_in_a_hook_changes_no_pass(same: bool, inner: Inputs, checkpointing: bool) -> None:
    model = whet.optimize(tiny_model("bert")).train()
    called = model if same else whet.optimize(tiny_model("bert", seed=5)).train()
    alone, alone_inner = gradients(model, BATCH), logits(called, inner)
    if checkpointing:
        model.activation_checkpointing_enable()
        called.activation_checkpointing_enable()
    found: list[Tensor] = []
    handle = middle(model).register_forward_hook(outermost(lambda: found.append(logits(called, inner))))
    outer = gradients(model, BATCH)
    handle.remove()
    for one, other in zip(outer, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    torch.testing.assert_close(found[0], alone_inner, rtol=0, atol=0)


def fail(*_: Any) -> None:
    raise KeyError("in the middle of a pass")


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_pass_that_fails_in_the_middle_leaves_nothing_behind(checkpointing: bool) -> None:
    model = whet.optimize(tiny_model("bert")).train()
    if checkpointing:
        model.activation_checkpointing_enable()
    alone = [gradients(model, batch) for batch in (BATCH, PADDED_LEFT)]
    handle = middle(model).register_forward_hook(fail)
    for batch in (BATCH, PADDED_LEFT):
        with pytest.raises(KeyError, match="in the middle"):
            model(**batch)
    handle.remove()
    for batch, expected in zip((BATCH, PADDED_LEFT), alone, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(gradients(model, batch), expected, strict=True))


def test_a_failure_in_backward_leaves_nothing_behind() -> None:
    model = whet.optimize(tiny_model("bert")).train()
    model.activation_checkpointing_enable()
    alone = gradients(model, BATCH)
    loss = logits(model, BATCH).square().mean()
    handle = middle(model).register_forward_hook(fail)
    with pytest.raises(KeyError, match="in the middle"):
        loss.backward()
    handle.remove()
    model.zero_grad()
    assert all(torch.equal(one, other) for one, other in zip(gradients(model, BATCH), alone, strict=True))


def test_a_failure_that_a_hook_catches_leaves_the_outer_pass_alone() -> None:
    model, broken = whet.optimize(tiny_model("bert")), whet.optimize(tiny_model("bert", seed=5))
    with torch.no_grad():
        alone = logits(model, BATCH)
        middle(broken).register_forward_hook(fail)

        def try_it() -> None:
            with pytest.raises(KeyError):
                broken(**OTHER)

        middle(model).register_forward_hook(outermost(try_it))
        assert torch.equal(logits(model, BATCH), alone)


def test_two_models_in_turns_are_as_each_alone() -> None:
    one, other = (whet.optimize(tiny_model("bert", seed=seed)).train() for seed in (0, 5))
    alone = [gradients(model, batch) for model, batch in ((one, BATCH), (other, OTHER))]
    losses = [logits(model, batch).square().mean() for model, batch in ((one, BATCH), (other, OTHER))]
    for model, loss, expected in zip((one, other), losses, alone, strict=True):
        found = torch.autograd.grad(loss, list(model.parameters()))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_two_heads_that_share_an_encoder_are_optimised_and_restored_in_any_order() -> None:
    heads = [tiny_model("bert", seed=seed).eval() for seed in (0, 5)]
    heads[1].bert = heads[0].bert
    alone = [logits(head, BATCH) for head in heads]
    for head in heads:
        whet.optimize(head)
    for order in (heads, []):
        for head, expected in zip(heads, alone, strict=True):  # to fp32 rounding
            found, real = logits(head, BATCH), BATCH["attention_mask"].bool()
            torch.testing.assert_close(found[:, real], expected[:, real], rtol=0, atol=5e-6)
        for head in order:
            whet.restore(head)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_heads_with_one_configuration_get_their_attention_back(order: tuple[int, int]) -> None:
    heads = [tiny_model("bert", seed=seed) for seed in (0, 5)]
    heads[1].bert, heads[1].config = heads[0].bert, heads[0].config
    for head in heads:
        whet.optimize(head)
    for number in order:
        whet.restore(heads[number])
    assert [head.config._attn_implementation for head in heads] == ["sdpa", "sdpa"]


def test_dropouts_can_be_found_by_their_class_and_switched_on_alone() -> None:
    """As those do who estimate uncertainty by dropout: all else evaluates."""
    model = whet.optimize(tiny_model("bert", dropout=0.3)).eval()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.train()
    assert not torch.equal(logits(model, BATCH), logits(model, BATCH))
