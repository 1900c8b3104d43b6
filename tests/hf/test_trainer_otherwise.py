"""`whet.Trainer` resumed otherwise than its checkpoint was written: other ranks, other settings, by nobody's wish."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_runs import arguments, classifier, forked, output, pad, rows, same

import whet

_PLAIN: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _trainer(folder: Path, *callbacks: Any, **changes: Any) -> whet.Trainer:
    model, args = classifier(**_PLAIN), arguments(folder, **changes)
    return whet.Trainer(model, args, pad, rows(24), rows(8), callbacks=[*callbacks])


def test_another_number_of_ranks_resumes_with_the_same_rows_or_not_at_all(tmp_path: Path) -> None:
    """A step has eight rows, and an epoch three steps."""
    whole, usual = tmp_path / "whole", {"max_steps": 4, "save_steps": 2}
    assert forked(lambda _: _trainer(whole, **usual).train(), tmp_path / "w", 2) == [0, 0], output(tmp_path / "w")
    asked = str(whole / "checkpoint-2")
    with pytest.raises(whet.ConfigError, match="ranks: 2 then, 1 now; rows of a step: 8 then, 4 now") as refused:
        _trainer(tmp_path / "a", **usual).train(asked)
    assert "so that a step has 8 rows" in str(refused.value)
    by_length = {"train_sampling_strategy": "group_by_length", "per_device_train_batch_size": 8}
    with pytest.raises(whet.ConfigError, match=r"(?s)group_by_length orders rows by batches.*as many ranks as then: 2"):
        _trainer(tmp_path / "b", **usual, **by_length).train(asked)
    wanted = [entry["loss"] for entry in _log(whole / "checkpoint-4") if "loss" in entry]
    assert len(wanted) == 4
    for n_micro in (1, 2):
        sizes = {"per_device_train_batch_size": 8 // n_micro, "gradient_accumulation_steps": n_micro}
        trainer = _trainer(tmp_path / str(n_micro), **usual, **sizes)
        trainer.train(asked)
        found = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert found == pytest.approx(wanted, rel=1e-4)


def _log(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "trainer_state.json").read_text("utf-8"))["log_history"]


def test_changed_settings_are_named_with_those_that_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    usual = {"lr_scheduler_type": "constant", "save_steps": 2}
    _trainer(tmp_path, max_steps=2, **usual).train()
    caplog.clear()
    _trainer(tmp_path / "same", max_steps=3, **usual).train(str(tmp_path / "checkpoint-2"))
    assert "another setting" not in caplog.text
    changed = _trainer(
        tmp_path, max_steps=4, **usual, learning_rate=5e-4, weight_decay=0.1, seed=7, gradient_accumulation_steps=2
    )
    changed.train(resume_from_checkpoint=True)
    assert "learning_rate: 0.001 in the checkpoint -> 0.0005 now; the checkpoint's stays" in caplog.text
    assert "weight_decay: 0.0 in the checkpoint -> 0.1 now; the checkpoint's stays" in caplog.text
    assert "seed: 42 in the checkpoint -> 7 now; that of now counts" in caplog.text
    assert "rows_per_step: 4 in the checkpoint -> 8 now" in caplog.text
    assert caplog.text.count("another setting") == 4
    assert {entry["learning_rate"] for entry in changed.state.log_history if "loss" in entry} == {1e-3}
    assert {group["weight_decay"] for group in changed.optimizer.param_groups} == {0.0}


def test_search_for_hyperparameters_in_a_pod_begins_each_trial(tmp_path: Path) -> None:
    """A pod that takes the place of another one finds the folders of its trials."""
    pytest.importorskip("optuna")

    def search(_rank: int) -> None:
        os.environ["WHET_RESUME"] = "auto"
        args = arguments(tmp_path / "out", max_steps=2, save_steps=2, load_best_model_at_end=False)
        data: dict[str, Any] = {"data_collator": pad, "train_dataset": rows(), "eval_dataset": rows(8)}
        trainer = whet.Trainer(args=args, model_init=lambda: classifier(**_PLAIN), **data)
        trainer.add_callback(Began(tmp_path / "began"))
        space = iter([1e-3, 5e-4])
        trainer.hyperparameter_search(
            lambda trial: {"learning_rate": trial.suggest_categorical("learning_rate", [next(space)])},
            backend="optuna", n_trials=1,
        )  # fmt: skip

    for number in range(2):
        assert forked(search, tmp_path / f"s{number}") == [0], output(tmp_path / f"s{number}")
    assert (tmp_path / "began").read_text() == "0 0 "


class Began(transformers.TrainerCallback):
    """Adds the step that a training begins after to a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def on_train_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        with self._file.open("a") as file:
            file.write(f"{state.global_step} ")


