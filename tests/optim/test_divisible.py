"""Which optimizers work on the share of a rank (ZeRO): those whose updates of a tensor read no other one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from transformers.optimization import Adafactor

import engine
import whet
from whet.config.optimizer_names import by_element, names
from whet.errors import ConfigError
from whet.optim import divisible, registry

_OTHER_MACHINES = {"adamw_apex_fused"}


class _ScheduleFree(torch.optim.AdamW):
    """An optimizer that whet does not know, however it is called."""


def _model() -> torch.nn.Module:
    return torch.nn.Linear(8, 4)


@pytest.mark.parametrize("name", [name for name in names() if name not in _OTHER_MACHINES])
def test_each_optimizer_of_whet_can_be_shared_out(name: str) -> None:
    try:
        optimizer = registry.build(_model(), engine.TrainingArguments(optim=name, report_to=[]))
    except whet.WhetError as error:
        pytest.skip(str(error))
    divisible.require_known(optimizer)


@pytest.mark.parametrize("name", [name for name in by_element() if not names()[name].package])
def test_an_update_by_element_reads_no_other_element(name: str) -> None:
    """The rows of a matrix end where those end that are parameters of their own; ranks cut tensors so."""
    numbers = torch.Generator().manual_seed(0)
    args = engine.TrainingArguments(optim=name, learning_rate=1e-2, weight_decay=0.1)
    values = torch.randn(9, 31, generator=numbers)
    whole, cut = (nn.ParameterList(nn.Parameter(one.clone()) for one in parts) for parts in ([values], values.split(4)))
    optimizers = [registry.build(model, args) for model in (whole, cut)]
    for _ in range(7):
        gradient = torch.randn(9, 31, generator=numbers)
        for model, optimizer, parts in zip((whole, cut), optimizers, ([gradient], gradient.split(4)), strict=True):
            for parameter, part in zip(model, parts, strict=True):
                parameter.grad = part.clone()
            optimizer.step()
    found, wanted = torch.cat(list(cut)).detach(), whole[0].detach()
    assert float((wanted - values).abs().mean()) > 0.01
    # operators may round a tensor's last elements, which fill no vector, in another way: to 2^-23 of numbers below 4
    torch.testing.assert_close(found, wanted, rtol=0, atol=7 * 2**-22)


@pytest.mark.parametrize("cls", [torch.optim.Adagrad, torch.optim.NAdam, torch.optim.Adafactor, Adafactor])
def test_optimizers_of_a_tensor_can_be_shared_out(cls: Any) -> None:
    divisible.require_known(cls(_model().parameters()))


@pytest.mark.parametrize(("reads", "unit"), [("element", 1), ("tensor", None)])
def test_an_optimizer_of_others_says_what_its_updates_read(reads: str, unit: int | None) -> None:
    class Plugged(torch.optim.AdamW):
        whet_reads = reads

    optimizer = Plugged(_model().parameters())
    divisible.require_known(optimizer)
    assert divisible.unit_of(optimizer) == unit


@pytest.mark.parametrize("cls", [torch.optim.LBFGS, _ScheduleFree])
def test_an_optimizer_that_may_read_all_tensors_is_refused_by_name(cls: type[Optimizer]) -> None:
    with pytest.raises(ConfigError, match=cls.__name__) as refused:
        divisible.require_known(cls(_model().parameters()))  # pyright: ignore[reportCallIssue]
    assert "leave --zero_stage, --fsdp and --deepspeed out" in str(refused.value)
