"""Ranks that share state, gradients or weights train the curve of ranks that each have all, and save the same files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from many import Jobs
from safetensors.torch import load_file

from whet.kernels.matrix import is_widened

pytestmark = pytest.mark.reliability

_CURVE = 1e-6
"""Of the issue. An optimizer that works on single elements gives the same bits; the others too, as they get tensors."""
_CURVE_BF16 = 5e-3 if is_widened() else 1e-4
"""A last bit of an fp32 weight can round to another bf16 number, 2^-9 away: a few in a mean of hundreds.

Where products are widened to fp32, weights are not rounded, and so each result can round to its neighbour instead.
"""
_STEPS, _EVERY = 12, 3
_ALL, _FIRST = (1, 2, 3), (1,)
RUNS: Mapping[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "whet's own": (
        _ALL,
        {"args": {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 3, "save_steps": 3}},
    ),
    "torch's fused, a frozen table, a short last batch": (
        (3,),
        {"n_rows": 19, "args": {"optim": "adamw_torch_fused", "weight_decay": 0.1, "methods": ("freeze_tables",)}},
    ),
    "8 bit": (_FIRST, {"args": {"optim": "adamw_whet_8bit"}}),
    "complete tensors": (_FIRST, {"args": {"optim": "muon"}}),
    "numbers next to the moments": (_ALL, {"args": {"optim": "nadam"}}),
    "clipped, accumulated, checkpointing, bf16": (
        (2, 3),
        {"args": {"max_grad_norm": 0.1, "gradient_accumulation_steps": 2, "gradient_checkpointing": True,
                  "precision": "bf16"}},
    ),
    "one block, used many times": ((3,), {"family": "albert"}),
    "distances": ((3,), {"family": "deberta-v2"}),
}  # fmt: skip
"""Name -> the stages that it is trained with, next to 0, and the job."""
_OTHERS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "decoder": ("words", {}),
    "experts": ("questions", {"experts": {"experts": 4, "top_k": 2, "capacity_factor": 1.0}}),
    "infinite loss on one rank": ("toy", {"infinite_at": 2}),
    "signal to one rank": ("toy", {"signal_at": 3}),
}
"""Name -> kind and job: what else calls a model, and decisions that all ranks take."""
_LOST: Mapping[str, tuple[str, dict[str, Any], int, str]] = {
    "lost while it gives its rows": ("dies_in_collect", {}, 2, "the steps after CHECKPOINT are not saved"),
    "lost while rank 0 writes": ("toy", {"dies_in_save": 2}, 4, "step 4 is saved in CHECKPOINT"),
    "lost while rank 0 writes in the background": ("toy", {"dies_in_save": 2, "save_async": True}, 4, "CHECKPOINT"),
    "lost in the first save": ("toy", {"dies_in_save": 1}, 2, "step 2 is saved in CHECKPOINT"),
    "lost once its state is sent": ("dies_once_sent", {}, 4, "step 4 is saved in CHECKPOINT"),
}
"""When rank 1 ends in a save of stage 3 -> kind, job, the step that the run resumes after, and what is said of it.

In the background the first steps after the save may be done or not when rank 0 misses the other.
"""
_FULL_DISKS: Mapping[str, tuple[int, str]] = {
    "full disk, continues": (1, "continue"), "full disk, continues 3": (3, "continue"), "full disk, stops": (1, "stop")
}  # fmt: skip
"""Name -> stage and save_error_policy of a run whose rank 0 has no room for the state that the other rank sends."""
_CASES = [(name, stage) for name, (stages, _) in RUNS.items() for stage in stages]
_CHAIN = ((2, 1), (1, 0), (2, 3), (3, 2))
"""(ranks, stage) of runs that follow each other; each but the last is killed one step behind its save."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    jobs = Jobs(tmp_path_factory.mktemp("zero"))
    for name, (stages, job) in RUNS.items():
        for stage in (0, *stages):
            _add(jobs, f"{name} {stage}", 2, stage, job)
    for stage in (0, 3):
        _add(jobs, f"uneven {stage}", 3, stage, {"args": {"rows_per_step": 9}})
    output = str(tmp_path_factory.mktemp("out") / "run")
    for n, (n_ranks, stage) in enumerate(_CHAIN):
        more: dict[str, Any] = {"resume": "auto" if n else None}
        if n + 1 < len(_CHAIN):
            more["all_die_at"] = (n + 1) * _EVERY + 1
        jobs.add(f"chain {n}", "shared", n_ranks, args=_saving(output) | {"zero_stage": stage}, **more)
    for name, (kind, job) in _OTHERS.items():
        for stage in (0, 3):
            saves = {"save_strategy": "steps", "enable_jit_checkpoint": True} if "signal_at" in job else {}
            jobs.add(f"{name} {stage}", kind, 2, **job, args={"zero_stage": stage, **saves})
    jobs.add("refused", "refusals", 2)
    saves = {"save_strategy": "steps", "save_steps": 2, "zero_stage": 3}
    jobs.add("saves", "toy", 2, args=saves)
    for name, (kind, job, *_) in _LOST.items():
        more = {"save_async": True} if job.get("save_async") else {}
        jobs.add(name, kind, 2, args=saves | more, **job)
        output = str(jobs.folder(name, 2).parent / "out")
        jobs.add(f"{name}, resumed", "toy", 2, args=saves | {"output_dir": output}, resume="auto")
    slow = {"ddp_timeout": 2, "save_strategy": "steps", "save_steps": 6, "zero_stage": 1}
    slow |= {"eval_strategy": "steps", "eval_steps": 6, "load_best_model_at_end": True}
    jobs.add("slow disk", "slow_disk", 2, args=slow, slow_s=3)
    jobs.add("interrupted", "interrupted_in_save", 2, args=saves)
    for name, (stage, policy) in _FULL_DISKS.items():
        jobs.add(name, "full_disk", 2, args=saves | {"zero_stage": stage, "save_error_policy": policy})
    for stage in (0, 1):
        args = {"max_steps": 2, "rows_per_step": 2, "save_strategy": "steps", "zero_stage": stage}
        jobs.add(f"weighed {stage}", "weighed", 2, args=args)
    for kind in ("questions", "offloaded"):
        jobs.add(f"{kind} 3", kind, 2, args={"zero_stage": 3})
    jobs.add("unbroken", "shared", 1, args=_saving(str(tmp_path_factory.mktemp("out") / "run")))
    return jobs.run()


