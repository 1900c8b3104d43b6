"""Evaluation, prediction and what is saved, through the Trainer as a library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import Toy, arguments, assert_same_weights, read_json, span_rows, tiny_bert, toy_rows, toy_trainer
from transformers import BertForQuestionAnswering, EvalPrediction, TrainerState

import engine
from whet.errors import ConfigError

_SPEED = {"runtime", "samples_per_second", "steps_per_second"}


def _predicted(rows: list[dict[str, torch.Tensor]]) -> np.ndarray:
    with torch.no_grad():
        return Toy().eval()(torch.stack([row["x"] for row in rows]))["logits"].numpy()


def test_the_loss_is_the_mean_over_rows_and_not_over_batches(tmp_path: Path) -> None:
    rows = toy_rows(5)
    metrics = toy_trainer(tmp_path, eval_dataset=rows, per_device_eval_batch_size=4).evaluate()
    wanted = np.mean((_predicted(rows) - np.array([row["labels"] for row in rows])) ** 2)
    assert metrics["eval_loss"] == pytest.approx(wanted, rel=1e-5)  # float32, other order of sums
    assert metrics.keys() == {"eval_loss", "epoch"} | {f"eval_{name}" for name in _SPEED}


def test_compute_metrics_gets_predictions_and_labels_in_the_order_of_the_rows(tmp_path: Path) -> None:
    seen: list[EvalPrediction] = []

    def judge(prediction: EvalPrediction) -> dict[str, float]:
        seen.append(prediction)
        return {"score": 0.25}

    rows = toy_rows(5)
    trainer = toy_trainer(tmp_path, eval_dataset=rows, compute_metrics=judge, per_device_eval_batch_size=2)
    assert trainer.evaluate()["eval_score"] == 0.25
    predictions, labels = seen[0]
    assert isinstance(seen[0], EvalPrediction)
    np.testing.assert_allclose(predictions, _predicted(rows), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(labels, [row["labels"].item() for row in rows])


def test_metrics_that_carry_the_prefix_already_keep_their_names(tmp_path: Path) -> None:
    metrics = toy_trainer(tmp_path, compute_metrics=lambda _: {"eval_score": 0.5, "other": 1.0}).evaluate()
    assert {"eval_score", "eval_other"} <= metrics.keys()


def test_evaluation_of_another_data_set_under_another_name(tmp_path: Path) -> None:
    trainer = toy_trainer(tmp_path)
    rows = toy_rows(3)
    metrics = trainer.evaluate(rows, metric_key_prefix="held_out")
    assert metrics["held_out_loss"] == toy_trainer(tmp_path, eval_dataset=rows).evaluate()["eval_loss"]
    assert trainer.state.log_history[-1]["held_out_loss"] == metrics["held_out_loss"]


def test_evaluation_drops_nothing_out_and_changes_nothing(tmp_path: Path) -> None:
    model = Toy(dropout=0.5)
    trainer = toy_trainer(tmp_path, model=model)
    without = toy_trainer(tmp_path).evaluate()["eval_loss"]
    assert trainer.evaluate()["eval_loss"] == trainer.evaluate()["eval_loss"] == without
    assert model.training
    assert_same_weights(model, Toy())


def test_evaluation_without_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)no data set to evaluate on.*fix: add --validation_file"):
        toy_trainer(tmp_path, eval_dataset=None).evaluate()


def test_predictions_come_in_the_order_of_the_rows(tmp_path: Path) -> None:
    rows = toy_rows(7)
    found = toy_trainer(tmp_path, per_device_eval_batch_size=3, compute_metrics=lambda _: {"score": 0.5}).predict(rows)
    np.testing.assert_allclose(found.predictions, _predicted(rows), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found.label_ids, [row["labels"].item() for row in rows])
    assert found.metrics.keys() == {"test_loss", "test_score"} | {f"test_{name}" for name in _SPEED}


def test_predictions_for_rows_without_labels(tmp_path: Path) -> None:
    rows = [{"x": row["x"]} for row in toy_rows(5)]
    found = toy_trainer(tmp_path, compute_metrics=lambda _: {"score": 0.5}).predict(rows)
    np.testing.assert_allclose(found.predictions, _predicted(toy_rows(5)), rtol=1e-5, atol=1e-6)
    assert found.label_ids is None
    assert not {"test_loss", "test_score"} & found.metrics.keys()


def test_span_predictions_are_the_models_logits_filled_up(tmp_path: Path) -> None:
    """What whet computes on rows end to end, against the model on each row alone; places behind a row hold -100."""
    rows, model = span_rows(7), tiny_bert()
    trainer = engine.Trainer(model=model, args=arguments(tmp_path, per_device_eval_batch_size=3), eval_dataset=rows)
    start, end = trainer.predict(rows).predictions
    alone = tiny_bert().eval()
    for row, row_start, row_end in zip(rows, start, end, strict=True):
        n_tokens = len(row["input_ids"])
        with torch.no_grad():
            wanted = alone(torch.tensor([row["input_ids"]]))
        np.testing.assert_allclose(
            row_start[:n_tokens], wanted.start_logits[0], atol=1e-5
        )  # float32, other order of sums
        np.testing.assert_allclose(row_end[:n_tokens], wanted.end_logits[0], atol=1e-5)
        assert (row_start[n_tokens:] == -100).all()
        assert (row_end[n_tokens:] == -100).all()


def test_rows_of_a_span_model_may_carry_what_it_does_not_read(tmp_path: Path) -> None:
    """As the features of the guides' script do: where tokens stand, and the question's id."""
    plain = span_rows()
    rich = [
        row | {"example_id": f"q{i}", "offset_mapping": [(0, 1)] * len(row["input_ids"])} for i, row in enumerate(plain)
    ]
    trainers = [
        engine.Trainer(model=tiny_bert(), args=arguments(tmp_path), train_dataset=rows) for rows in (plain, rich)
    ]
    for trainer in trainers:
        trainer.train()
    assert_same_weights(trainers[1].model, trainers[0].model)


def test_a_plain_module_is_saved_as_safetensors(tmp_path: Path) -> None:
    trainer = toy_trainer(tmp_path)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    assert {path.name for path in (tmp_path / "saved").iterdir()} == {"model.safetensors", "training_args.json"}
    fresh = Toy()
    fresh.load_state_dict(load_file(tmp_path / "saved" / "model.safetensors"))
    assert_same_weights(fresh, trainer.model)


def test_the_settings_are_saved_with_the_model(tmp_path: Path) -> None:
    trainer = toy_trainer(tmp_path, learning_rate=3e-4, logging_steps=0.5, report_to="none")
    trainer.save_model()
    kept = read_json(tmp_path / "training_args.json")
    assert engine.TrainingArguments(**kept, output_dir=trainer.args.output_dir) == trainer.args


def test_a_model_of_transformers_is_saved_so_that_it_loads(tmp_path: Path) -> None:
    trainer = engine.Trainer(model=tiny_bert(), args=arguments(tmp_path), train_dataset=span_rows())
    trainer.train()
    trainer.save_model()
    loaded = BertForQuestionAnswering.from_pretrained(tmp_path)
    assert_same_weights(loaded, trainer.model)
    assert "whet" not in (tmp_path / "config.json").read_text("utf-8")


def test_the_state_reads_as_that_of_transformers(tmp_path: Path) -> None:
    trainer = toy_trainer(tmp_path, logging_steps=1, eval_strategy="epoch", num_train_epochs=2, max_steps=5)
    trainer.train()
    trainer.save_state()
    state = TrainerState.load_from_json(str(tmp_path / "trainer_state.json"))
    assert state.log_history == trainer.state.log_history
    assert (state.global_step, state.max_steps, state.num_train_epochs, state.epoch) == (5, 5, 2, pytest.approx(5 / 3))
    assert (state.logging_steps, state.eval_steps, state.train_batch_size) == (1, 3, 4)


def test_metrics_are_written_and_collected(tmp_path: Path) -> None:
    trainer = toy_trainer(tmp_path)
    trainer.save_metrics("train", {"train_loss": 0.5, "epoch": 1.0})
    trainer.save_metrics("eval", {"eval_loss": 0.25, "epoch": 2.0})
    found: dict[str, Any] = {path.name: read_json(path) for path in tmp_path.glob("*_results.json")}
    assert found == {
        "train_results.json": {"train_loss": 0.5, "epoch": 1.0},
        "eval_results.json": {"eval_loss": 0.25, "epoch": 2.0},
        "all_results.json": {"train_loss": 0.5, "eval_loss": 0.25, "epoch": 2.0},
    }


METRICS = {
    "array": (np.array([0.5, 0.25]), [0.5, 0.25]),
    "tensor": (torch.tensor([[1.0]] * 2), [[1.0], [1.0]]),
    "set": ({2, 1}, [1, 2]),
    "nested": ({"a": np.array([1]), 3: {4}}, {"a": [1], "3": [4]}),
    "bytes": (b"x", "b'x'"),
    "complex": (np.array([1j]), "1j"),
    "nan": (float("nan"), "NaN"),
}


@pytest.mark.parametrize("kind", METRICS)
def test_metric_that_json_has_not_is_saved_and_read_again(kind: str, tmp_path: Path) -> None:
    """compute_metrics may return the F1 of each class, or a matrix; a run goes through with it, and resumes."""
    found, saved = METRICS[kind]
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    for steps, resume in ((1, None), (2, True)):
        rows = toy_rows(5)
        trainer = toy_trainer(
            tmp_path, train_dataset=rows, eval_dataset=rows, compute_metrics=lambda _: {"x": found}, max_steps=steps,
            log_format="json", **options,
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resume)
    trainer.save_metrics("eval", trainer.evaluate())
    assert read_json(tmp_path / "eval_results.json")["eval_x"] == saved
