"""The steps of a trial: what they leave out of a training, because nobody reads their results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_auto_runs import asked

from text_tasks import SAILING, topic_rows, write_csv
from whet.cli.commands import command
from whet.config.command_line import load as load_settings
from whet.engine.loop import TrainingLoop
from whet.jobs.task import Task
from whet.tasks.classify.task import TASK as CLASSIFY
from whet.tasks.lm.task import TASK as LM


def loops(task: Task, *given: Any, **options: Any) -> tuple[TrainingLoop, TrainingLoop]:
    """A trial and a training of these settings, each before its first step."""
    job, args = load_settings(command(task.name), asked(task.name, *given, **options)[1:]).settings
    engines = [task.begin(job, args, {"train": task.examples(job, "train")}).engine for _ in range(2)]
    trial, training = engines[0].new_loop(is_trial=True), engines[1].new_loop()
    for loop in (trial, training):
        loop.start(None)
    return trial, training


def test_a_trial_of_preferences_computes_no_reference(decoder: Path, tmp_path: Path) -> None:
    pairs = [{"prompt": text, "chosen": f" {text}", "rejected": " sweet"} for text in SAILING * 3]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in pairs))
    options = {"train_file": tmp_path / "pairs.jsonl", "loss": "dpo"}
    trial, training = loops(LM, decoder, tmp_path / "out", **options)
    before = [(loop.run.train_dataset.reference is None) for loop in (trial, training)]
    assert before == [True, False]
    for loop in (trial, training):
        loop.take_step()
        assert loop.counters.global_step == 1


def mapped_files(folder: Path) -> list[str]:
    """The files below a folder that this process has in its memory, removed ones among them."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if f"{folder}/" in line]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux says so")
def test_a_trial_keeps_no_states_of_frozen_layers_on_the_disk(encoder: Path, tmp_path: Path) -> None:
    write_csv(tmp_path / "rows.csv", topic_rows())
    trial, training = loops(CLASSIFY, encoder, tmp_path / "out", freeze_layers=1, cache_frozen_trunk="true")
    trial.take_step()
    assert mapped_files(tmp_path / "out") == []
    training.take_step()
    assert len(mapped_files(tmp_path / "out")) == 1
    for one, other in zip(trial.run.model.parameters(), training.run.model.parameters(), strict=True):
        assert bool((one == other).all()), "the trial took the same step"
