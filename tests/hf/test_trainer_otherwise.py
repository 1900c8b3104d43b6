"""`whet.Trainer` resumed otherwise than its checkpoint was written: other ranks, other settings, by nobody's wish."""

from __future__ import annotations

import json
import os
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


@pytest.mark.parametrize("there", ["transformers", "models alone", "a complete one, then models alone", "damaged"])
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
        if there == "a complete one, then models alone":
            _trainer(out, max_steps=3, save_steps=1, save_only_model=True).train(resume_from_checkpoint=True)
        elif there == "damaged":
            (out / "checkpoint-2" / "optimizer.safetensors").write_bytes(b"")
    monkeypatch.setenv("WHET_RESUME", "auto")
    monkeypatch.setattr("whet.store.find._begun", set())  # as in a new process
    again = _trainer(out, Began(tmp_path / "began"), max_steps=4)
    if there == "damaged":
        with pytest.raises(whet.WhetError, match="none of the 1 checkpoints"):
            again.train()
        return
    caplog.clear()
    assert again.train().global_step == 4
    assert "no run can resume from" in caplog.text
    assert (tmp_path / "began").read_text() == ("2 " if there.startswith("a complete") else "0 ")


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
