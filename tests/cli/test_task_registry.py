"""Tasks plug in by their folder: the registry finds them, and every command that reads it knows them."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from whet import ConfigError, tasks
from whet.cli.commands import COMMANDS, RANKED, RESUMABLE, STOPPABLE, TRAINING
from whet.config.arguments import TrainingArguments
from whet.jobs.fields import JobFields
from whet.jobs.task import HONOURED_BY_CALLS, Task
from whet.models.loading.heads import CAUSAL_LM
from whet.tasks.tag.arguments import TagArguments


def test_every_listed_command_has_its_options() -> None:
    for name, entry in tasks.entries().items():
        assert tasks.command(name).name == f"whet {name}"
        assert COMMANDS[name] == entry.text


def test_every_task_has_a_training_command_of_its_name() -> None:
    names = {task.name for task in tasks.tasks()}
    assert names == {name for name, entry in tasks.entries().items() if entry.does == "trains"} == RANKED
    assert RANKED | {"tune"} == RESUMABLE
    assert names < STOPPABLE < TRAINING


@pytest.mark.true_start  # with a path of its own
def test_two_tasks_with_one_command_are_a_mistake_of_their_author(folder_with_a_task: Path) -> None:
    """A folder that was copied would take the place of the first one."""
    (folder_with_a_task / "more" / "rhyme" / "__init__.py").write_text('COMMANDS = {"tag": ("trains", "tag rhymes")}')
    assert "two tasks have the command tag: rhyme and tag" in _said(folder_with_a_task, "--help")


_NOT_READ = {
    "metric_name",  # the command makes metric_for_best_model of it
    "precompute_ref_log_probs",  # true and false give the same run, as its text says
}


@pytest.mark.parametrize("task", [*tasks.tasks()], ids=lambda task: task.name)
def test_the_code_of_a_task_reads_each_option_of_its_own(task: Task) -> None:
    """An option that nobody reads would be accepted, and change nothing."""
    settings = tasks.command(task.name).parts[0]
    own = {one.name for one in fields(settings)} - {one.name for one in fields(JobFields)}
    folder = Path(tasks.__file__).parent / tasks.entries()[task.name].folder
    trees = [ast.parse(path.read_text("utf-8")) for path in folder.glob("*.py") if path.name != "arguments.py"]
    read = {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert own - read <= _NOT_READ


@pytest.mark.parametrize("task", [task for task in tasks.tasks() if task.predict], ids=lambda task: task.name)
def test_the_code_of_a_task_reads_each_option_of_predict_that_it_takes(task: Task) -> None:
    """An option that nobody reads would change nothing, and is not refused."""
    folder = Path(tasks.__file__).parent / tasks.entries()[task.name].folder
    trees = [ast.parse(path.read_text("utf-8")) for path in folder.glob("*.py") if path.name != "task.py"]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    given = {node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "asked"}
    settings = {
        ast.unparse(node.args[2]).strip("'")
        for node in nodes
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "outputs.setting_of"
    }
    assert {*task.predict_takes} - given - settings == set()


_RHYME = """
from dataclasses import dataclass

from whet.config.settings import checked
from whet.jobs.command import training_command
from whet.jobs.fields import JobFields
from whet.jobs.task import Task
from whet.models.loading.heads import CAUSAL_LM


@checked()
@dataclass(frozen=True, kw_only=True, slots=True)
class RhymeArguments(JobFields):
    # Which model learns which rhymes.

    meter: int = 5
    '''Feet of a line.'''


def _none(*_):
    return []


TASK = Task(name="rhyme", head=CAUSAL_LM, read=_none, prepare=_none, predict=print, metrics=lambda _: ("loss",),
            shown={}, judged_by=("loss",))
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


def _task(*, prepare: Any = lambda *_: SimpleNamespace(reading={}), **changes: Any) -> Task:
    """A task that is at hand without a folder."""
    usual: dict[str, Any] = {"read": lambda *_: [], "metrics": lambda _: ("loss",), "shown": {}, "judged_by": ("loss",)}
    return Task(name="rhyme", head=CAUSAL_LM, prepare=prepare, **(usual | changes))


def _asked(**settings: Any) -> TagArguments:
    return TagArguments(model_name_or_path="m", train_file="rhymes.txt", **settings)


def test_new_weights_of_a_task_are_those_of_the_seed() -> None:
    task = _task(prepare=lambda *_: SimpleNamespace(reading={}, weights=torch.rand(4)))
    begun = [task.begin(_asked(), TrainingArguments(seed=seed), {}) for seed in (5, 5, 6)]
    first, again, other = (one.weights.tolist() for one in begun)
    assert first == again != other


