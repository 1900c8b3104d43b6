"""R16: where a run may stop and go on, and what it may not change on the way. R17: the same run twice is the same."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import count, same_folder, trials_of
from transformers import TrainerCallback
from trials import OUT, trainer

from tiny import tiny_model, tiny_rows
from whet.errors import ConfigError
from whet.store import find

pytestmark = pytest.mark.reliability

_PER_EPOCH = 8
_USUAL: dict[str, Any] = {"save_steps": 1, "lr_scheduler_type": "constant_with_warmup"}


class _StoppedError(Exception):
    """Stands for whatever ends a process."""


class _Stop(TrainerCallback):
    """Ends the run in the middle of a step: after this many micro-batches."""

    def __init__(self, n: int) -> None:
        self._left = n

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._left -= 1
        if self._left == 0:
            raise _StoppedError


def _last(folder: Path, step: int) -> Path:
    return folder / OUT / find.folder_name(step)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a function that trains in a folder of this name."""

    def run(name: str, asked: str | None = None, **changes: Any) -> Any:
        (tmp_path / name).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / name)
        made = trainer(**(_USUAL | changes))
        made.train(resume_from_checkpoint=asked)
        return made

    return run


@pytest.mark.parametrize(
    ("where", "stops", "changes"),
    [
        ("before the first step", [], {"max_steps": 3}),
        ("before the last batch", [_PER_EPOCH - 1], {"max_steps": _PER_EPOCH}),
        ("at the end of an epoch", [_PER_EPOCH], {"max_steps": _PER_EPOCH + 3}),
        ("twice in an epoch", [2, 5], {"max_steps": _PER_EPOCH}),
        ("in a run that becomes longer", [4], {"max_steps": _PER_EPOCH + 2}),
    ],
)
def test_a_run_goes_on(runs: Any, tmp_path: Path, where: str, stops: list[int], changes: Any) -> None:
    runs("whole", **changes)
    for stop in stops:
        runs("parts", "auto", **(changes | {"max_steps": stop}))
    runs("parts", "auto", **changes)
    different = same_folder(
        _last(tmp_path / "parts", changes["max_steps"]), _last(tmp_path / "whole", changes["max_steps"])
    )
    assert different == [], where


def test_stopped_in_the_middle_of_a_step(runs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"max_steps": 4, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    runs("whole", **changes)
    (tmp_path / "parts").mkdir()
    monkeypatch.chdir(tmp_path / "parts")
    stopped = trainer(**(_USUAL | changes))
    stopped.events.callbacks.append(_Stop(8))  # 3 micro-batches of a step end so; this is inside the third step
    with pytest.raises(_StoppedError):
        stopped.train()
    assert stopped.state.global_step == 2
    runs("parts", "auto", **changes)
    assert same_folder(_last(tmp_path / "parts", 4), _last(tmp_path / "whole", 4)) == []


def test_after_the_end_nothing_is_left_to_do(runs: Any, tmp_path: Path) -> None:
    runs("run", max_steps=3)

    def written() -> dict[Path, int]:
        """Return when each file was written; run.log gets a line from each start."""
        files = [path for path in (tmp_path / "run").rglob("*") if path.is_file() and path.name != "run.log"]
        return {path: path.stat().st_mtime_ns for path in files}

    before = written()
    assert runs("run", "auto", max_steps=3).state.global_step == 3
    assert written() == before


def _other_model() -> torch.nn.Module:
    return tiny_model("bert", dropout=0.2, hidden_size=16, intermediate_size=32)


def _double() -> torch.nn.Module:
    return tiny_model("bert", dropout=0.1, hidden_size=16, intermediate_size=32).double()


_CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "rows_per_step": ({"per_device_train_batch_size": 8}, "rows_per_step: 4 in the checkpoint -> 8 now"),
    "seed": ({"seed": 7}, "seed: 42 in the checkpoint -> 7 now"),
    "data": ({"rows": tiny_rows(30, seed=9)}, "data.digest: "),
    "model": ({"model": _other_model}, "model.config.hidden_dropout_prob: 0.1 in the checkpoint -> 0.2 now"),
    "dtype": ({"model": _double}, "dtype: float32 in the checkpoint -> float64 now"),
    "optim": ({"optim": "adamw_torch"}, "optim: auto in the checkpoint -> adamw_torch now"),
    "max_loss_spike": ({"max_loss_spike": 5.0}, "max_loss_spike: not set in the checkpoint -> 5.0 now"),
    "learning_rate": ({"learning_rate": 1e-4}, "learning_rate: 0.0005 in the checkpoint -> 0.0001 now"),
}
"""What may change only by name -> how, and the line that tells of it."""


def _made(changes: dict[str, Any]) -> dict[str, Any]:
    return {name: value() if name == "model" else value for name, value in changes.items()}


@pytest.mark.parametrize("name", _CHANGES)
def test_a_change_is_refused_unless_it_is_allowed_by_name(
    runs: Any, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    changes, line = _CHANGES[name]
    runs("run", max_steps=2)
    with pytest.raises(ConfigError) as caught:
        runs("run", "auto", max_steps=4, **_made(changes))
    assert line in str(caught.value)
    assert f"--resume_allow_changes {name}" in str(caught.value)
    caplog.clear()
    allowed = runs("run", "auto", max_steps=4, resume_allow_changes=(name,), **_made(changes))
    assert allowed.state.global_step == 4
    assert line in caplog.text
    if name == "learning_rate":
        assert {group["lr"] for group in allowed.optimizer.param_groups} == {1e-4}
    if name == "optim":
        assert not any(group["fused"] for group in allowed.optimizer.param_groups)


def test_another_shape_is_refused_whatever_is_allowed(runs: Any) -> None:
    runs("run", max_steps=2)
    wider = tiny_model("bert", dropout=0.1, hidden_size=16, intermediate_size=48)
    with pytest.raises(ConfigError, match=r"weights.*\[32, 16\] in the checkpoint -> \[48, 16\] now"):
        runs("run", "auto", max_steps=4, model=wider, resume_allow_changes=("model",))


def test_other_threads_and_versions_are_told(runs: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    runs("run", max_steps=2)
    environment = json.loads((_last(tmp_path / "run", 2) / "identity.json").read_text("utf-8"))["environment"]
    assert {"threads", "torch", "transformers", "whet"} <= environment.keys()
    n_threads = torch.get_num_threads()
    torch.set_num_threads(n_threads + 1)
    try:
        with caplog.at_level(logging.WARNING, logger="whet"):
            runs("run", "auto", max_steps=3)
    finally:
        torch.set_num_threads(n_threads)
    assert (
        f"not bit for bit as it would have: threads: {n_threads} in the checkpoint -> {n_threads + 1} now"
        in caplog.text
    )


def test_the_same_run_twice_is_the_same(runs: Any, tmp_path: Path) -> None:
    """Weights, moments, rates, counters and the log of losses, byte for byte."""
    n = trials_of(10)
    runs("first", max_steps=6, save_steps=6)

    def alike(index: int) -> bool:
        runs(f"{index}", max_steps=6, save_steps=6)
        return not same_folder(_last(tmp_path / f"{index}", 6), _last(tmp_path / "first", 6))

    count("the same run again, bitwise the same", [alike(index) for index in range(n)], n)
