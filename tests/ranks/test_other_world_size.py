"""R7: a run resumes with another number of ranks, and ends as one that nothing interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from many import Jobs

pytestmark = pytest.mark.reliability

_STEPS, _EVERY = 12, 3
_PATHS = {"1 2 4 1": (1, 2, 4, 1), "2 1 2 4": (2, 1, 2, 4), "2 2 2 2": (2, 2, 2, 2), "same flags": (2, 4, 1, 2)}
"""The numbers of ranks, one after the other; each but the last is killed one step after its save."""
_NOT_KILLED = "1 2 4 1"
"""The path that runs once more, each part of it ending after its save."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    jobs = Jobs(tmp_path_factory.mktemp("ranks"))
    for name, path in _PATHS.items():
        output = str(tmp_path_factory.mktemp("out") / "run")
        for n, n_ranks in enumerate(path):
            more: dict[str, Any] = {"resume": "auto" if n else None}
            if name == "same flags":  # as torchrun restarts a command with the machines that are left
                more["rows"] = 4
            if n + 1 < len(path):
                more["all_die_at"] = (n + 1) * _EVERY + 1
            jobs.add(f"{name} part {n}", "questions", n_ranks, args=_arguments(output), **more)
    output = str(tmp_path_factory.mktemp("out") / "run")
    for n, n_ranks in enumerate(_PATHS[_NOT_KILLED]):
        part = {"resume": "auto" if n else None, "all_stop_at": (n + 1) * _EVERY}
        jobs.add(f"not killed part {n}", "questions", n_ranks, args=_arguments(output), **part)
    for n_ranks in (1, 2):
        jobs.add("whole", "questions", n_ranks, args=_arguments(str(tmp_path_factory.mktemp("out") / "run")))
    output = str(tmp_path_factory.mktemp("out") / "run")
    for n, (name, n_ranks) in enumerate(_CONFIGURED):
        part = {"resume": "auto" if n else None, "all_stop_at": 3 * (n + 1) if n < 3 else None}
        jobs.add(name, "questions", n_ranks, args=_arguments(output) | _CONFIGURED[name, n_ranks], rows=4, **part)
    for name, settings in _BATCHED.items():
        output, usual = str(tmp_path_factory.mktemp("out") / "run"), {"gradient_accumulation_steps": 2} | settings
        again = {"resume": "auto", "rows": 2, "n_rows": _N_ROWS}
        jobs.add(f"{name} part 0", "questions", 2, args=_arguments(output) | usual, n_rows=_N_ROWS, all_stop_at=3)
        other = usual | {"gradient_accumulation_steps": 4}
        jobs.add(f"{name} other batches", "questions", 1, args=_arguments(output) | other, **again)
        jobs.add(f"{name} part 1", "questions", 1, args=_arguments(output) | usual, **again)
        output = str(tmp_path_factory.mktemp("out") / "run")
        jobs.add(f"{name} whole", "questions", 2, args=_arguments(output) | usual, n_rows=_N_ROWS)
    return jobs.run()


_N_ROWS = 18
_BATCHED = {"dropped": {"dataloader_drop_last": True}, "dealt": {"train_sampling_strategy": "batch_rebalance"}}
"""Settings with which the batches of a step decide which rows it has: 4 rows each, and 2 are left at the end."""


@pytest.mark.parametrize("name", _BATCHED)
def test_batches_that_decide_on_the_rows_stay_with_fewer_ranks(found: Jobs, name: str) -> None:
    (resumed,), whole = found[f"{name} part 1", 1], found[f"{name} whole", 2]
    assert resumed.get("steps") == _STEPS, resumed
    assert resumed["losses"] == pytest.approx(whole[0]["losses"], rel=1e-5)
    (refused,) = found[f"{name} other batches", 1]
    assert refused["error"] == "ConfigError"
    assert "order: as in transformers" in refused["text"]


def _configured(rows: int | str, steps: int | str, **more: Any) -> dict[str, Any]:
    sizes = {"train_micro_batch_size_per_gpu": rows, "gradient_accumulation_steps": steps}
    return {"deepspeed": {"zero_optimization": {"stage": 1}} | sizes} | more


_CONFIGURED = {
    ("numbers", 2): _configured(4, 1), ("numbers resumed", 1): _configured(4, 1),
    ("auto resumed", 1): _configured("auto", "auto"),
    ("other numbers resumed", 1): _configured(4, 2, gradient_accumulation_steps=2),
}  # fmt: skip
"""(Name, ranks) -> the sizes of a batch in the configuration of DeepSpeed, one run after the other."""


def test_sizes_in_the_configuration_of_deepspeed_that_do_not_fit_other_ranks_are_named(found: Jobs) -> None:
    (refused,) = found["numbers resumed", 1]
    assert refused["error"] == "ConfigError"
    for words in (
        "the number of ranks changed", "2 ranks then, 1 now; gradient_accumulation_steps 1", '"auto"',
        "--per_device_train_batch_size 4 --gradient_accumulation_steps 2",
    ):  # fmt: skip
        assert words in refused["text"]
    assert "per_device_train_batch_size gives" not in refused["text"]


@pytest.mark.parametrize(("name", "steps"), [("auto resumed", 9), ("other numbers resumed", 12)])
def test_sizes_that_the_refusal_names_let_the_run_resume(found: Jobs, name: str, steps: int) -> None:
    (resumed,) = found[name, 1]
    assert resumed.get("steps") == steps, resumed


def _arguments(output: str) -> dict[str, Any]:
    return {"output_dir": output, "max_steps": _STEPS, "save_strategy": "steps", "save_steps": _EVERY}


@pytest.mark.parametrize("name", _PATHS)
def test_resumed_with_other_numbers_of_ranks_is_the_run_of_one(found: Jobs, name: str) -> None:
    (alone,) = found["whole", 1]
    for rank in found[f"{name} part 3", _PATHS[name][-1]]:
        assert rank["steps"] == _STEPS
        assert rank["losses"] == pytest.approx(alone["losses"], rel=1e-5)  # sums in another order, for 12 steps
        assert rank["evaluated"] == pytest.approx(alone["evaluated"], rel=1e-4)


def test_kills_change_no_weight_of_a_schedule_of_ranks(found: Jobs) -> None:
    killed, not_killed = found[f"{_NOT_KILLED} part 3", 1][0], found["not killed part 3", 1][0]
    assert (killed["steps"], not_killed["steps"]) == (_STEPS, _STEPS)
    assert killed["digest"] == not_killed["digest"]


def test_resumed_with_the_same_number_of_ranks_has_the_same_bits(found: Jobs) -> None:
    assert found["2 2 2 2 part 3", 2][0]["digest"] == found["whole", 2][0]["digest"]


def test_killed_parts_left_nothing_but_their_checkpoints(found: Jobs) -> None:
    for name, path in _PATHS.items():
        for n, n_ranks in enumerate(path[:-1]):
            assert found[f"{name} part {n}", n_ranks] == []


def test_checkpoints_name_the_number_of_their_ranks(found: Jobs, tmp_path: Path) -> None:
    import json

    listed = json.loads((found.folder("whole", 2).parents[1] / "jobs.json").read_text("utf-8"))
    folder = next(job["args"]["output_dir"] for job in listed if job["folder"] == str(found.folder("whole", 2)))
    manifest = json.loads((Path(folder) / "checkpoint-12" / "MANIFEST.json").read_text("utf-8"))
    assert manifest["facts"]["n_ranks"] == 2 if "facts" in manifest else manifest["n_ranks"] == 2
