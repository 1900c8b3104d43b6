"""What ranks share: settings that ask for two things are refused, and each asks for what it says."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import engine
import whet
from whet.config.rules.sharing import stage_of_run

_STAGE = {None: 0, "": 0, False: 0, "full_shard": 3, True: 3, "shard_grad_op": 2, "full_shard auto_wrap": 3}


@pytest.mark.parametrize("fsdp", _STAGE)
@pytest.mark.parametrize("stage", [None, 0, 1, 2, 3])
def test_fsdp_and_the_stage_of_zero_mean_one_thing_or_are_refused(fsdp: Any, stage: int | None) -> None:
    given = {"fsdp": fsdp, "zero_stage": stage}
    if stage is None or not _STAGE[fsdp] or stage == _STAGE[fsdp]:
        assert stage_of_run(engine.TrainingArguments(**given)) == (_STAGE[fsdp] if stage is None else stage)
        return
    with pytest.raises(whet.ConfigError, match="fsdp and zero_stage contradict each other"):
        engine.TrainingArguments(**given)


def test_a_stage_that_follows_from_another_setting_follows_its_changes() -> None:
    args = engine.TrainingArguments(fsdp="full_shard")
    assert stage_of_run(dataclasses.replace(args, fsdp=None)) == 0
    assert stage_of_run(dataclasses.replace(args, fsdp="shard_grad_op")) == 2
    assert stage_of_run(engine.TrainingArguments(**args.to_dict())) == 3


@pytest.mark.parametrize("given", [{"zero_stage": 3}, {"fsdp": "full_shard"}, {}], ids=str)
@pytest.mark.parametrize("what", ["optimizer", "params"])
def test_offload_on_a_cpu_is_refused_with_what_saves_memory_there(what: Any, given: dict[str, Any]) -> None:
    with pytest.raises(whet.ConfigError) as caught:
        engine.TrainingArguments(offload=what, use_cpu=True, **given)
    (problem,) = caught.value.problems
    assert "memory already" in problem.why
    for way in ("--zero_stage 3", "--optim adafactor"):
        assert way in problem.fix


def test_offload_on_a_gpu_goes_with_stages_that_fully_shard_carries_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU is made up: these are the settings alone."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for given in ({"zero_stage": 2}, {"zero_stage": 3}, {"fsdp": "full_shard"}):
        assert engine.TrainingArguments(offload="params", **given).offload == "params"
    for given in ({}, {"zero_stage": 1}):
        with pytest.raises(whet.ConfigError, match="use --zero_stage 3 with --offload"):
            engine.TrainingArguments(offload="params", **given)
