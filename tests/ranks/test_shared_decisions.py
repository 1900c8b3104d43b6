"""What one rank wants, all ranks do: nothing is decided by some of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from many import Jobs

pytestmark = [pytest.mark.slow, pytest.mark.reliability]

_SAVING: dict[str, Any] = {"args": {"save_strategy": "steps", "save_steps": 100, "enable_jit_checkpoint": True}}
_JOBS: dict[str, dict[str, Any]] = {
    "signal": _SAVING | {"signal_at": 3},
    "shortage": _SAVING | {"shortage_at": 4},
    "stops": {"callbacks": ["stops"]},
    "evaluates": {"callbacks": ["evaluates"]},
    "saves": {"callbacks": ["saves"], "args": {"save_strategy": "steps", "save_steps": 100}},
    "nan": {"nan_at": 2},
    "fails": {"callbacks": ["fails"]},
    "dies": {"dies_at": 3},
    "dies and rank 0 saves": _SAVING | {"dies_at": 3},
    "hangs": {"hangs_at": 3, "args": {"ddp_timeout": 3}, "within_s": 20},
    "dies in forward": _SAVING | {"dies_in_forward": 3},
    "changes weight": {"callbacks": ["changes_weight"], "args": {"max_steps": 12}},
    "ends epoch": {"callbacks": ["ends_epoch"], "args": {"max_steps": 9}},
    "plain": {},
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    jobs = Jobs(tmp_path_factory.mktemp("ranks"))
    for name, job in _JOBS.items():
        jobs.add(name, "toy", 2, **job)
    saves = {"save_strategy": "steps", "save_steps": 2}
    jobs.add("dies in save", "toy", 2, args=saves, dies_in_save=2)
    jobs.add(
        "dies in save, resumed",
        "toy",
        2,
        args=saves | {"output_dir": str(jobs.folder("dies in save", 2).parent / "out")},
        resume="auto",
    )
    jobs.add("saves alone", "toy", 2, args=saves)
    jobs.add("writes", "writes", 2, args={"save_strategy": "steps", "save_steps": 2, "save_async": True})
    return jobs.run()


def _folder(found: Jobs, name: str) -> list[str]:
    return sorted(path.name for path in found.folder(name, 2).parent.glob("out/*"))


def test_signal_to_one_rank_saves_and_stops_all_at_the_same_step(found: Jobs) -> None:
    for rank in found["signal", 2]:
        assert rank["steps"] == 3
        assert "stopped by SIGTERM after step 3" in rank["stopped"]
    assert "checkpoint-3" in _folder(found, "signal")


def test_memory_of_one_rank_stops_all(found: Jobs) -> None:
    for rank in found["shortage", 2]:
        assert rank["steps"] == 4
        assert "rank 1: too little left" in rank["stopped"]


def test_callback_of_one_rank_stops_all(found: Jobs) -> None:
    assert [rank["steps"] for rank in found["stops", 2]] == [3, 3]


def test_callback_of_one_rank_makes_all_evaluate(found: Jobs) -> None:
    for rank in found["evaluates", 2]:
        assert ["evaluate", 3] in rank["events"][0]


def test_callback_of_one_rank_makes_all_save_once(found: Jobs) -> None:
    for rank in found["saves", 2]:
        assert rank["events"][0] == [["save", 3], ["save", 6], ["evaluate", 6]]
    assert "checkpoint-3" in _folder(found, "saves")


def test_step_that_is_not_finite_on_one_rank_is_applied_by_none(found: Jobs) -> None:
    ranks, plain = found["nan", 2], found["plain", 2]
    assert ranks[0]["digest"] == ranks[1]["digest"] != plain[0]["digest"]
    assert all(str(rank["norms"][2]) in ("inf", "nan") for rank in ranks)
    assert all(rank["losses"][:3] == plain[0]["losses"][:3] for rank in ranks)


def test_error_of_one_rank_ends_the_others_with_the_reason(found: Jobs) -> None:
    first, second = found["fails", 2]
    assert (second["error"], second["text"]) == ("ValueError", "the callback of rank 1 fails")
    assert first["error"] == "LostRankError"
    assert "rank 0 of 2 lost another rank" in first["text"]
    assert abs(first["ended_s"] - second["ended_s"]) < 5


def test_rank_that_dies_ends_the_others(found: Jobs) -> None:
    (first,) = found["dies", 2]
    assert first["error"] == "LostRankError"
    assert "--resume_from_checkpoint auto" in first["text"]


def test_rank_0_saves_the_finished_steps_when_another_is_lost(found: Jobs) -> None:
    (first,) = found["dies and rank 0 saves", 2]
    assert "step 3 is saved in" in first["text"]
    assert "checkpoint-3" in _folder(found, "dies and rank 0 saves")


def test_rank_that_dies_during_a_save_costs_no_step(found: Jobs) -> None:
    """Rank 0 finishes the checkpoint that it writes, says that a rank is lost, and the ranks continue from there."""
    (first,) = found["dies in save", 2]
    assert first["error"] == "LostRankError", first
    assert "checkpoint-4" in _folder(found, "dies in save")
    again, alone = found["dies in save, resumed", 2], found["saves alone", 2]
    assert [rank["digest"] for rank in again] == [rank["digest"] for rank in alone]
    assert not [
        name
        for name in _folder(found, "dies in save")
        if not name.startswith("checkpoint-") and name not in ("run.log", "trainer_state.json")
    ]


def test_rank_that_hangs_ends_the_others_after_the_timeout(found: Jobs) -> None:
    (first,) = found["hangs", 2]
    hung_s = float((found.folder("hangs", 2).parent / "hung").read_text("utf-8"))
    assert first["error"] == "LostRankError"
    assert first["ended_s"] - hung_s < 3 + 5


def test_rank_lost_inside_a_backward_pass_is_named_and_the_steps_are_saved(found: Jobs) -> None:
    (first,) = found["dies in forward", 2]
    assert (first["error"], "step 3 is saved in" in first["text"]) == ("LostRankError", True), first


def test_weights_that_drift_apart_end_the_run(found: Jobs) -> None:
    for rank in found["changes weight", 2]:
        assert "the ranks have different weights" in rank["text"]


def test_epoch_that_one_rank_ends_is_ended_by_all(found: Jobs) -> None:
    first, second = found["ends epoch", 2]
    assert (first["losses"], first["digest"]) == (second["losses"], second["digest"])


def test_rank_0_alone_writes_and_prints(found: Jobs) -> None:
    first, second = found["writes", 2]
    assert (first["saves"], second["saves"]) == (True, False)
    folder = found.folder("writes", 2)
    assert (folder / "output-1.txt").read_text("utf-8") == ""
    assert "step 6/6" in (folder / "output-0.txt").read_text("utf-8")
    assert {"checkpoint-6", "model.safetensors"} <= {*_folder(found, "writes")}
    assert not list(Path(folder.parent / "out").glob("*.partial"))
