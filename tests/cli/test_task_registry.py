"""Tasks plug in by their folder: the registry finds them, and every command that reads it knows them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from whet import tasks
from whet.cli.commands import COMMANDS, RANKED, RESUMABLE, STOPPABLE, TRAINING
from whet.config.arguments import TrainingArguments
from whet.jobs.task import Task
from whet.models.loading.heads import CAUSAL_LM


def test_every_listed_command_has_its_options() -> None:
    for name, entry in tasks.entries().items():
        assert tasks.command(name).name == f"whet {name}"
        assert COMMANDS[name] == entry.text


def test_every_task_has_a_training_command_of_its_name() -> None:
    names = {task.name for task in tasks.tasks()}
    assert names == {name for name, entry in tasks.entries().items() if entry.does == "trains"} == RANKED == RESUMABLE
    assert names < STOPPABLE < TRAINING


_RHYME = """
from dataclasses import dataclass

from whet.config.settings import checked
from whet.jobs.command import training_command
from whet.jobs.fields import JobFields
from whet.jobs.task import OF_TRAINING, Task
from whet.models.loading.heads import CAUSAL_LM


@checked(headings={"model_name_or_path": "Model"})
@dataclass(frozen=True, kw_only=True, slots=True)
class RhymeArguments(JobFields):
    # Which model learns which rhymes.

    meter: int = 5
    '''Feet of a line.'''


def _none(*_):
    return []


TASK = Task(name="rhyme", head=CAUSAL_LM, rules=(), read=_none, prepare=_none, predict=print, shown=OF_TRAINING,
            judged_by=("loss",))
COMMANDS = (training_command(TASK, RhymeArguments, summary="Learn to rhyme.", examples=("whet rhyme", "whet rhyme x")),)
"""


@pytest.fixture
def folder_with_a_task(tmp_path: Path) -> Path:
    """A folder that adds a task to whet.tasks, without a change of whet."""
    task = tmp_path / "more" / "rhyme"
    task.mkdir(parents=True)
    (task / "__init__.py").write_text('COMMANDS = {"rhyme": ("trains", "learn to rhyme")}\n')
    (task / "task.py").write_text(_RHYME)
    (tmp_path / "whet_and_rhyme.py").write_text(
        f"import whet.tasks\nwhet.tasks.__path__.append({str(task.parent)!r})\n"
        "from whet.cli.main import main\nmain()\n"
    )  # fmt: skip
    return tmp_path


def _said(folder: Path, *words: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(folder)}
    line = [sys.executable, "-m", "whet_and_rhyme", *words]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


@pytest.mark.true_start  # with a path of its own
def test_a_new_folder_is_a_command_everywhere(folder_with_a_task: Path) -> None:
    assert "rhyme          learn to rhyme" in _said(folder_with_a_task, "--help")
    assert "--meter" in _said(folder_with_a_task, "rhyme", "--help", "all")
    assert "next tokens" in _said(folder_with_a_task, "predict", "--help")
    assert "did you mean whet rhyme?" in _said(folder_with_a_task, "rhime")
    plan = _said(
        folder_with_a_task,
        *("k8s", "render", "job", "--image", "i", "--output_claim", "o", "--cpus", "2", "--memory", "4Gi"),
        *("--nodes", "2", "--", "rhyme", "--meter", "4", "--output_dir", "/output/x", "--model_name_or_path", "m"),
        *("--dataset_name", "d", "--do_train"),
    )
    assert "- rhyme" in plan
    assert "--meter" in plan


def test_new_weights_of_a_task_are_those_of_the_seed() -> None:
    task = Task(
        name="rhyme", head=CAUSAL_LM, rules=(), read=lambda *_: [], shown={}, judged_by=(),
        prepare=lambda *_: torch.rand(4),
    )  # fmt: skip
    first, again, other = (task.prepared(None, TrainingArguments(seed=seed), {}).tolist() for seed in (5, 5, 6))
    assert first == again != other


@pytest.mark.true_start  # with a path of its own
def test_a_new_task_refuses_options_that_it_does_not_honour(folder_with_a_task: Path) -> None:
    words = ("rhyme", "--model_name_or_path", "m", "--dataset_name", "d", "--do_train")
    said = _said(folder_with_a_task, *words, "--teacher_model", "t", "--lora_r", "4")
    assert "lora_r and teacher_model would change nothing here" in said
    assert "leave --lora_r and --teacher_model out" in said


def _model(folder: Path, recorded: str, file: str, settings: dict[str, object]) -> Path:
    """Write what `whet predict` reads of a model before it chooses the task."""
    folder.mkdir()
    (folder / file).write_text(json.dumps(settings))
    (folder / "adapter_model.safetensors").touch()
    (folder / "whet_task.json").write_text(json.dumps({"task": recorded}))
    return folder


_ADAPTER: dict[str, object] = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "m"}
_TAGGER: dict[str, object] = {"model_type": "bert", "architectures": ["BertForTokenClassification"]}


@pytest.mark.true_start  # with a path of its own
@pytest.mark.parametrize(
    ("head", "recorded", "settings", "said"),
    [
        ("CAUSAL_LM", "rhyme", _ADAPTER, "PredictArguments("),
        pytest.param(
            "CAUSAL_LM", "lm", _ADAPTER, "the model has no head that whet predicts with", marks=pytest.mark.night
        ),
        pytest.param("TOKEN_CLASSIFICATION", "rhyme", _TAGGER, "PredictArguments(", marks=pytest.mark.night),
        pytest.param("TOKEN_CLASSIFICATION", "tag", _TAGGER, None, marks=pytest.mark.night),
    ],
)
def test_predict_takes_the_task_that_trained_the_model_not_the_first_with_its_head(
    folder_with_a_task: Path, head: str, recorded: str, settings: dict[str, object], said: str | None
) -> None:
    file = folder_with_a_task / "texts.txt"
    file.write_text("moon June\n")
    (folder_with_a_task / "more" / "rhyme" / "task.py").write_text(_RHYME.replace("CAUSAL_LM", head))
    name = "adapter_config.json" if settings is _ADAPTER else "config.json"
    model = _model(folder_with_a_task / "model", recorded, name, settings)
    answer = _said(folder_with_a_task, "predict", str(model), "--file", str(file))
    assert "PredictArguments(" not in answer if said is None else said in answer
