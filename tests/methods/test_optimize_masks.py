"""Dropout under `whet.optimize` follows torch's generator: what saves and restores its state gets the same masks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optimized import inputs, logits
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import whet
from tiny import FAMILIES, tiny_model

BATCH = inputs(9, 14, 3)


def trained(family: str = "bert", **changes: Any) -> Any:
    if family in ("roberta", "xlm-roberta"):
        changes |= {"pad_token_id": 0}
    return whet.optimize(tiny_model(family, **{"dropout": 0.3} | changes)).train()


def gradient(model: Any, loss: Tensor) -> Tensor:
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(model.parameters()))])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_seed_before_a_call_gives_the_same_masks(operators: None, family: str) -> None:
    model = trained(family)
    calls = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        calls.append([logits(model, BATCH) for _ in range(2)])
    assert torch.equal(torch.stack(calls[0]), torch.stack(calls[2]))
    different = [calls[0][0], calls[0][1], calls[1][0], calls[1][1]]
    assert not any(torch.equal(one, other) for i, one in enumerate(different) for other in different[:i])


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_around_the_call_recomputes_with_the_same_masks(operators: None, reentrant: bool) -> None:
    """Gradients of a recomputed call are those of the call, bitwise; the calls between draw other masks."""
    model = trained()
    torch.manual_seed(3)
    plain = gradient(model, logits(model, BATCH).square().mean())
    torch.manual_seed(3)
    scale = torch.ones((), requires_grad=True)  # a reentrant checkpoint wants an input with a gradient
    out = checkpoint(lambda one: logits(model, BATCH) * one, scale, use_reentrant=reentrant)
    assert isinstance(out, Tensor)
    logits(model, BATCH)
    if reentrant:
        out.square().mean().backward()
        found = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    else:
        found = gradient(model, out.square().mean())
    assert torch.equal(found, plain)


def test_a_second_pass_from_saved_states_has_the_masks_of_the_first() -> None:
    """Two passes as GradCache makes them: without gradients for all chunks, then again with them, chunk by chunk."""
    model, chunks = trained(), [inputs(9, 5), inputs(14, 2, seed=1), inputs(4, 4, seed=2)]
    states, first = [], []
    with torch.no_grad():
        for chunk in chunks:
            states.append(torch.get_rng_state())
            first.append(logits(model, chunk))
    for chunk, state, expected in zip(chunks, states, first, strict=True):
        with torch.random.fork_rng():
            torch.set_rng_state(state)
            again = logits(model, chunk)
        assert torch.equal(again, expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_of_transformers_keeps_the_masks_of_the_call(operators: None, reentrant: bool) -> None:
    model = trained()
    torch.manual_seed(3)
    plain = gradient(model, logits(model, BATCH).square().mean())
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    torch.manual_seed(3)
    loss = logits(model, BATCH).square().mean()
    logits(model, inputs(5, 9))
    assert torch.equal(gradient(model, loss), plain)


@pytest.mark.parametrize("how", ["evaluated", "without dropout"])
def test_a_call_without_masks_draws_nothing_from_the_generator(how: str) -> None:
    """As torch's dropout: whatever else follows the generator stays where it was."""
    model = trained().eval() if how == "evaluated" else trained(dropout=0.0)
    before = torch.get_rng_state()
    logits(model, BATCH)
    assert torch.equal(torch.get_rng_state(), before)


def test_masks_do_not_depend_on_the_calls_before() -> None:
    """A resumed run, whose generator is restored, goes on with the masks of the run that was not interrupted."""
    first, resumed = trained(), trained()
    for _ in range(3):
        logits(first, BATCH)
    state = torch.get_rng_state()
    expected = logits(first, BATCH)
    torch.set_rng_state(state)
    assert torch.equal(logits(resumed, BATCH), expected)
