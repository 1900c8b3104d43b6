"""Copies and pickles of a changed model of each family are independent and work."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from changed import batch_of, changed_by, logits

import whet
from tiny import FAMILIES

pytestmark = pytest.mark.usefixtures("operators")
HOWS = ("optimize", "trainer", "checkpointing")


@pytest.mark.each_value
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_deep_copy_is_independent_and_works(family: str, how: str, tmp_path: Path) -> None:
    model, batch = changed_by(how, family, tmp_path).eval(), batch_of(family)
    wanted = logits(model, batch).detach()
    other = copy.deepcopy(model)
    torch.testing.assert_close(logits(other, batch), wanted)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    torch.testing.assert_close(logits(other, batch), wanted)
    logits(other.train(), batch).square().sum().backward()
    assert all(parameter.grad is None or how != "optimize" for parameter in model.parameters())
    assert any(parameter.grad.count_nonzero() for parameter in other.parameters() if parameter.grad is not None)
    if how == "optimize":
        assert whet.changes(other).fused == whet.changes(model).fused
        whet.restore(model)
        torch.testing.assert_close(logits(other.eval(), batch), wanted)
        plain = whet.restore(other)
        assert not [module for module in plain.modules() if "forward" in module.__dict__]
        torch.testing.assert_close(logits(plain, batch), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.each_value
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_pickled_model_works(family: str, how: str, tmp_path: Path) -> None:
    model, batch = changed_by(how, family, tmp_path).eval(), batch_of(family)
    wanted = logits(model, batch)
    other = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(logits(other, batch), wanted)
    if how == "optimize":
        assert whet.changes(other) == whet.changes(model)
        torch.testing.assert_close(logits(whet.restore(other), batch), wanted, rtol=1e-4, atol=1e-5)
