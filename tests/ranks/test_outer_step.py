"""DiLoCo: ranks step alone, and their average is a step of an outer optimizer with Nesterov's momentum.

The reference is the algorithm in plain torch, over the rows that each rank had: Douillard et al. 2023,
arXiv:2311.08105, algorithm 1, with the mean of the inner optimizers' states.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from many import Jobs
from safetensors.torch import load_file
from tiny_runs import Toy
from torch import Tensor, nn

pytestmark = pytest.mark.reliability

_EVERY, _STEPS, _HALF = 2, 8, 4
_RATE = 3e-2
_OUTER: dict[str, Any] = {"outer_learning_rate": 0.7, "outer_momentum": 0.9}
_LOCAL: dict[str, Any] = {"local_sgd_steps": _EVERY}
_INNER: dict[str, dict[str, Any]] = {
    "adamw": {"optim": "adamw_torch"}, "whet's adamw": {"optim": "adamw_whet"}, "sgd": {"optim": "sgd"},
}  # fmt: skip
_SAME = 2e-5
"""Relative to the largest weight: float32 sums in another order, for eight steps of AdamW and four outer ones."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    pytest.importorskip("peft")
    jobs = Jobs(tmp_path_factory.mktemp("outer"))
    for name, inner in _INNER.items():
        for n_ranks in (2, 3):
            jobs.add(name, "outer", n_ranks, args=_LOCAL | _OUTER | inner)
    jobs.add("no momentum", "outer", 2, args=_LOCAL | {"optim": "sgd", "outer_learning_rate": 0.5})
    jobs.add("mean", "outer", 2, args=_LOCAL | _INNER["adamw"])
    for name in ("killed", "unbroken", "first half"):
        args = _saving(jobs, name) | ({"max_steps": _HALF} if name == "first half" else {})
        jobs.add(name, "outer", 2, args=args, all_die_at=5 if name == "killed" else None)
    jobs.add("resumed", "outer", 2, args=_saving(jobs, "killed"), resume="auto")
    allowed = {"resume_allow_changes": ("local_sgd_steps",)}
    for name, more in {"refused": {}, "other ranks": allowed}.items():
        jobs.add(name, "outer", 3, args=_saving(jobs, "first half") | more, resume="auto")
    for name, momentum in {"adapter": 0.9, "adapter without momentum": 0.0}.items():
        jobs.add(name, "outer_adapter", 2, args=_saving(jobs, name) | {"outer_momentum": momentum})
    return jobs.run()


def _saving(jobs: Jobs, name: str) -> dict[str, Any]:
    output = {"output_dir": str(jobs.folder(name, 2).parent / "out"), "save_strategy": "steps", "save_steps": _HALF}
    return _LOCAL | _OUTER | _INNER["adamw"] | output


class _Reference:
    """The algorithm in one process; each rank is a model and an optimizer of torch."""

    def __init__(self, inner: str, outer_rate: float, momentum: float) -> None:
        self.common = Toy()
        self._inner = inner
        self._outer = torch.optim.SGD(self.common.parameters(), lr=outer_rate, momentum=momentum, nesterov=momentum > 0)
        self._state: dict[str, Any] | None = None

    def rounds(self, rows: Sequence[Sequence[dict[str, Any]]]) -> None:
        """Take the steps of all ranks over their rows: rank -> step -> rows."""
        for first in range(0, len(rows[0]), _EVERY):
            ranks = [self._alone(of_rank[first : first + _EVERY]) for of_rank in rows]
            for number, common in enumerate(self.common.parameters()):
                ends = [[*model.parameters()][number].detach() for model, _ in ranks]
                common.grad = torch.stack([common.detach() - one for one in ends]).mean(0)
            self._outer.step()
            states = [optimizer.state_dict() for _, optimizer in ranks]
            self._state = _mean([one["state"] for one in states]), states[0]["param_groups"]  # pyright: ignore

    def _alone(self, steps: Sequence[dict[str, Any]]) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = copy.deepcopy(self.common)
        kind: Any = torch.optim.SGD if self._inner == "sgd" else torch.optim.AdamW
        optimizer = kind(model.parameters(), lr=_RATE, weight_decay=0.0)
        if self._state is not None:
            state, groups = self._state
            optimizer.load_state_dict({"state": copy.deepcopy(state), "param_groups": groups})
        for rows in steps:
            optimizer.zero_grad()
            model(torch.tensor(rows["x"]), torch.tensor(rows["labels"]))["loss"].backward()
            optimizer.step()
        return model, optimizer

    def require_same(self, weights: dict[str, list[float]]) -> None:
        largest = max(float(one.detach().abs().max()) for one in self.common.parameters())
        for name, one in self.common.named_parameters():
            assert weights[name] == pytest.approx(one.detach().flatten().tolist(), abs=_SAME * largest), name


