"""The number format of `whet.Trainer`: what is asked for now counts, whatever has prepared the model before."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
from accelerate.state import AcceleratorState
from hf_runs import arguments, classifier, pad, rows, same
from torch import Tensor
from transformers import AutoModelForQuestionAnswering, BertModel, BertPreTrainedModel

import whet
from tiny import tiny_config
from whet.precision import compare
from whet.store import manifest

_PLAIN: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_SHORT: dict[str, Any] = {"max_steps": 2, "save_strategy": "no", "use_cpu": True}


def trainer(folder: Path, model: Any = None, **changes: Any) -> whet.Trainer:
    given = classifier(**_PLAIN) if model is None else model
    return whet.Trainer(given, arguments(folder, **(_SHORT | changes)), pad, rows(), rows(8))


def weights_of(model: Any) -> dict[str, Tensor]:
    return {name: one.clone() for name, one in model.state_dict().items()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Tensor]]:
    """The weights of a fresh model after a short training in each format."""
    found = {}
    for precision in ("fp32", "bf16"):
        one = trainer(tmp_path_factory.mktemp(precision), precision=precision)
        one.train()
        found[precision] = weights_of(one.model)
    assert not same(found["fp32"], found["bf16"])
    return found


def _prepare(by: str, model: Any, precision: str, folder: Path) -> None:
    """Train or prepare a model in this format, and give it back the weights that it had."""
    before = weights_of(model)
    if by == "whet":
        trainer(folder, model, precision=precision).train()
    elif by == "whet's evaluation":
        trainer(folder, model, precision=precision).evaluate()
    elif by == "transformers":
        args = transformers.TrainingArguments(
            str(folder), max_steps=1, save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True,
            bf16=precision == "bf16",
        )  # fmt: skip
        data: Any = rows()
        transformers.Trainer(model, args, pad, data).train()
    else:
        AcceleratorState._reset_state()
        accelerate.Accelerator(cpu=True, mixed_precision="bf16" if precision == "bf16" else "no").prepare(model)
    model.load_state_dict(before)
    model.zero_grad()


@pytest.mark.parametrize(("first", "then"), [("fp32", "bf16"), ("bf16", "fp32")])
@pytest.mark.parametrize("by", ["whet", "whet's evaluation", "transformers", "accelerate"])
def test_a_model_that_was_prepared_before_trains_in_the_format_of_now(
    by: str, first: str, then: str, tmp_path: Path, trained: dict[str, dict[str, Tensor]]
) -> None:
    model = classifier(**_PLAIN)
    _prepare(by, model, first, tmp_path / "first")
    trainer(tmp_path / "then", model, precision=then).train()
    assert same(weights_of(model), trained[then])


def test_each_trainer_of_a_model_evaluates_in_its_own_format(tmp_path: Path) -> None:
    model = classifier(**_PLAIN)
    exact, half = (trainer(tmp_path / one, model, precision=one) for one in ("fp32", "bf16"))
    half.train()
    found = [one.evaluate()["eval_loss"] for one in (half, exact, half, exact)]
    assert found[0] == found[2] != found[1] == found[3]
    assert exact.predict(rows(8)).predictions.dtype == half.predict(rows(8)).predictions.dtype  # type: ignore[union-attr]


@pytest.mark.parametrize(("made", "then"), [("fp32", "bf16"), ("bf16", "fp32"), ("auto", "bf16")])
def test_precision_that_is_set_later_counts(
    made: str, then: str, tmp_path: Path, trained: dict[str, dict[str, Tensor]]
) -> None:
    one = trainer(tmp_path, precision=made)
    one.args.precision = then
    one.train()
    assert same(weights_of(one.model), trained[then])


@pytest.mark.parametrize(("then", "why"), [("int8", "no such value"), ("fp16", "cannot train in fp16")])
def test_precision_that_is_set_later_is_checked(then: str, why: str, tmp_path: Path) -> None:
    one = trainer(tmp_path)
    one.args.precision = then
    with pytest.raises(whet.ConfigError, match=why):
        one.train()


def test_fp32_does_not_give_way_to_the_variable_of_accelerate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: dict[str, dict[str, Tensor]]
) -> None:
    """auto does: `accelerate launch --mixed_precision bf16` sets it."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    for precision, found in (("fp32", "fp32"), ("auto", "bf16")):
        one = trainer(tmp_path / precision, precision=precision)
        one.train()
        assert same(weights_of(one.model), trained[found])


