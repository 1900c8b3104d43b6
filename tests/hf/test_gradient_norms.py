"""Steps that are not finite, left out by the optimizer's own kernel; on a GPU whet.Trainer does so (tests/gpu)."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from whet.errors import NonFiniteError
from whet.hf.gradient_norms import GradientNorms, leaves_out_itself
from whet.log import logger


def steps(norms: GradientNorms, values: list[float]) -> tuple[nn.Parameter, torch.optim.AdamW, list[float]]:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    found = []
    for number, value in enumerate(values, start=1):
        weight.grad = torch.full((3,), value)
        norms.leave_to(optimizer, weight.grad.norm(), number)
        optimizer.step()
        norms.release()
        found.append(float(weight[0].detach()))
    return weight, optimizer, found


def test_a_step_that_is_not_finite_changes_nothing_and_is_told_one_step_later(caplog: pytest.LogCaptureFixture) -> None:
    norms = GradientNorms(3)
    with caplog.at_level(logging.WARNING, logger.name):
        weight, optimizer, found = steps(norms, [1.0, torch.inf, 1.0, torch.nan])
        assert "step 2 was not applied" in caplog.text
        assert "step 4" not in caplog.text
        norms.read()
    assert "step 4 was not applied: its gradient has the norm nan" in caplog.text
    assert found[0] == found[1] > found[2] == found[3]
    assert int(optimizer.state[weight]["step"]) == 2
    assert not hasattr(optimizer, "found_inf")


def test_too_many_in_a_row_are_an_error_before_the_next_update() -> None:
    norms = GradientNorms(2)
    with pytest.raises(NonFiniteError, match=r"(?s)2 steps in a row.*step 3"):
        steps(norms, [1.0, torch.nan, torch.nan, 1.0])
    at_the_end = GradientNorms(2)
    steps(at_the_end, [torch.nan, torch.nan])
    with pytest.raises(NonFiniteError, match="2 steps in a row"):
        at_the_end.read()


def test_an_optimizer_on_the_cpu_is_looked_at_at_once() -> None:
    assert not leaves_out_itself(torch.optim.AdamW([nn.Parameter(torch.ones(1))], fused=True), torch.ones(()))
    assert not leaves_out_itself(torch.optim.AdamW([nn.Parameter(torch.ones(1))]), 1.0)
