"""Trackers: every figure of the log reaches them under the name that transformers gives it."""

from __future__ import annotations

import importlib.util
import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import entries, toy_trainer

from whet.errors import EXIT_BAD_CONFIG, ConfigError

_OTHERS = ["mlflow", "trackio", "wandb"]


def _installed(package: str) -> bool:
    found = importlib.util.find_spec(package)
    return found is not None and found.origin is not None


def _scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard reads: name -> (step, number)."""
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


def _run(folder: Path, **changes: Any) -> Any:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    usual = {"report_to": "tensorboard", "num_train_epochs": 2, "logging_steps": 2, "eval_strategy": "epoch"}
    trainer = toy_trainer(folder, **(usual | changes))
    trainer.train()
    return trainer


def _near(figures: list[tuple[int, float]]) -> Any:
    """TensorBoard keeps float32."""
    return [(step, pytest.approx(value, rel=1e-6)) for step, value in figures]


def test_tensorboard_gets_every_figure(tmp_path: Path) -> None:
    trainer = _run(tmp_path)
    found = _scalars(tmp_path / "runs")
    for name in ("loss", "grad_norm", "learning_rate"):
        assert found[f"train/{name}"] == _near(entries(trainer, name)), name
    assert found["eval/loss"] == _near(entries(trainer, "eval_loss"))
    assert {"eval/runtime", "train/epoch"} <= found.keys()


def test_the_figures_of_the_whole_run_do_not_mix_with_those_of_its_steps(tmp_path: Path) -> None:
    """The mean loss of the run is no point of the loss curve; transformers names it train/train_loss."""
    trainer = _run(tmp_path)
    assert _scalars(tmp_path / "runs")["train/train_loss"] == _near(entries(trainer, "train_loss"))


def test_an_evaluation_after_training_reaches_tensorboard(tmp_path: Path) -> None:
    """So the tracker may not be closed where training ends."""
    trainer = _run(tmp_path)
    trainer.evaluate()
    assert len(_scalars(tmp_path / "runs")["eval/loss"]) == 3


def test_scores_of_the_test_split_are_named_so(tmp_path: Path) -> None:
    """The commands judge it under another prefix than transformers' Trainer does."""
    trainer = _run(tmp_path)
    trainer.evaluate(metric_key_prefix="predict")
    found = _scalars(tmp_path / "runs")
    assert "test/loss" in found
    assert "train/predict_loss" not in found


def test_an_evaluation_without_training_reaches_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    toy_trainer(tmp_path, report_to="tensorboard").evaluate()
    assert [step for step, _ in _scalars(tmp_path / "runs")["eval/loss"]] == [0]


def test_the_folder_of_tensorboard_can_be_named(tmp_path: Path) -> None:
    _run(tmp_path / "out", logging_dir=str(tmp_path / "events"))
    assert "train/loss" in _scalars(tmp_path / "events")
    assert not (tmp_path / "out" / "runs").exists()


