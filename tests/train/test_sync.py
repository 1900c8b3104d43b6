"""Every decision that several ranks would take together is asked at one place, and its answer counts."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import tiny_qa
from tiny_runs import Recorder, Toy, assert_same_weights, checkpoints, toy_trainer

from engine import TrainingArguments
from whet.engine.engine import Engine
from whet.engine.many_ranks import ManyRanks
from whet.engine.sync import Sync
from whet.store.save import Ranks
from whet.tasks.classify import job as classify_job
from whet.tasks.classify.arguments import ClassifyArguments
from whet.tasks.classify.examples import read_split as read_examples
from whet.tasks.qa import job as qa_job
from whet.tasks.qa.arguments import QaArguments
from whet.tasks.qa.splits import read_split as read_questions
from whet.watch.stop import Stopped

_FACTS, _OF_ACCELERATOR = {"n_ranks", "place", "group", "lost"}, {"gather"}
_DECISIONS = {name for name in vars(Sync) | vars(Ranks) if not name.startswith("_")} - _FACTS - _OF_ACCELERATOR
_RUN: dict[str, Any] = {
    "num_train_epochs": 2, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2,
    "load_best_model_at_end": True, "metric_for_best_model": "loss",
}  # fmt: skip


class Recording(Sync):
    """One rank that notes what it is asked, and answers some questions as another rank would."""

    def __init__(self, **answers: Any) -> None:
        self.asked: list[str] = []
        self._answers = answers

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in _DECISIONS:
            return found

        def answer(*own: Any, **options: Any) -> Any:
            self.asked.append(name)
            planted = self._answers.get(name)
            return found(*own, **options) if planted is None else planted(*own)

        return answer


def _train(folder: Path, sync: Recording, **changes: Any) -> Any:
    trainer = toy_trainer(folder, model=Toy(), **(_RUN | changes))
    trainer.sync = sync
    trainer.train()
    return trainer


def test_several_ranks_exchange_each_answer() -> None:
    assert vars(ManyRanks).keys() >= _DECISIONS | _OF_ACCELERATOR


def test_each_decision_is_asked(tmp_path: Path) -> None:
    sync = Recording()
    recorded, plain = _train(tmp_path / "a", sync), toy_trainer(tmp_path / "b", model=Toy(), **_RUN)
    plain.train()
    assert set(sync.asked) == _DECISIONS
    assert_same_weights(recorded.model, plain.model)


def test_stop_of_another_rank_saves_and_stops(tmp_path: Path) -> None:
    sync = Recording()
    sync._answers["stop_signal"] = lambda _: "SIGTERM" if sync.asked.count("total_loss") == 3 else None
    with pytest.raises(Stopped, match=r"stopped by SIGTERM after step 3: saved in .*checkpoint-3"):
        _train(tmp_path, sync)
    assert "checkpoint-3" in checkpoints(tmp_path)


class Evaluated(Recorder):
    """Notes the batches that were evaluated, too."""

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append(("prediction_step", state.global_step))


def _stop_once_saved(trainer: Engine) -> Evaluated:
    """Let another rank ask to stop as soon as the trained model is saved; return what the run did."""
    model = Path(trainer.args.output_dir) / "model.safetensors"
    trainer.sync = Recording(stop_signal=lambda _: "SIGTERM" if model.exists() else None)
    trainer.events.add_callback(done := Evaluated())
    return done


def _task_arguments(folder: Path) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder), use_cpu=True, do_train=True, do_eval=True, max_steps=1, save_strategy="no"
    )


def test_stop_of_another_rank_ends_qa_before_the_evaluation(tmp_path: Path, encoder: Path) -> None:
    file = str(tiny_qa.write_json(tmp_path / "data.json", tiny_qa.squad()))
    qa = QaArguments(
        model_name_or_path=str(encoder), train_file=file, validation_file=file, max_seq_length=48, doc_stride=8
    )
    questions = {name: read_questions(qa, name) for name in ("train", "validation")}
    job = qa_job.prepare(qa, _task_arguments(tmp_path / "out"), questions)
    done = _stop_once_saved(job.engine)
    with pytest.raises(Stopped, match="stopped by SIGTERM: the trained model is in"):
        job.run()
    assert done.steps("train_end") == [1]
    assert done.steps("prediction_step") == []


def test_stop_of_another_rank_ends_classification_before_the_evaluation(tmp_path: Path, encoder: Path) -> None:
    file = tmp_path / "data.csv"
    file.write_text("label,text\n" + "sea,the water and the wind\nland,the hills and the sheep\n" * 3, "utf-8")
    task = ClassifyArguments(
        model_name_or_path=str(encoder), train_file=str(file), validation_file=str(file), max_seq_length=32
    )
    examples = {name: read_examples(task, name) for name in ("train", "validation")}
    job = classify_job.prepare(task, _task_arguments(tmp_path / "out"), examples)
    done = _stop_once_saved(job.engine)
    with pytest.raises(Stopped, match="stopped by SIGTERM: the trained model is in"):
        job.run()
    assert done.steps("train_end") == [1]
    assert done.steps("prediction_step") == []


def test_memory_shortage_of_another_rank_saves_and_stops(tmp_path: Path) -> None:
    sync = Recording()
    sync._answers["memory_shortage"] = lambda _: "1 MiB left" if sync.asked.count("total_loss") == 3 else None
    with pytest.raises(Stopped, match=r"memory runs out \(1 MiB left.*after step 3: saved in"):
        _train(tmp_path, sync)
    assert "checkpoint-3" in checkpoints(tmp_path)


def test_step_that_is_not_finite_on_another_rank_is_not_applied(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, before = Toy(), Toy()
    trainer = toy_trainer(tmp_path, model=model, max_steps=1)
    trainer.sync = Recording(all_finite=lambda _: False)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert_same_weights(model, before)
    assert "step 1 was not applied: loss" in caplog.text


def test_early_stop_of_another_rank_ends_the_training(tmp_path: Path) -> None:
    sync = Recording()
    sync._answers["stop_early"] = lambda _: sync.asked.count("total_loss") >= 3
    assert _train(tmp_path, sync).state.global_step == 3


def test_answers_decide_about_evaluating_saving_and_the_best_model(tmp_path: Path) -> None:
    trainer = _train(tmp_path / "a", Recording(evaluate_now=lambda _: False), load_best_model_at_end=False)
    assert not [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    _train(tmp_path / "b", Recording(save_now=lambda _: False), load_best_model_at_end=False)
    assert checkpoints(tmp_path / "b") == []
    trainer = _train(tmp_path / "c", Recording(is_best=lambda _: True))
    assert trainer.state.best_global_step == 6


def test_precision_micro_batch_and_targets_are_those_of_all_ranks(tmp_path: Path) -> None:
    trainer = _train(tmp_path / "a", Recording(precision=lambda _: "bf16"))
    assert trainer.precision.name == "bf16"
    trainer = _train(tmp_path / "b", Recording(micro_batch_rows=lambda _: 2))
    assert trainer.state.train_batch_size == 2
    trainer = _train(tmp_path / "c", Recording(total_targets=lambda n: 2 * n), max_steps=1, logging_steps=1)
    half = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    trainer = _train(tmp_path / "d", Recording(), max_steps=1, logging_steps=1)
    assert next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry) == pytest.approx(2 * half)