def test_a_trained_model_records_its_task() -> None:
    task = _task(prepare=lambda *_: SimpleNamespace(reading={"meter": 5}))
    assert task.begin(_asked(), TrainingArguments(), {}).reading == {"task": "rhyme", "meter": 5}


@pytest.mark.parametrize(
    "asked",
    [{"lora_r": 4}, {"moe_experts": 4}, {"teacher_model": "t"}, {"resize_token_embeddings": True},
     {"preprocessing_num_workers": 2}, {"overwrite_cache": True}, {"model_revision": "old"}],
    ids=lambda asked: next(iter(asked)),
)  # fmt: skip
def test_a_task_that_forgets_what_it_says_to_honour_ends_before_the_training(asked: dict[str, Any]) -> None:
    """The author has copied `takes` of another task, and not the calls of its job.py."""
    (name,) = asked
    args, read = TrainingArguments(do_train=True), lambda job, *_: SimpleNamespace(reading={name: getattr(job, name)})
    assert _task(takes=HONOURED_BY_CALLS).problems(_asked(**asked), args) == []
    with pytest.raises(ConfigError, match=f"{name} would change nothing here"):
        _task(takes=HONOURED_BY_CALLS).begin(_asked(**asked), args, {})
    honours = _task(takes=HONOURED_BY_CALLS, prepare=read)
    assert honours.begin(_asked(**asked), args, {}).reading == {"task": "rhyme"} | asked


def test_a_secret_that_a_task_forgets_stays_one() -> None:
    with pytest.raises(ConfigError, match="token would change nothing here") as caught:
        _task().begin(_asked(token="hf_secret"), TrainingArguments(), {})
    assert "hf_secret" not in str(caught.value)


def test_a_reader_that_forgets_a_limit_or_bad_rows_ends_the_run() -> None:
    asked = _asked(skip_bad=True, max_train_samples=5, max_eval_samples=6)
    task = _task(read=lambda job, split: job.train_file)
    with pytest.raises(ConfigError, match="skip_bad and max_train_samples would change nothing here"):
        task.examples(asked, "train")
    assert _task(read=lambda job, _: (job.train_file, job.skip_bad, job.max_train_samples)).examples(
        asked, "train"
    ) == ("rhymes.txt", True, 5)


def test_a_task_that_is_judged_by_what_it_does_not_compute_is_a_mistake_of_its_author() -> None:
    with pytest.raises(AssertionError, match="whet rhyme is judged by none of its metrics"):
        _task(judged_by=("perplexity",)).problems(_asked(), TrainingArguments(do_train=True))


@pytest.mark.true_start  # with a path of its own
def test_a_new_task_refuses_options_that_it_does_not_honour(folder_with_a_task: Path) -> None:
    words = ("rhyme", "--model_name_or_path", "m", "--dataset_name", "d", "--do_train")
    said = _said(folder_with_a_task, *words, "--teacher_model", "t", "--lora_r", "4", "--span_loss", "compound")
    assert "lora_r and teacher_model and span_loss would change nothing here" in said
    assert "leave --lora_r and --teacher_model and --span_loss out" in said
    said = _said(folder_with_a_task, *words, "--preprocessing_num_workers", "2", "--label_smoothing_factor", "0.1")
    assert "preprocessing_num_workers and label_smoothing_factor would change nothing here" in said


@pytest.mark.true_start  # with a path of its own
def test_a_new_task_keeps_the_rules_of_all_tasks(folder_with_a_task: Path) -> None:
    said = _said(folder_with_a_task, "rhyme", "--seeds", "0", "--use_fast_tokenizer", "false", "--lora_alpha", "8")
    for what in (
        "no model is named", "no data is named", "seeds is below 1", "there is nothing to do",
        "whet does not honour --use_fast_tokenizer", "lora_alpha would change nothing without lora_r",
    ):  # fmt: skip
        assert what in said, said
    words = ("rhyme", "--model_name_or_path", "m", "--dataset_name", "d", "--do_train")
    said = _said(folder_with_a_task, *words, "--metric_for_best_model", "rhymes")
    assert "metric_for_best_model names no metric" in said


def _model(folder: Path, recorded: str, file: str, settings: dict[str, object]) -> Path:
    """Write what `whet predict` reads of a model before it chooses the task."""
    folder.mkdir()
    (folder / file).write_text(json.dumps(settings))
    (folder / "adapter_model.safetensors").touch()
    (folder / "whet_task.json").write_text(json.dumps({"task": recorded}))
    return folder


_ADAPTER: dict[str, object] = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "m"}
_TAGGER: dict[str, object] = {"model_type": "bert", "architectures": ["BertForTokenClassification"]}


@pytest.mark.slow
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