def _add(jobs: Jobs, name: str, n_ranks: int, stage: int, job: Mapping[str, Any]) -> None:
    saves = {"output_dir": str(jobs.folder(name, n_ranks).parent / "out"), "save_strategy": "steps", "save_steps": 6}
    args = {**saves, **job.get("args", {}), "zero_stage": stage}
    jobs.add(name, "shared", n_ranks, **{**job, "args": args})


def _saving(output: str) -> dict[str, Any]:
    return {"output_dir": output, "max_steps": _STEPS, "save_strategy": "steps", "save_steps": _EVERY,
            "rows_per_step": 6}  # fmt: skip


@pytest.mark.parametrize(("name", "stage"), _CASES)
def test_zero_trains_the_curve_of_ranks_that_share_nothing(found: Jobs, name: str, stage: int) -> None:
    plain, shared = found[f"{name} 0", 2], found[f"{name} {stage}", 2]
    assert len(shared) == 2
    within = _CURVE_BF16 if "bf16" in name else _CURVE
    for rank in shared:
        assert rank["losses"] == pytest.approx(plain[0]["losses"], rel=within)
        assert rank["norms"] == pytest.approx(plain[0]["norms"], rel=within)
        assert rank["evaluated"] == pytest.approx(plain[0]["evaluated"], rel=within)
    assert len({rank["digest"] for rank in shared}) == 1


def test_zero_trains_the_same_where_rows_are_not_dealt_evenly(found: Jobs) -> None:
    plain, shared = found["uneven 0", 3], found["uneven 3", 3]
    assert [one["losses"] for one in shared] == [pytest.approx(plain[0]["losses"], rel=_CURVE)] * 3


@pytest.mark.parametrize(("name", "stage"), _CASES)
def test_zero_splits_the_state_as_planned(found: Jobs, name: str, stage: int) -> None:
    alone = found[f"{name} 0", 2][0]["state"]
    for rank in found[f"{name} {stage}", 2]:
        held, planned = rank["state"]
        assert held == pytest.approx(planned, rel=0.05)
        assert held < 0.62 * alone[0]  # half, and up to a block of 256 elements of each of the small tensors
    assert alone[0] == pytest.approx(alone[1], rel=0.05)


def test_offload_to_where_everything_is_changes_nothing(found: Jobs) -> None:
    """The calls of an offload from a GPU; that it moves anything there, no test shows."""
    plain, offloaded = found["questions 3", 2], found["offloaded 3", 2]
    assert len(offloaded) == 2
    assert [one["digest"] for one in offloaded] == [one["digest"] for one in plain]


@pytest.mark.parametrize("stage", [0, *_ALL])
def test_zero_holds_the_bytes_that_were_planned(found: Jobs, stage: int) -> None:
    """All tensors of the process count, just before an update."""
    for rank in found[f"whet's own {stage}", 2]:
        held, planned = rank["total"]
        assert held == pytest.approx(planned, rel=0.05)


@pytest.mark.parametrize(("name", "stage"), _CASES)
def test_zero_saves_the_files_of_ranks_that_share_nothing(found: Jobs, name: str, stage: int) -> None:
    plain, shared = (_checkpoint(found, f"{name} {one}") for one in (0, stage))
    for file in ("model.safetensors", "optimizer.safetensors"):
        left, right = load_file(plain / file), load_file(shared / file)
        assert left.keys() == right.keys()
        assert all(left[key].shape == right[key].shape for key in left)
        if stage == 1:
            assert (plain / file).read_bytes() == (shared / file).read_bytes()


