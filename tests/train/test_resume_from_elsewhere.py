"""Folders that are named as checkpoints and are none: the message says what they are, and its fix works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import transformers

from engine import Trainer, TrainingArguments
from tiny import tiny_model
from whet.errors import StorageError
from whet.store import find

_ROWS = [{"input_ids": [2, 5 + i, 6, 7, 3], "start_positions": 1, "end_positions": 2} for i in range(4)]


def _settings(folder: Path) -> dict[str, object]:
    return {
        "output_dir": str(folder), "use_cpu": True, "max_steps": 2, "save_steps": 1, "save_strategy": "steps",
        "per_device_train_batch_size": 2, "report_to": "none",
    }  # fmt: skip


def _whet(folder: Path, resume: str) -> None:
    args = TrainingArguments(**_settings(folder), log_level="error")
    Trainer(model=tiny_model("bert"), args=args, train_dataset=_ROWS).train(resume_from_checkpoint=resume)


@pytest.fixture(scope="module")
def of_transformers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of transformers' Trainer after two steps, each with a checkpoint."""
    folder = tmp_path_factory.mktemp("transformers")
    args = transformers.TrainingArguments(**_settings(folder), disable_tqdm=True)
    transformers.Trainer(model=tiny_model("bert"), args=args, train_dataset=_ROWS).train()
    return folder


def _refused(folder: Path, resume: str) -> str:
    with pytest.raises(StorageError) as caught:
        _whet(folder, resume)
    return str(caught.value)


@pytest.mark.parametrize("resume", ["checkpoint-2", "auto"])
def test_a_checkpoint_of_transformers_is_refused_with_its_weights_as_the_way_on(
    of_transformers: Path, tmp_path: Path, resume: str
) -> None:
    """A run on "auto" would start at step 0 without a word, next to two checkpoints."""
    named = of_transformers / "checkpoint-2"
    said = _refused(of_transformers, resume if resume == "auto" else str(named))
    assert f"{named} is a checkpoint of transformers' Trainer" in said
    found = re.search(r"--model_name_or_path (\S+),", said)
    assert found is not None
    model = transformers.AutoModelForQuestionAnswering.from_pretrained(found[1])
    args = TrainingArguments(**_settings(tmp_path), log_level="error")
    Trainer(model=model, args=args, train_dataset=_ROWS).train()


@pytest.mark.parametrize("asked", ["", "checkpoint-9", "checkpoint-2/config.json"])
def test_the_fix_names_a_checkpoint_that_resumes(tmp_path: Path, asked: str) -> None:
    args = TrainingArguments(**_settings(tmp_path), log_level="error")
    Trainer(model=tiny_model("bert"), args=args, train_dataset=_ROWS).train()
    if asked.endswith(".json"):
        (tmp_path / "checkpoint-2" / "config.json").write_text("{}", "utf-8")
        asked = "checkpoint-2"
    named = re.search(r"--resume_from_checkpoint ([^\s,]+)", _refused(tmp_path, str(tmp_path / asked)))
    assert named is not None
    _whet(tmp_path, named[1])
    assert find.newest(tmp_path) is not None


def test_a_model_folder_is_refused_with_its_weights_as_the_way_on(tmp_path: Path) -> None:
    tiny_model("bert").save_pretrained(tmp_path / "model")
    assert f"--model_name_or_path {tmp_path / 'model'}" in _refused(tmp_path / "out", str(tmp_path / "model"))