def test_step_of_ones_own_computes_in_the_format_that_auto_has_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It calls the model without `compute_loss`, and gets float32 as from accelerate's bf16."""
    monkeypatch.setattr(compare, "LEAST_FLOP", 0.0)
    logits = []

    class Own(whet.Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            out = model(**inputs)
            logits.append(out.logits.detach())
            out.loss.backward()
            return out.loss.detach()

    for margin in (0.0, float("inf")):  # bf16 is fast enough, or not
        monkeypatch.setattr(compare, "MARGIN", margin)
        args = arguments(tmp_path, **(_SHORT | {"precision": "auto", "max_steps": 1}))
        Own(classifier(**_PLAIN), args, pad, rows()).train()
    half, exact = logits
    assert half.dtype == exact.dtype == torch.float32
    assert torch.equal(half, half.bfloat16().float())
    assert not torch.equal(exact, exact.bfloat16().float())


def test_checkpoint_says_what_its_training_ran_in(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A resume with auto is then the same training, and one in another format is logged."""
    saving = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = trainer(tmp_path / "whole", precision="bf16", **saving)
    whole.train()
    folder = tmp_path / "whole" / "checkpoint-2"
    assert (manifest.facts_of(folder) or {})["precision"] == "bf16"
    caplog.clear()
    resumed = trainer(tmp_path / "auto", precision="auto", **saving)
    resumed.train(str(folder))
    assert same(weights_of(resumed.model), weights_of(whole.model))
    assert (manifest.facts_of(tmp_path / "auto" / "checkpoint-4") or {})["precision"] == "bf16"
    assert "another setting" not in caplog.text
    trainer(tmp_path / "other", precision="fp32", **saving).train(str(folder))
    assert "precision: bf16 in the checkpoint -> fp32 now; that of now counts" in caplog.text


@pytest.mark.parametrize("asked", ["auto", "by the trial"])
def test_trials_of_a_search_have_the_format_that_is_asked_for(
    asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With auto all of them are timed: bf16 is always fast enough here."""
    pytest.importorskip("optuna")
    monkeypatch.setattr(compare, "LEAST_FLOP", 0.0)
    monkeypatch.setattr(compare, "MARGIN", 0.0)
    saving = {"save_strategy": "steps", "save_steps": 2, "precision": "auto"}
    args = arguments(tmp_path, **(_SHORT | saving))
    data: dict[str, Any] = {"data_collator": pad, "train_dataset": rows(), "eval_dataset": rows(8)}
    one = whet.Trainer(args=args, model_init=lambda: classifier(**_PLAIN), **data)
    formats = ["bf16", "bf16"] if asked == "auto" else ["fp32", "bf16"]

    def space(trial: Any) -> dict[str, Any]:
        chosen = {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-3)}
        return chosen if asked == "auto" else chosen | {"precision": formats[trial.number]}

    with caplog.at_level(logging.INFO, logger="whet"):
        one.hyperparameter_search(space, backend="optuna", n_trials=2)
    found = [(manifest.facts_of(tmp_path / f"run-{n}" / "checkpoint-2") or {})["precision"] for n in range(2)]
    assert found == formats
    assert "NoneType" not in caplog.text
    assert caplog.text.count("times the speed of fp32") == (2 if asked == "auto" else 0)


def _questions(given: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    marks = {name: torch.tensor([1] * len(given)) for name in ("start_positions", "end_positions")}
    return pad(given) | marks


def test_each_trainer_of_a_model_has_its_own_padding(tmp_path: Path) -> None:
    model = AutoModelForQuestionAnswering.from_config(tiny_config("bert"))
    data: dict[str, Any] = {"data_collator": _questions, "train_dataset": rows(labelled=False)}

    def made(padding: str) -> whet.Trainer:
        return whet.Trainer(model, arguments(tmp_path / padding, **_SHORT, padding_in_loss=padding), **data)

    def padding() -> str:
        found = whet.changes(model)
        assert found is not None
        return found.padding

    every, none = made("all"), made("none")
    assert padding() == "none"
    every.train()
    assert padding() == "all"
    none.train()
    assert padding() == "none"


def test_model_that_its_user_has_optimized_stays_so_and_the_log_says_what_does_not_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = whet.optimize(AutoModelForQuestionAnswering.from_config(tiny_config("bert")), padding="none")
    for padding in ("auto", "none"):
        whet.Trainer(model, arguments(tmp_path, padding_in_loss=padding))
    assert "settings count" not in caplog.text
    whet.Trainer(model, arguments(tmp_path, padding_in_loss="all"))
    assert "is asked for padding='all', and the model stays as whet.optimize has changed it before" in caplog.text
    assert "padding='none'" in caplog.text
    found = whet.changes(model)
    assert found is not None
    assert found.padding == "none"
    whet.restore(model)
    whet.Trainer(model, arguments(tmp_path, padding_in_loss="all"))
    found = whet.changes(model)
    assert found is not None
    assert found.padding == "all"


class _Averaging(BertPreTrainedModel):
    """A head of a user's own that averages all places of a row, padding too."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.bert = BertModel(config)
        self.score = torch.nn.Linear(config.hidden_size, 2)
        self.post_init()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.score(self.bert(input_ids, attention_mask).last_hidden_state.mean(1))
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_model_that_an_accelerator_prepared_has_all_padding_for_an_unknown_head(tmp_path: Path) -> None:
    model = _Averaging(tiny_config("bert"))
    AcceleratorState._reset_state()
    whet.Accelerator(cpu=True).prepare(model)
    for folder in ("first", "second"):
        trainer(tmp_path / folder, model).train()
        found = whet.changes(model)
        assert found is not None
        assert found.padding == "all"


class _Formats(transformers.TrainerCallback):
    """Notes the format by which accelerate clips, in each step."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_pre_optimizer_step(self, *_: Any, **named: Any) -> None:
        self.seen.append(AcceleratorState().mixed_precision)


@pytest.mark.parametrize("formats", [("bf16", "fp32"), ("fp32", "bf16")])
def test_accelerates_state_names_the_format_of_the_trainer_that_trains(
    formats: tuple[str, str], tmp_path: Path
) -> None:
    """accelerate unscales the gradients of fp16 on a GPU by what its state names, which the last Trainer has set."""
    names, seen = {"bf16": "bf16", "fp32": "no"}, {}
    trainers = {one: trainer(tmp_path / one, precision=one) for one in formats}
    for one in formats:
        trainers[one].add_callback(noted := _Formats())
        trainers[one].train()
        seen[one] = set(noted.seen)
    assert seen == {one: {names[one]} for one in formats}
    assert AcceleratorState().mixed_precision == names[formats[1]]