@pytest.mark.parametrize(
    "there",
    [
        "transformers", "models alone", "a complete one, then models alone",
        "a complete one, a damaged one, then models alone", "damaged",
    ],
)  # fmt: skip
def test_pod_resumes_unasked_from_what_it_can_resume_from(
    there: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    if there == "transformers":
        given = transformers.TrainingArguments(
            str(out), max_steps=2, save_steps=2, use_cpu=True, report_to="none", disable_tqdm=True
        )
        transformers.Trainer(classifier(), given, pad, rows()).train()
    else:
        _trainer(out, max_steps=2, save_steps=2, save_only_model=there == "models alone").train()
        if "a damaged one" in there:
            _trainer(out, max_steps=3, save_steps=1).train(resume_from_checkpoint=True)
        if there.startswith("a complete"):
            _trainer(out, max_steps=4, save_steps=1, save_only_model=True).train(resume_from_checkpoint=True)
        if "a damaged one" in there:
            file = out / "checkpoint-3" / "optimizer.safetensors"
            file.write_bytes(file.read_bytes()[:-1] + b"\x01")
        elif there == "damaged":
            (out / "checkpoint-2" / "optimizer.safetensors").write_bytes(b"")
    monkeypatch.setenv("WHET_RESUME", "auto")
    monkeypatch.setattr("whet.store.find._n_begun", Counter())  # as in a new process
    again = _trainer(out, Began(tmp_path / "began"), max_steps=6)
    if there == "damaged":
        with pytest.raises(whet.WhetError, match="none of the 1 checkpoints"):
            again.train()
        return
    caplog.clear()
    assert again.train().global_step == 6
    assert "no run can resume from" in caplog.text
    assert (tmp_path / "began").read_text() == ("2 " if there.startswith("a complete") else "0 ")
    if there.startswith("a complete"):
        assert ("is damaged and was passed over" in caplog.text) == ("a damaged one" in there)
        runs = {json.loads((out / f"checkpoint-{n}" / "MANIFEST.json").read_text("utf-8"))["run"] for n in (2, 4, 6)}
        assert len(runs) == 1, "it is the same run"
        assert not [*out.glob("abandoned-*")]


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_adapter_is_not_saved_over_the_model_that_it_needs(tmp_path: Path) -> None:
    """Neither after its training nor by hand; its base stays."""
    peft = pytest.importorskip("peft")
    base = tmp_path / "base"
    classifier().save_pretrained(base)
    before = {path.name: path.read_bytes() for path in base.iterdir()}
    model = transformers.AutoModelForSequenceClassification.from_pretrained(base)
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["query"], r=2, task_type="SEQ_CLS"))
    trainer = whet.Trainer(model, arguments(base, max_steps=1), pad, rows())
    for act in (trainer.train, trainer.save_model):
        with pytest.raises(whet.ConfigError, match=r"(?s)would replace the model.*another output_dir"):
            act()
    assert {path.name: path.read_bytes() for path in base.iterdir()} == before
    elsewhere = whet.Trainer(model, arguments(tmp_path / "adapter", max_steps=1), pad, rows())
    elsewhere.train()
    elsewhere.save_model()
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()


def test_arguments_of_transformers_have_whets_guards(tmp_path: Path) -> None:
    class Spoiled(whet.Trainer):
        def compute_loss(self, *given: Any, **named: Any) -> Any:
            return super().compute_loss(*given, **named) * float("nan")

    usual: dict[str, Any] = {"max_steps": 4, "use_cpu": True, "report_to": "none", "disable_tqdm": True}
    model = classifier()
    before = {name: one.clone() for name, one in model.state_dict().items()}
    args = transformers.TrainingArguments(str(tmp_path), save_strategy="no", **usual)
    with pytest.raises(whet.WhetError, match="3 steps in a row were not finite"):
        Spoiled(model, args, pad, rows()).train()
    assert same(before, dict(model.state_dict()))
    trainer = whet.Trainer(classifier(), args, pad, rows())
    trainer.train()
    assert isinstance(trainer.optimizer.optimizer, torch.optim.AdamW)
    assert trainer._memory is not None
