"""What a training of whet.Trainer, or of transformers' Trainer, records in run.jsonl if it is asked to."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from hf_runs import KillAt, SignalAt, arguments, classifier, forked, pad, rows, same, weights

import whet
from whet.cli.main import run
from whet.report import runs
from whet.watch import record

PARTS = {"data", "forward_backward", "update", "evaluation", "saving"}


def trainer_of(folder: Path, *callbacks: Any, **changes: Any) -> whet.Trainer:
    """A training of 6 steps that logs every second, evaluates every third and saves every fourth."""
    usual = {"max_steps": 6, "logging_steps": 2, "eval_strategy": "steps", "eval_steps": 3, "report_to": "whet"}
    args = arguments(folder, **(usual | changes))
    return whet.Trainer(classifier(), args, pad, rows(), rows(8), callbacks=[*callbacks])


def test_a_training_records_its_steps_evaluations_and_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--hub_token", "hf_abcdefghijklmnopqrst", "--epochs", "3"])
    trainer = trainer_of(tmp_path, hub_token="hf_abcdefghijklmnopqrst", warmup_steps=2)
    trainer.train()
    found = record.read(tmp_path)
    assert "abcdef" not in (tmp_path / "run.jsonl").read_text("ascii")
    (attempt,) = found.attempts
    begin, end = attempt.begin, attempt.end
    assert end is not None
    assert begin["command"] == "python train.py --hub_token '***' --epochs 3"
    assert begin["settings"]["warmup_steps"] == {"value": 2, "from": "script"}
    assert begin["settings"]["weight_decay"] == {"value": 0.0}
    assert (begin["task"], begin["steps"], begin["data"]["rows"]) == (None, 6, 20)
    assert begin["model"]["parameters"] == sum(one.numel() for one in trainer.model.parameters())
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [(one.step, one.loss, one.learning_rate) for one in found.steps] == [
        (entry["step"], entry["loss"], entry["learning_rate"]) for entry in logged
    ]
    assert all((one.eta_s or 0.0) > 0 for one in found.steps), "an evaluation and a checkpoint follow the last step"
    assert all(one.rows_per_s is None and one.tokens_per_s is None for one in found.steps), "nobody counts them"
    assert {name for one in found.steps for name in one.seconds} == PARTS
    whole_s = found.steps[-1].time - begin["time"]
    assert 0 < sum(sum(one.seconds.values()) for one in found.steps) <= whole_s + 0.01
    assert [one.step for one in found.evaluations] == [3, 6]
    assert "eval_loss" in found.evaluations[0].metrics
    assert [one.folder for one in found.saves] == ["checkpoint-4", "checkpoint-6"]
    assert end["status"] == "finished"
    assert end["metrics"]["train_loss"] == pytest.approx(trainer.state.log_history[-1]["train_loss"])


def test_real_tokens_are_counted_if_asked_for_and_from_the_step_of_a_resume_on(tmp_path: Path) -> None:
    counts = {"include_num_input_tokens_seen": "non_padding", "logging_steps": 1, "eval_strategy": "no"}
    trainer_of(tmp_path, **counts).train()
    shutil.rmtree(tmp_path / "checkpoint-6")
    trainer_of(tmp_path, **counts).train("auto")
    first, resumed = record.read(tmp_path).attempts
    assert resumed.begin["resumed_from"] == 4

    def n_tokens(one: record.Step) -> float:
        assert one.tokens_per_s is not None
        return one.tokens_per_s * sum(one.seconds[part] for part in ("data", "forward_backward", "update"))

    assert [n_tokens(one) for one in resumed.steps] == pytest.approx(
        [n_tokens(one) for one in first.steps[4:]], rel=0.1
    )
    trainer_of(tmp_path / "all", **counts | {"include_num_input_tokens_seen": True}).train()
    assert all(one.tokens_per_s is None for one in record.read(tmp_path / "all").steps), "padding is among them"


def test_an_evaluation_of_the_best_model_has_its_step(tmp_path: Path) -> None:
    """The loss falls, so of the highest loss the first checkpoint is the best."""
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    trainer = trainer_of(tmp_path, eval_steps=2, save_steps=2, learning_rate=1e-2, **best)
    trainer.train()
    trainer.evaluate()
    found = record.read(tmp_path).evaluations
    assert [one.step for one in found] == [2, 4, 6, trainer.state.best_global_step]
    assert (trainer.state.best_global_step or 0) < 6
    trainer.save_state()
    (tmp_path / "run.jsonl").unlink()
    kept = runs.read(tmp_path).evaluations
    assert kept[6]["eval_loss"] == found[2].metrics["eval_loss"], "the log alone has the last step for it"


def test_watch_and_report_read_it_and_an_evaluation_later_is_added(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = trainer_of(tmp_path, eval_strategy="no")
    trainer.train()
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "eval_loss" not in page
    metrics = trainer.evaluate()
    assert f"{metrics['eval_loss']:.4f}" in (tmp_path / "report.html").read_text("utf-8")
    capsys.readouterr()
    assert run(["watch", str(tmp_path), "--once"]) == 0
    shown = capsys.readouterr().out
    assert "finished" in shown
    assert "6 of 6" in shown
    assert run(["report", str(tmp_path), "--output", str(tmp_path / "again.html")]) == 0
    assert "Where the time went" in (tmp_path / "again.html").read_text("utf-8")


def test_report_leaves_out_what_a_script_saved_of_an_earlier_training(tmp_path: Path) -> None:
    """A script owns its files: they stay, and the page does not take them for the results of the next training."""
    trainer = trainer_of(tmp_path, eval_strategy="no")
    trainer.save_metrics("train", dict(trainer.train().metrics) | {"train_loss": 71.5})
    trainer.save_metrics("eval", trainer.evaluate() | {"eval_accuracy": 0.8125})
    trainer.save_state()
    (tmp_path / "errors.jsonl").write_text('{"row": "7", "text": "old", "expected": "a", "predicted": "b"}\n', "utf-8")
    saved = {path: path.read_bytes() for path in tmp_path.glob("*.json*") if path.name != "run.jsonl"}
    for path in saved:
        os.utime(path, (0, 0))  # of an earlier day
    assert run(["report", str(tmp_path)]) == 0
    assert "0.8125" in (tmp_path / "report.html").read_text("utf-8"), "the record has the same loss, whatever the clock"
    other = trainer_of(tmp_path, eval_strategy="no", learning_rate=0.1, overwrite_output_dir=True)
    metrics = other.train().metrics
    assert all(path.read_bytes() == content for path, content in saved.items())
    other.save_metrics("train", metrics)  # transformers adds them to what the file has
    assert run(["report", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text("utf-8")
    assert f"{metrics['train_loss']:.4f}" in page
    assert not [old for old in ("0.8125", "71.5", "eval_loss", "&#34;old&#34;", ">old<") if old in page]
    assert "it is of an earlier model" in page
    metrics = other.evaluate()
    other.save_metrics("eval", metrics | {"eval_accuracy": 0.9375})
    assert run(["report", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "0.9375" in page
    assert f"{metrics['eval_loss']:.4f}" in page


def test_the_loop_of_transformers_records_the_same(tmp_path: Path) -> None:
    args = transformers.TrainingArguments(
        str(tmp_path),
        max_steps=4,
        per_device_train_batch_size=4,
        logging_steps=2,
        save_steps=2,
        use_cpu=True,
        disable_tqdm=True,
    )
    record_callback = whet.RecordCallback(report_html=False)
    data: Any = rows()
    transformers.Trainer(classifier(), args, pad, data, callbacks=[record_callback]).train()
    found = record.read(tmp_path)
    assert [one.step for one in found.steps] == [2, 4]
    assert {name for one in found.steps for name in one.seconds} == PARTS - {"evaluation"}
    assert found.last.end is not None
    assert not (tmp_path / "report.html").exists()


def test_nothing_is_recorded_unless_asked_for_and_all_does_not_ask(tmp_path: Path) -> None:
    for name in ("none", "all"):
        trainer_of(tmp_path / name, report_to=name).train()
        assert not {"run.jsonl", "report.html"} & {one.name for one in (tmp_path / name).iterdir()}


def test_a_record_does_not_change_the_training(tmp_path: Path) -> None:
    for name in ("whet", "none"):
        trainer_of(tmp_path / name, report_to=name, save_steps=6).train()
    assert same(weights(tmp_path / "whet" / "checkpoint-6"), weights(tmp_path / "none" / "checkpoint-6"))


def test_a_training_that_raises_has_failed_and_one_that_is_interrupted_was_stopped(tmp_path: Path) -> None:
    class Raises(transformers.TrainerCallback):
        def __init__(self, error: BaseException) -> None:
            self.error = error

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 3:
                raise self.error

    for error, status in ((ValueError("no rows"), "failed"), (KeyboardInterrupt(), "stopped")):
        with pytest.raises(type(error)):
            trainer_of(tmp_path / status, Raises(error)).train()
        end = record.read(tmp_path / status).last.end
        assert end is not None
        assert end["status"] == status
    failed = record.read(tmp_path / "failed").last.end
    assert failed is not None
    assert failed["error"] == "ValueError: no rows"


def test_a_killed_training_and_one_that_heard_a_signal_are_told_apart_and_resume(tmp_path: Path) -> None:
    killed = forked(lambda _: trainer_of(tmp_path / "out", KillAt("on_step_end", 5)).train(), tmp_path / "1")
    assert killed == [-signal.SIGKILL]
    assert record.read(tmp_path / "out").last.end is None

    def stopped(_: int) -> None:
        trainer_of(tmp_path / "out", SignalAt("on_step_end", 5, signal.SIGTERM)).train("auto")

    assert forked(stopped, tmp_path / "2") == [75]
    found = record.read(tmp_path / "out")
    assert found.last.end is not None
    assert (found.last.end["status"], found.last.begin["resumed_from"]) == ("stopped", 4)
    trainer_of(tmp_path / "out").train("auto")
    found = record.read(tmp_path / "out")
    assert [one.begin["resumed_from"] for one in found.run] == [None, 4, 5]
    assert found.steps[-1].step == 6
