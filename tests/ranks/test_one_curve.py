"""1, 2 and 4 ranks train one curve, with dropout on: same rows, same masks, exact sums."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from many import Jobs

pytestmark = pytest.mark.slow

_CURVE = 1e-6
"""Sums over the ranks are added in another order than within one process: some units in the last place a step."""
_COMPRESSED = {"bf16": 1e-2, "fp16": 1e-3, "powersgd": 0.3}
"""Gradients of 8 and 11 bits, which AdamW with a learning rate of 1e-2 multiplies in 14 steps; matrices of rank 4 only
look like the gradients."""

RUNS: Mapping[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"args": {"gradient_accumulation_steps": 2}},
    "token budget": {"args": {"max_tokens_per_batch": 60}},
    "checkpointing": {"args": {"gradient_checkpointing": True}},
    "rows of other lengths, last batch short": {"n_rows": 19, "args": {"train_sampling_strategy": "group_by_length"}},
    "fewer rows than ranks": {"n_rows": 9, "args": {"rows_per_step": 8}},
    "another optimizer": {"args": {"optim": "adamw_torch"}},
    "layers of one block": {"family": "albert"},
    "small buckets": {"args": {"ddp_bucket_cap_mb": 1, "ddp_find_unused_parameters": False, "ddp_backend": "gloo"}},
    "experts": {"experts": {"experts": 4, "top_k": 2, "capacity_factor": 1.0}},
    "a frozen table": {"args": {"methods": ("freeze_tables",)}},
}


_BY_NIGHT = ("token budget", "checkpointing", "another optimizer", "layers of one block", "a frozen table", "fp16")


def _cases(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.night if name in _BY_NIGHT else ()) for name in names]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """The runs of this file that the chosen tests need, as 1, 2 and 4 ranks."""
    of_file = [item for item in request.session.items if item.path == request.path]
    chosen = {value for item in of_file for value in getattr(getattr(item, "callspec", None), "_idlist", ())}
    jobs = Jobs(tmp_path_factory.mktemp("ranks"))
    for name, job in RUNS.items():
        if name in _BY_NIGHT and name not in chosen:
            continue
        for n_ranks in (1, 2) if name not in ("plain", "fewer rows than ranks") else (1, 2, 4):
            jobs.add(name, "questions", n_ranks, **job)
    for hook in [hook for hook in _COMPRESSED if hook not in _BY_NIGHT or hook in chosen]:
        jobs.add(hook, "questions", 2, args={"ddp_comm_hook": hook, "max_steps": 14})
    jobs.add("long", "questions", 1, args={"max_steps": 14})
    for name, more in _TOYS.items():
        for n_ranks in (1, 2):
            jobs.add(f"toy {name}", "toy", n_ranks, **more)
    return jobs.run()


_TOYS: Mapping[str, dict[str, Any]] = {
    "own loss of the model": {},
    "last batch short": {"n_rows": 27},
}


@pytest.mark.parametrize("name", _cases(RUNS))
def test_curve_does_not_depend_on_the_number_of_ranks(found: Jobs, name: str) -> None:
    (alone,) = found[name, 1]
    for n_ranks in found.sizes(name):
        for rank in found[name, n_ranks]:
            assert rank["losses"] == pytest.approx(alone["losses"], rel=_CURVE), n_ranks
            assert rank["norms"] == pytest.approx(alone["norms"], rel=1e-4)


def test_parts_of_the_loss_of_experts_do_not_depend_on_the_number_of_ranks(found: Jobs) -> None:
    """Nor how many tokens are dropped: balance and capacity count each sequence for itself."""
    (alone,) = found["experts", 1]
    assert sum(alone["parts"]["moe_dropped"]) > 0
    for rank in found["experts", 2]:
        for name, values in alone["parts"].items():
            assert rank["parts"][name] == pytest.approx(values, rel=_CURVE), name


@pytest.mark.parametrize("name", _cases([*RUNS, *_COMPRESSED]))
def test_ranks_end_with_the_same_bits(found: Jobs, name: str) -> None:
    for n_ranks in found.sizes(name):
        assert len({rank["digest"] for rank in found[name, n_ranks]}) == 1


@pytest.mark.parametrize("name", _cases(RUNS))
def test_evaluation_is_that_of_one_rank(found: Jobs, name: str) -> None:
    """Every rank returns the loss and the predictions of all rows, each computed once."""
    (alone,) = found[name, 1]
    for n_ranks in found.sizes(name):
        for rank in found[name, n_ranks]:
            assert rank["evaluated"] == pytest.approx(alone["evaluated"], rel=1e-4)
            assert rank["predicted"] == alone["predicted"]


@pytest.mark.parametrize("hook", _cases(_COMPRESSED))
def test_compressed_gradients_train_nearly_the_same(found: Jobs, hook: str) -> None:
    alone, ranks = found["long", 1][0]["losses"], found[hook, 2]
    assert ranks[0]["losses"] == pytest.approx(alone, rel=_COMPRESSED[hook])
    assert ranks[0]["losses"] != alone


@pytest.mark.parametrize("name", _TOYS)
def test_loss_of_a_module_is_that_of_one_rank(found: Jobs, name: str) -> None:
    if name == "last batch short":
        pytest.skip("a mean over unequal shares is not the mean over all rows, as in transformers' Trainer")
    (alone,) = found[f"toy {name}", 1]
    for rank in found[f"toy {name}", 2]:
        assert rank["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert rank["evaluated"]["eval_sum"] == pytest.approx(alone["evaluated"]["eval_sum"], rel=1e-5)