@pytest.mark.parametrize("name", _OTHERS)
def test_shared_weights_are_found_by_whoever_calls_the_model(found: Jobs, name: str) -> None:
    plain, shared = found[f"{name} 0", 2], found[f"{name} 3", 2]
    assert len(shared) == 2
    for rank in shared:
        assert rank["losses"] == pytest.approx(plain[0]["losses"], rel=_CURVE)
        assert rank["digest"] == shared[0]["digest"]
        assert rank.get("stopped") == shared[0].get("stopped")
    assert ("stopped" in shared[0]) is (name == "signal to one rank")


@pytest.mark.parametrize(
    ("what", "refusal"),
    [
        ("hook", "a weight has hooks on its gradient"),
        ("appended", "the parameters of the optimizer's groups changed"),
        ("optimizer", "_CommonStep"),
        ("shared memory 1", "zero_stage 1 does not go with weights that share memory"),
        ("shared memory 3", "zero_stage 3 does not go with weights that share memory"),
        ("big-endian", "zero_stage 1 needs a little-endian processor"),
        ("evaluate", "the model has only this rank's share"),
        ("save", "the model has only this rank's share"),
        ("train again", "the model has only this rank's share"),
    ],
)
def test_what_ranks_cannot_share_is_refused_on_each(found: Jobs, what: str, refusal: str) -> None:
    """The hook is of weights with one row, of which rank 1 has nothing; the last three come after its refusal."""
    texts = [rank[what] for rank in found["refused", 2]]
    assert len(texts) == 2
    if what == "save":  # rank 0 alone does
        assert texts.pop() == "nothing was refused"
    assert all(text.startswith("ConfigError") and refusal in text for text in texts), texts


def _checkpoint(found: Jobs, name: str) -> Path:
    return found.folder(name, 2).parent / "out" / "checkpoint-6"


def test_zero_resumes_at_other_numbers_of_ranks_and_stages(found: Jobs) -> None:
    (alone,) = found["unbroken", 1]
    last = len(_CHAIN) - 1
    ranks = found[f"chain {last}", _CHAIN[last][0]]
    assert len(ranks) == _CHAIN[last][0]
    for rank in ranks:
        assert rank["steps"] == _STEPS
        assert rank["losses"] == pytest.approx(alone["losses"], rel=1e-5)  # sums in another order, for 12 steps


@pytest.mark.parametrize("name", _LOST)
def test_rank_lost_in_a_save_of_stage_3_leaves_complete_checkpoints(found: Jobs, name: str) -> None:
    """A run that resumes from them ends with the weights of one that lost no rank."""
    (first,) = found[name, 2]
    assert first["error"] == "LostRankError", first
    _, _, step, said = _LOST[name]
    output = found.folder(name, 2).parent / "out"
    assert said.replace("CHECKPOINT", str(output / f"checkpoint-{step}")) in first["text"]
    assert f"resuming after step {step}" in (output / "run.log").read_text("utf-8")
    resumed, unbroken = found[f"{name}, resumed", 2], found["saves", 2]
    assert [one.get("digest") for one in resumed] == [one["digest"] for one in unbroken], resumed
    assert not [path.name for path in output.iterdir() if path.name.startswith(".") or "partial" in path.name]


@pytest.mark.parametrize("name", _FULL_DISKS)
def test_full_disk_of_rank_0_leaves_no_rank_waiting(found: Jobs, name: str) -> None:
    """The others send what they hold whether it is written or not; then all continue, or all stop."""
    ranks, output = found[name, 2], found.folder(name, 2).parent / "out"
    assert len(ranks) == 2
    saved = sorted(path.name for path in output.iterdir() if "checkpoint" in path.name)
    if _FULL_DISKS[name][1] == "stop":
        assert [rank["error"] for rank in ranks] == ["StorageError"] * 2
        assert all("the checkpoint of step 2 cannot be written" in rank["text"] for rank in ranks)
        assert saved == []
    else:
        assert [rank["steps"] for rank in ranks] == [6, 6]
        assert ranks[0]["digest"] == ranks[1]["digest"]
        assert saved == ["checkpoint-4", "checkpoint-6"]


def test_ranks_wait_for_a_disk_longer_than_for_each_other(found: Jobs) -> None:
    ranks = found["slow disk", 2]
    assert [rank.get("steps") for rank in ranks] == [6, 6], ranks


def test_ctrl_c_in_a_save_waits_for_no_other_rank(found: Jobs) -> None:
    assert [rank["error"] for rank in found["interrupted", 2]] == ["KeyboardInterrupt"]


def test_zero_takes_less_memory_than_ranks_that_share_nothing(found: Jobs) -> None:
    """Each of two ranks holds half of the state, which is large next to what travels at a time; no save collects it."""
    plain, shared = ([rank["peak_bytes"] for rank in found[f"weighed {stage}", 2]] for stage in (0, 1))
    assert max(shared) < max(plain)