def test_the_folder_of_tensorboard_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in transformers; a setting wins."""
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    _run(tmp_path / "out")
    assert "train/loss" in _scalars(tmp_path / "events")
    _run(tmp_path / "again", logging_dir=str(tmp_path / "named"))
    assert "train/loss" in _scalars(tmp_path / "named")


@pytest.mark.parametrize("before", ["eval_on_start", "evaluate", "train"])
def test_a_trainer_is_one_run_in_the_tracker(tmp_path: Path, before: str) -> None:
    """A second start is a second run in a tracker such as trackio, and an error in mlflow."""
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    trainer = toy_trainer(tmp_path, report_to="tensorboard", eval_on_start=before == "eval_on_start")
    if before != "eval_on_start":
        getattr(trainer, before)()
    trainer.train()
    assert len(list((tmp_path / "runs").rglob("*tfevents*"))) == 1


@pytest.mark.parametrize("failed", [False, True])
def test_a_closed_tracker_may_be_closed_again_and_begins_anew(tmp_path: Path, failed: bool) -> None:
    trainer = _run(tmp_path)
    trainer.close(failed)
    trainer.close(failed)
    trainer.evaluate()
    assert len(_scalars(tmp_path / "runs")["eval/loss"]) == 3


def test_the_settings_are_kept_with_the_run(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer = _run(tmp_path)
    events = EventAccumulator(str(tmp_path / "runs")).Reload()
    (name,) = [name for name in events.Tags()["tensors"] if name.startswith("args")]
    (kept,) = events.Tensors(name)[0].tensor_proto.string_val
    assert json.loads(kept) == trainer.args.to_dict()


@pytest.mark.parametrize("package", ["tensorboard", *_OTHERS])
def test_a_tracker_that_is_not_installed_is_named(tmp_path: Path, package: str) -> None:
    if _installed(package):
        pytest.skip(f"{package} is installed")
    with pytest.raises(ConfigError, match=rf"(?s)'{package}' is missing.*--report_to.*pip install {package}") as caught:
        toy_trainer(tmp_path, report_to=package)
    assert caught.value.exit_code == EXIT_BAD_CONFIG


@pytest.fixture(scope="module", params=_OTHERS)
def reported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    """A tracker, the folder that a run reporting to it was started in, and the ended process."""
    if not _installed(request.param):
        pytest.skip(f"{request.param} is not installed")
    folder = tmp_path_factory.mktemp(request.param)
    environment = os.environ | {
        "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "WANDB_PROJECT": "mine", "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_TRACKING_URI": (folder / "mlruns").as_uri(), "TRACKIO_DIR": str(folder / "trackio"),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }  # fmt: skip
    script = Path(__file__).with_name("tracker_run.py")
    command = [sys.executable, str(script), request.param]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return request.param, folder, done


def test_another_tracker_gets_every_evaluation(reported: tuple[str, Path, Any]) -> None:
    """At steps 0, 3, 6 and, after training, at 6 again."""
    package, folder, _ = reported
    if package == "mlflow":
        (file,) = (folder / "mlruns").glob("*/*/metrics/eval_loss")
        steps = [int(line.split()[2]) for line in file.read_text("utf-8").splitlines()]
    elif package == "trackio":
        (file,) = (folder / "trackio").glob("*.db")
        with sqlite3.connect(file) as base:
            rows = base.execute("select step, metrics from metrics order by id").fetchall()
        steps = [step for step, metrics in rows if "eval/loss" in json.loads(metrics)]
    else:
        (file,) = (folder / "wandb").glob("offline-run-*/*.wandb")
        assert b"eval/loss" in file.read_bytes()
        return
    assert steps == [0, 3, 6, 6]


def test_what_a_tracker_says_does_not_mix_with_the_json_lines(reported: tuple[str, Path, Any]) -> None:
    for line in reported[2].stdout.splitlines():
        assert "step" in json.loads(line)


def test_the_project_of_the_environment_is_honoured(reported: tuple[str, Path, Any]) -> None:
    """wandb's own variable, which transformers reads too."""
    package, folder, _ = reported
    if package != "wandb":
        pytest.skip("a variable of wandb")
    (file,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    assert b"mine" in file.read_bytes()


def test_run_of_mlflow_that_a_script_has_started_is_used_and_stays_open(tmp_path: Path) -> None:
    if not _installed("mlflow"):
        pytest.skip("mlflow is not installed")
    script = (
        "import mlflow\n"
        "from tiny_runs import toy_trainer\n"
        "with mlflow.start_run() as own:\n"
        "    nested = {'lr_scheduler_type': 'polynomial', 'lr_scheduler_kwargs': {'power': 2.0}}\n"
        "    trainer = toy_trainer('out', report_to='mlflow', **nested)\n"
        "    trainer.evaluate()\n"
        "    trainer.close(failed=True)\n"
        "    assert mlflow.active_run().info.run_id == own.info.run_id\n"
        "found = mlflow.get_run(own.info.run_id)\n"
        "assert 'eval_loss' in found.data.metrics\n"
        "assert found.info.status == 'FINISHED'\n"
        "assert found.data.params['lr_scheduler_kwargs.power'] == '2.0'\n"
    )
    environment = os.environ | {
        "MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_TRACKING_URI": (tmp_path / "mlruns").as_uri(),
        "MLFLOW_FLATTEN_PARAMS": "TRUE", "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }  # fmt: skip
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
