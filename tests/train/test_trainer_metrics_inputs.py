"""What compute_metrics gets besides predictions and labels, against transformers' own Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from override_runs import ours, pad, theirs, token_rows
from tiny_runs import Toy, span_rows, tiny_bert, toy_rows, toy_trainer
from transformers import BertForSequenceClassification, EvalPrediction

import engine
from whet.errors import ConfigError

NEAR = {"rtol": 1e-4, "atol": 1e-5}  # float32, other order of sums


class Judge:
    """Keeps what compute_metrics gets."""

    def __call__(self, prediction: EvalPrediction) -> dict[str, float]:
        self.seen = prediction
        return {"score": 0.5}


def both(folder: Path, config: dict[str, Any] | None = None, **changes: Any) -> tuple[EvalPrediction, EvalPrediction]:
    """Return what whet's and transformers' Trainer give compute_metrics for the same model and rows."""
    found = []
    for base, args in ((engine.Trainer, ours), (transformers.Trainer, theirs)):
        model, judge = tiny_bert(BertForSequenceClassification, num_labels=3, **(config or {})), Judge()
        given = args(folder, per_device_eval_batch_size=4, **changes)
        trainer = base(model, given, pad, eval_dataset=token_rows(), compute_metrics=judge)
        trainer.evaluate()
        found.append(judge.seen)
    return found[0], found[1]


def test_include_for_metrics_gives_inputs_and_losses_as_in_transformers(tmp_path: Path) -> None:
    own, peer = both(tmp_path, include_for_metrics=["inputs", "loss"])
    np.testing.assert_array_equal(own.inputs, peer.inputs)
    np.testing.assert_allclose(own.losses, peer.losses[: len(own.losses)], **NEAR)
    assert len(own.losses) == len(token_rows())
    assert len(own.elements) == 4
    np.testing.assert_allclose(own.predictions, peer.predictions, **NEAR)


@pytest.mark.parametrize(("wanted", "absent"), [("inputs", "losses"), ("loss", "inputs")])
def test_include_for_metrics_gives_only_what_it_names(tmp_path: Path, wanted: str, absent: str) -> None:
    own, peer = both(tmp_path, include_for_metrics=[wanted])
    assert getattr(own, absent) is None
    assert getattr(peer, absent) is None
    assert len(own.elements) == len(peer.elements) == 3


def test_include_for_metrics_gives_the_inputs_of_packed_rows(tmp_path: Path) -> None:
    """Question answering rows run without padding: the inputs are padded rows all the same."""
    rows, judge = span_rows(7), Judge()
    args = ours(tmp_path, per_device_eval_batch_size=3, include_for_metrics=["inputs"], padding_in_loss="sampled")
    engine.Trainer(tiny_bert(), args, eval_dataset=rows, compute_metrics=judge).evaluate()
    assert len(judge.seen.inputs) == len(rows)
    for found, row in zip(judge.seen.inputs, rows, strict=True):
        assert found[: len(row["input_ids"])].tolist() == row["input_ids"]
        assert set(found[len(row["input_ids"]) :].tolist()) <= {0, -100}


def test_include_for_metrics_without_such_a_column_is_refused(tmp_path: Path) -> None:
    trainer = toy_trainer(tmp_path, compute_metrics=Judge(), include_for_metrics=["inputs"])
    with pytest.raises(ConfigError, match=r"(?s)inputs that the batches do not have.*main_input_name"):
        trainer.evaluate()


def test_include_for_metrics_follows_main_input_name(tmp_path: Path) -> None:
    model, judge = Toy(), Judge()
    model.main_input_name = "x"
    trainer = toy_trainer(tmp_path, model=model, compute_metrics=judge, include_for_metrics=["inputs"])
    trainer.evaluate()
    assert judge.seen.inputs.shape == (6, 4)


def test_include_inputs_for_metrics_is_the_older_name(tmp_path: Path) -> None:
    assert ours(tmp_path, include_inputs_for_metrics=True).include_for_metrics == ("inputs",)
    assert ours(tmp_path, include_inputs_for_metrics=False).include_for_metrics == ()


def test_batches_that_are_not_joined_come_as_in_transformers(tmp_path: Path) -> None:
    own, peer = both(tmp_path, eval_do_concat_batches=False, include_for_metrics=["inputs", "loss"])
    for name in ("predictions", "label_ids", "inputs"):
        ours_now, theirs_now = getattr(own, name), getattr(peer, name)
        assert isinstance(ours_now, list)
        assert len(ours_now) == len(theirs_now) == 4
        for one, other in zip(ours_now, theirs_now, strict=True):
            np.testing.assert_allclose(one, other, **NEAR)


def test_batches_that_are_not_joined_come_out_of_predict_too(tmp_path: Path) -> None:
    trainer = toy_trainer(tmp_path, per_device_eval_batch_size=5, eval_do_concat_batches=False)
    found = trainer.predict(toy_rows(7))
    assert [len(part) for part in found.predictions] == [len(part) for part in found.label_ids] == [5, 2]
