"""The best model: which it is, that it stays on the disk, and that the run ends with it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import Recorder, assert_same_weights, checkpoints, losing_metrics, toy_trainer, weights_of
from transformers import TrainerCallback

from whet.errors import EXIT_BAD_CONFIG, ConfigError
from whet.store import manifest


def _run(folder: Path, scores: Sequence[float], **changes: Any) -> tuple[Any, list[dict[str, torch.Tensor]]]:
    """A run of one step an epoch, evaluated after each; also the weights after each."""
    seen = Recorder(weights_of)
    usual = {
        "per_device_train_batch_size": 12, "num_train_epochs": len(scores), "eval_strategy": "epoch",
        "save_strategy": "epoch", "metric_for_best_model": "score", "lr_scheduler_type": "constant",
    }  # fmt: skip
    trainer = toy_trainer(folder, callbacks=[seen], compute_metrics=losing_metrics(scores), **(usual | changes))
    trainer.train()
    return trainer, seen.kept


def _steps(folder: Path) -> list[int]:
    return [int(name.removeprefix("checkpoint-")) for name in checkpoints(folder)]


@pytest.mark.parametrize(
    ("scores", "changes", "best"),
    [
        ([1, 3, 2], {}, 2),
        ([3, 1, 2], {"greater_is_better": False}, 2),
        ([3, 1, 2], {"metric_for_best_model": "eval_score"}, 1),
        ([1, 3, 3], {}, 2),  # of equals the first
        ([1, 2, 3], {}, 3),
        ([float("nan"), 1, float("nan")], {}, 2),
        ([float("inf"), 1, 2], {}, 3),
        ([float("-inf"), 2, 1], {"greater_is_better": False}, 3),
    ],
)
def test_a_run_ends_with_its_best_weights(
    tmp_path: Path, scores: list[float], changes: dict[str, Any], best: int
) -> None:
    trainer, after = _run(tmp_path, scores, load_best_model_at_end=True, **changes)
    assert_same_weights(trainer.model, after[best - 1])
    assert (trainer.state.best_global_step, trainer.state.best_metric) == (best, scores[best - 1])
    assert trainer.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best}")


@pytest.mark.parametrize("saved", [None, math.inf])
def test_run_resumes_after_an_infinite_evaluation(tmp_path: Path, saved: float | None) -> None:
    """It is no measure; earlier versions wrote it into their checkpoints as the best one."""
    usual = {"greater_is_better": False, "load_best_model_at_end": True}
    first, _ = _run(tmp_path, [math.inf], **usual)
    assert first.state.best_metric is None
    folder = tmp_path / "checkpoint-1"
    if saved is not None:
        state, facts = json.loads((folder / "trainer_state.json").read_text("utf-8")), manifest.facts_of(folder)
        assert facts is not None
        state |= {"best_metric": saved, "best_global_step": 1, "best_model_checkpoint": folder.name}
        (folder / "trainer_state.json").write_text(json.dumps(state), "utf-8")
        (folder / manifest.MANIFEST).unlink()
        manifest.seal(folder, 1, facts)
    again, after = _run(tmp_path, [3, 4], resume_from_checkpoint="auto", **usual)
    assert (again.state.best_global_step, again.state.best_metric) == (2, 3)
    assert_same_weights(again.model, after[0])


def test_an_evaluation_of_the_best_weights_is_logged_under_their_step(tmp_path: Path) -> None:
    trainer, _ = _run(tmp_path, [1, 3, 2, 3], num_train_epochs=3, load_best_model_at_end=True)
    trainer.evaluate()
    history = [entry for entry in trainer.state.log_history if "eval_score" in entry]
    assert [(entry["step"], entry["epoch"], entry["eval_score"]) for entry in history] == [
        (1, 1.0, 1), (2, 2.0, 3), (3, 3.0, 2), (2, 2.0, 3),
    ]  # fmt: skip
    assert trainer.state.global_step == 3


def test_without_being_told_a_run_ends_with_its_last_weights(tmp_path: Path) -> None:
    trainer, after = _run(tmp_path, [1, 3, 2])
    assert_same_weights(trainer.model, after[-1])


def test_the_loss_decides_where_no_metric_is_named(tmp_path: Path) -> None:
    trainer, after = _run(tmp_path, [1, 2, 3], metric_for_best_model=None, load_best_model_at_end=True)
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert trainer.state.best_metric == min(losses)
    assert_same_weights(trainer.model, after[losses.index(min(losses))])


def test_an_evaluation_before_the_run_takes_no_part(tmp_path: Path) -> None:
    """There is no checkpoint of step 0 to go back to."""
    trainer, after = _run(tmp_path, [9, 1, 3, 2], eval_on_start=True, num_train_epochs=3, load_best_model_at_end=True)
    assert trainer.state.best_global_step == 2
    assert_same_weights(trainer.model, after[1])


@pytest.mark.parametrize(("scores", "best"), [([9, 3, 1, 2], 1), ([1, 2, 9, 3], 3)])
def test_where_the_best_evaluation_has_no_checkpoint_nothing_is_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, scores: list[float], best: int
) -> None:
    """As in transformers; steps 2 and 4 are saved, and the log tells which would have been the best."""
    trainer, after = _run(
        tmp_path, scores, load_best_model_at_end=True, eval_strategy="steps", eval_steps=1, save_strategy="steps",
        save_steps=2,
    )  # fmt: skip
    assert _steps(tmp_path) == [2, 4]
    assert_same_weights(trainer.model, after[3])
    (told,) = [text for text in caplog.messages if "load_best_model_at_end" in text]
    assert f"of step {best}, has no checkpoint; nothing is loaded" in told


@pytest.mark.parametrize(
    ("scores", "limit", "load_best", "left"),
    [
        ([1, 2, 3, 4], 2, False, [3, 4]),
        ([4, 3, 2, 1], 2, False, [3, 4]),
        ([4, 3, 2, 1], 2, True, [1, 4]),  # the best takes a place, the newest another
        ([4, 3, 2, 1], 3, True, [1, 3, 4]),
        ([1, 2, 3, 4], 2, True, [3, 4]),
        ([4, 3, 2, 1], 1, True, [1, 4]),  # more than the limit, as in transformers: neither can go
        ([1, 2, 3, 4], 1, True, [4]),
        ([1, 2, 3, 4], None, False, [1, 2, 3, 4]),
    ],
)
def test_which_checkpoints_are_kept(
    tmp_path: Path, scores: list[float], limit: int | None, load_best: bool, left: list[int]
) -> None:
    _run(tmp_path, scores, save_total_limit=limit, load_best_model_at_end=load_best)
    assert _steps(tmp_path) == left


class _Folders(TrainerCallback):
    """Notes which checkpoints are there when the run begins."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.at_begin = _steps(self.folder)


