"""Ranks that find different things decide as one, and share their work as they should: counted in each rank."""

from __future__ import annotations

from typing import Any

import pytest
from many import Jobs

pytestmark = pytest.mark.slow

_BY_STEP = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "best"}
_BEST = _BY_STEP | {"load_best_model_at_end": True, "metric_for_best_model": "loss"}
_CONSTANT = {"lr_scheduler_type": "constant"}
"""So that a run that ends after 2 steps has the weights of a longer one after 2."""
_JOBS: dict[str, dict[str, Any]] = {
    "plain": {"kind": "planted", "plant": "nothing"},
    "precision": {"kind": "planted", "plant": "precision", "args": {"precision": "auto"}},
    "batch size": {"kind": "planted", "plant": "batch size", "args": {"auto_find_batch_size": True}},
    "best": {"kind": "planted", "plant": "best", "args": _BEST | _CONSTANT},
    "stops": {"kind": "planted", "plant": "nothing", "args": {"max_steps": 2} | _CONSTANT},
    "dealt": {"kind": "dealt", "args": {"max_steps": 4}},
    "evaluated": {"kind": "evaluated", "n_rows": 11},
    "tables": {
        "kind": "tables",
        "rows": [
            [[3, 7, 7, 9], [1, 2], None, [], list(range(30)), [5]],
            [[7, 11], [20, 21, 22], [4, 4], [], list(range(10, 40)), None],
        ],
    },
    "no such backend": {"kind": "joins", "backend": "ucc"},
    "the backend of older guides": {"kind": "joins", "backend": "ccl"},
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    jobs = Jobs(tmp_path_factory.mktemp("planted"))
    for name, job in _JOBS.items():
        jobs.add(name, n_ranks=2, **job)
    return jobs.run()


def test_precision_that_ranks_measure_differently_is_that_of_rank_0(found: Jobs) -> None:
    """With bf16 on rank 1 the sums of gradients, and so the weights, would be others than in fp32."""
    digests = {rank["digest"] for name in ("plain", "precision") for rank in found[name, 2]}
    assert len(digests) == 1


def test_batch_size_that_ranks_find_differently_is_the_smallest(found: Jobs) -> None:
    """4 rows of each step in micro-batches of one row: 4 passes a step, on both ranks; without the plant it is one."""
    assert [rank["passes"] for rank in found["plain", 2]] == [6, 6]
    assert [rank["passes"] for rank in found["batch size", 2]] == [24, 24]
    curves = [rank["losses"] for name in ("plain", "batch size") for rank in found[name, 2]]
    assert all(one == pytest.approx(curves[0], rel=1e-5) for one in curves)  # sums in another order


def test_best_model_that_ranks_judge_differently_is_that_of_rank_0(found: Jobs) -> None:
    """Rank 0 finds the first evaluation best, rank 1 each; the first alone is saved, and both end with it."""
    ranks, stopped = found["best", 2], found["stops", 2]
    assert [rank["best"] for rank in ranks] == [[2, "checkpoint-2"]] * 2
    saved = found.folder("best", 2).parent.glob("out/checkpoint-*")
    assert sorted(path.name for path in saved) == ["checkpoint-2"]
    assert {rank["digest"] for rank in ranks} == {rank["digest"] for rank in stopped}


def test_ranks_get_about_as_many_tokens(found: Jobs) -> None:
    """Shares follow each other in a step, so they differ by a row at most; as many rows each would differ by more."""
    first, second = found["dealt", 2]
    assert len(first["tokens"]) == len(second["tokens"]) == 4
    for one, other in zip(first["tokens"], second["tokens"], strict=True):
        assert abs(one - other) <= first["longest"]
    assert sum(abs(a - b) for a, b in zip(first["tokens"], second["tokens"], strict=True)) < 60


def test_evaluation_computes_each_row_on_one_rank(found: Jobs) -> None:
    first, second = found["evaluated", 2]
    assert sorted(first["seen"] + second["seen"]) == list(range(11))
    assert first["seen"]
    assert second["seen"]
    assert first["predictions"] == second["predictions"] == list(range(11))


def test_rows_of_a_table_have_the_sums_of_the_complete_table(found: Jobs) -> None:
    """Also with rows that both have, a rank without a gradient, one without rows, and more rows than the table."""
    for rank in found["tables", 2]:
        sums = rank["sums"]
        assert all(one["far"] == 0 for one in sums)  # two numbers have one sum, whatever their order
        assert [one["large"] > 0 for one in sums] == [True, True, True, False, True, True]
        assert [one["rows"] for one in sums[:3]] == [[3, 7, 9, 11], [1, 2, 20, 21, 22], [4]]
        assert sums[4]["rows"] is None  # 60 rows of 40 entries: the table travelled
        assert sums[5]["rows"] == [5]


def test_backend_that_torch_lacks_is_refused_on_every_rank(found: Jobs) -> None:
    for rank in found["no such backend", 2]:
        assert "ddp_backend names a backend that this build of torch does not have" in rank["text"]
        assert "use --ddp_backend gloo" in rank["text"]


def test_ccl_runs_over_gloo(found: Jobs) -> None:
    assert [rank["agreed"] for rank in found["the backend of older guides", 2]] == [True, True]
