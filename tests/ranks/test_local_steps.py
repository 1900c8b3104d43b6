"""local_sgd_steps: ranks step alone, and average weights and the optimizer's state every few steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from many import Jobs

pytestmark = pytest.mark.reliability

_PLAIN: dict[str, Any] = {"optim": "sgd", "max_grad_norm": 0.0, "learning_rate": 0.1}
_SAME = 1e-5
"""Relative: float32 sums in another order, over six steps."""
_CASES: dict[str, dict[str, Any]] = {
    "sgd": {}, "accumulated": {"gradient_accumulation_steps": 2}, "checkpointing": {"gradient_checkpointing": True},
}  # fmt: skip
_EVERY = 4
_OWN_LOSSES = ("whet", "compute_loss", "plain_backward")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    jobs = Jobs(tmp_path_factory.mktemp("local"))
    for name, more in _CASES.items():
        for every in (0, 1):
            jobs.add(f"{name} {every}", "questions", 2, args=_PLAIN | more | {"local_sgd_steps": every})
    for name in _OWN_LOSSES:
        for every in (0, 1):
            jobs.add(f"{name} {every}", "toy", 2, trainer=name, args=_PLAIN | {"local_sgd_steps": every})
    jobs.add("alone", "questions", 1, args={"local_sgd_steps": 3})
    jobs.add("alone without", "questions", 1)
    jobs.add("adamw 0", "questions", 2)
    jobs.add("adamw 4", "questions", 2, args={"local_sgd_steps": _EVERY})
    for name in ("killed", "unbroken"):
        jobs.add(name, "questions", 2, args=_saving(tmp_path_factory, name), all_die_at=7 if name == "killed" else None)
    jobs.add("resumed", "questions", 2, args=_saving(tmp_path_factory, "killed"), resume="auto")
    jobs.add("other ranks", "questions", 3, args=_saving(tmp_path_factory, "killed"), resume="auto")
    for name, more in {"signal": {"signal_at": 2}, "no signal": {}}.items():
        jobs.add(name, "toy", 2, args=_stopping(tmp_path_factory, name), **more)
    jobs.add("after the signal", "toy", 2, args=_stopping(tmp_path_factory, "signal"), resume="auto")
    jobs.add("refused", "local_refusals", 2)
    return jobs.run()


def _saving(factory: pytest.TempPathFactory, name: str) -> dict[str, Any]:
    return _output(factory, name) | {"save_strategy": "steps", "save_steps": 3, "max_steps": 9, "local_sgd_steps": 2}


def _stopping(factory: pytest.TempPathFactory, name: str) -> dict[str, Any]:
    args = {"save_strategy": "steps", "save_steps": 100, "enable_jit_checkpoint": True, "local_sgd_steps": _EVERY}
    return _output(factory, name) | args | {"max_steps": 8}


def _output(factory: pytest.TempPathFactory, name: str) -> dict[str, Any]:
    return {"output_dir": str(Path(factory.getbasetemp()) / f"{name.replace(' ', '-')}-output")}


@pytest.mark.parametrize("name", [*_CASES, *_OWN_LOSSES])
def test_an_average_after_each_step_of_sgd_is_data_parallel_training(found: Jobs, name: str) -> None:
    summed, averaged = found[f"{name} 0", 2], found[f"{name} 1", 2]
    assert len(averaged) == 2
    for rank in averaged:
        assert rank["losses"] == pytest.approx(summed[0]["losses"], rel=_SAME)
    assert averaged[0]["digest"] == averaged[1]["digest"]
    first, last = summed[0]["losses"][0], summed[0]["losses"][-1]
    assert abs(first - last) > 100 * _SAME * first  # a run that does not learn would be equal too


def test_ranks_that_step_alone_end_with_one_model_and_learn(found: Jobs) -> None:
    summed, local = found["adamw 0", 2][0], found["adamw 4", 2]
    assert local[0]["digest"] == local[1]["digest"] != summed["digest"]
    assert local[0]["losses"] == local[1]["losses"]
    assert local[0]["losses"][0] == pytest.approx(summed["losses"][0], rel=_SAME)  # before any step
    assert local[0]["losses"][2] != pytest.approx(summed["losses"][2], rel=_SAME)  # after two that differ
    assert local[0]["losses"][-1] < 0.9 * local[0]["losses"][0]
    assert local[0]["evaluated"] == local[1]["evaluated"]


def test_one_rank_has_nobody_to_average_with(found: Jobs) -> None:
    assert found["alone", 1][0]["digest"] == found["alone without", 1][0]["digest"]


def test_a_killed_run_resumes_to_the_same_weights(found: Jobs) -> None:
    assert found["killed", 2] == []
    for rank in found["resumed", 2]:
        assert rank["digest"] == found["unbroken", 2][0]["digest"]
    assert len(found["resumed", 2]) == 2


def test_another_number_of_ranks_is_refused_as_it_changes_the_curve(found: Jobs) -> None:
    assert [rank["error"] for rank in found["other ranks", 3]] == ["ConfigError"] * 3
    assert "local_sgd_steps" in found["other ranks", 3][0]["text"]


def test_a_signal_waits_for_the_average(found: Jobs) -> None:
    for rank in found["signal", 2]:
        assert f"stopped by SIGTERM after step {_EVERY}" in rank["stopped"]
    for rank in found["after the signal", 2]:
        assert rank["digest"] == found["no signal", 2][0]["digest"]


def test_ranks_that_step_alone_refuse_what_has_no_average(found: Jobs) -> None:
    for rank in found["refused", 2]:
        assert "local_sgd_steps does not go with this optimizer" in rank["optimizer"]
        assert "an outer step does not go with weights that share memory" in rank["shared memory"]
        assert "weights of this rank alone" in rank["save"]
        assert "this rank's share" in rank["after an error"]