class _PowerCut(TrainerCallback):
    """Ends the run with an error before its fourth step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 3:
            raise RuntimeError("power cut")


@pytest.mark.parametrize("limit", [1, 2])
def test_resumed_run_keeps_its_best_checkpoint(tmp_path: Path, limit: int) -> None:
    """Of a limit of 1 both stay, the best and the newest."""
    usual: dict[str, Any] = {
        "per_device_train_batch_size": 12, "num_train_epochs": 4, "eval_strategy": "epoch", "save_strategy": "epoch",
        "metric_for_best_model": "score", "load_best_model_at_end": True, "save_total_limit": limit,
    }  # fmt: skip
    run = toy_trainer(tmp_path, callbacks=[_PowerCut()], compute_metrics=losing_metrics([4, 3, 2]), **usual)
    with pytest.raises(RuntimeError, match="power cut"):
        run.train()
    assert _steps(tmp_path) == [1, 3]
    again = toy_trainer(tmp_path, compute_metrics=losing_metrics([1]), **usual)
    again.train(resume_from_checkpoint="auto")
    assert _steps(tmp_path) == [1, 4]
    assert again.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")
    assert_same_weights(again.model, load_file(tmp_path / "checkpoint-1" / "model.safetensors"))


def test_resumed_run_finishes_a_rotation_that_a_kill_prevented(tmp_path: Path) -> None:
    """The checkpoint of step 3 was saved with a limit that nothing exceeded; the limit of the resumed run is lower."""
    usual: dict[str, Any] = {
        "per_device_train_batch_size": 12, "num_train_epochs": 4, "eval_strategy": "epoch", "save_strategy": "epoch",
        "metric_for_best_model": "score", "load_best_model_at_end": True,
    }  # fmt: skip
    run = toy_trainer(tmp_path, callbacks=[_PowerCut()], compute_metrics=losing_metrics([3, 4, 2]), **usual)
    with pytest.raises(RuntimeError, match="power cut"):
        run.train()
    assert _steps(tmp_path) == [1, 2, 3]
    seen = _Folders(tmp_path)
    again = toy_trainer(tmp_path, callbacks=[seen], compute_metrics=losing_metrics([1]), save_total_limit=1, **usual)
    again.train(resume_from_checkpoint="auto")
    assert seen.at_begin == [2, 3]
    assert _steps(tmp_path) == [2, 4]


def test_checkpoints_of_an_earlier_longer_run_do_not_crowd_out_new_ones(tmp_path: Path) -> None:
    """With --overwrite_output_dir the folder may hold some, of later steps than the new run will ever take."""
    _run(tmp_path, [1, 2, 3, 4])
    trainer, after = _run(tmp_path, [1, 2], overwrite_output_dir=True, save_total_limit=1, seed=1)
    assert 2 in _steps(tmp_path)
    assert_same_weights(load_file(tmp_path / "checkpoint-2" / "model.safetensors"), after[-1])
    assert trainer.state.global_step == 2


@pytest.mark.parametrize("load_best", [False, True])
def test_saving_only_the_best(tmp_path: Path, load_best: bool) -> None:
    trainer, after = _run(tmp_path, [2, 1, 3, 2], save_strategy="best", load_best_model_at_end=load_best)
    assert _steps(tmp_path) == [1, 3]
    assert_same_weights(trainer.model, after[2] if load_best else after[3])
    assert_same_weights(load_file(tmp_path / "checkpoint-3" / "model.safetensors"), after[2])


def test_a_metric_that_no_evaluation_gives_is_refused_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"(?s)metric_for_best_model names no metric.*got: f2.*eval_loss.*eval_score"
    ) as caught:
        _run(tmp_path, [1, 2], metric_for_best_model="f2")
    assert caught.value.exit_code == EXIT_BAD_CONFIG
    assert "--metric_for_best_model" in caught.value.problems[0].fix


def test_a_second_run_of_a_trainer_looks_for_its_own_best(tmp_path: Path) -> None:
    """What the first run reached is no mark for the second, whose data may be others."""
    scores = [5, 6, 1, 2]
    trainer, _ = _run(tmp_path, scores, num_train_epochs=2, load_best_model_at_end=True)
    assert trainer.state.best_metric == 6
    trainer.train()
    assert (trainer.state.best_metric, trainer.state.best_global_step) == (2, 2)