def _mean(values: Sequence[Any]) -> Any:
    if isinstance(values[0], dict):
        return {name: _mean([one[name] for one in values]) for name in values[0]}
    return torch.stack(list(values)).mean(0) if isinstance(values[0], Tensor) else values[0]


@pytest.mark.parametrize("n_ranks", [2, 3])
@pytest.mark.parametrize("name", _INNER)
def test_ranks_take_the_outer_steps_of_the_algorithm(found: Jobs, name: str, n_ranks: int) -> None:
    ranks = found[name, n_ranks]
    assert len(ranks) == n_ranks
    reference = _Reference("sgd" if name == "sgd" else "adamw", 0.7, 0.9)
    reference.rounds([rank["seen"] for rank in ranks])
    for rank in ranks:
        reference.require_same(rank["weights"])
        assert rank["weights"] == ranks[0]["weights"]


def test_outer_rate_without_momentum_goes_a_part_of_the_way_to_the_mean(found: Jobs) -> None:
    ranks = found["no momentum", 2]
    reference = _Reference("sgd", 0.5, 0.0)
    reference.rounds([rank["seen"] for rank in ranks])
    reference.require_same(ranks[0]["weights"])


def test_without_outer_settings_the_ranks_take_their_mean(found: Jobs) -> None:
    ranks = found["mean", 2]
    reference = _Reference("adamw", 1.0, 0.0)
    reference.rounds([rank["seen"] for rank in ranks])
    reference.require_same(ranks[0]["weights"])
    with pytest.raises(AssertionError):
        reference.require_same(found["adamw", 2][0]["weights"])  # so the tolerance tells the two apart


def test_killed_run_with_outer_steps_resumes_to_the_same_bits(found: Jobs) -> None:
    assert found["killed", 2] == []
    assert [rank["weights"] for rank in found["resumed", 2]] == [found["unbroken", 2][0]["weights"]] * 2


def test_outer_momentum_continues_on_another_number_of_ranks(found: Jobs) -> None:
    reference = _Reference("adamw", 0.7, 0.9)
    reference.rounds([rank["seen"] for rank in found["first half", 2]])
    ranks = found["other ranks", 3]
    assert [len(rank["seen"]) for rank in ranks] == [_STEPS - _HALF] * 3
    reference.rounds([rank["seen"] for rank in ranks])
    for rank in ranks:
        reference.require_same(rank["weights"])


def test_another_number_of_ranks_with_outer_steps_is_refused_unless_allowed(found: Jobs) -> None:
    for rank in found["refused", 3]:
        assert rank["error"] == "ConfigError"
        assert "local_sgd_steps" in rank["text"]


def test_adapter_takes_outer_steps_and_its_base_stays(found: Jobs) -> None:
    ranks = found["adapter", 2]
    assert len(ranks) == 2
    for rank in ranks:
        assert rank["trained"] == ranks[0]["trained"] != found["adapter without momentum", 2][0]["trained"]
        assert rank["frozen"] == 0
        assert all(moved > 0 for moved in rank["trained"].values())
    (file,) = Path(found.folder("adapter", 2).parent / "out").glob(f"checkpoint-*{_STEPS}/outer.safetensors")
    names = load_file(file)
    assert names
    assert all("lora" in name for name in names)
