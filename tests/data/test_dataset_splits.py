"""Every command reads the splits of a dataset that its command line names."""

from __future__ import annotations

from pathlib import Path

import pytest

from text_tasks import QUESTIONS, TAGS, topic_rows, words, write_lines
from whet.cli.main import run
from whet.errors import EXIT_BAD_CONFIG, EXIT_BAD_DATA, DataError
from whet.jobs.hub_data import HubSource, load_split
from whet.tasks.classify.arguments import ClassifyArguments
from whet.tasks.classify.examples import read_split as read_classify
from whet.tasks.lm.arguments import LmArguments
from whet.tasks.lm.examples import read_split as read_lm
from whet.tasks.qa.arguments import QaArguments
from whet.tasks.qa.splits import read_split as read_qa
from whet.tasks.tag.arguments import TagArguments
from whet.tasks.tag.read import read_split as read_tag

TASKS = {
    "classify": (ClassifyArguments, read_classify, topic_rows()),
    "lm": (LmArguments, read_lm, [{"text": row["text"]} for row in topic_rows()]),
    "qa": (QaArguments, read_qa, QUESTIONS),
    "tag": (TagArguments, read_tag, TAGS),
}

LONG = {"max_seq_length": 256}
"""Longer than what windows share."""


@pytest.mark.parametrize("command", TASKS)
def test_every_task_reads_the_parts_of_splits_that_are_named(command: str, tmp_path: Path) -> None:
    """A dataset with one split is cut into the three that a run reads."""
    arguments, read, rows = TASKS[command]
    folder = tmp_path / "data"
    folder.mkdir()
    write_lines(folder / "train.jsonl", rows)
    job = arguments(
        model_name_or_path="m", dataset_name=str(folder), cache_dir=str(tmp_path / "cache"),
        train_split_name="train[:7]", validation_split_name="train[7:10]", test_split_name="train[10:]",
    )  # fmt: skip
    assert [len(read(job, name)) for name in ("train", "validation", "test")] == [7, 3, 2]


@pytest.mark.parametrize("command", TASKS)
def test_names_of_splits_are_refused_with_files(
    command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = write_lines(tmp_path / "train.jsonl", TASKS[command][2])
    asked = words(command, tmp_path, tmp_path / "out", "--do_train", train_file=file, test_split_name="dev", **LONG)
    assert run(asked) == EXIT_BAD_CONFIG
    assert "test_split_name would change nothing without dataset_name" in " ".join(capfd.readouterr().err.split())


@pytest.mark.parametrize("command", TASKS)
def test_split_that_is_missing_is_named_with_its_option(
    command: str, tmp_path: Path, encoder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    write_lines(folder / "train.jsonl", TASKS[command][2])
    options = {"dataset_name": folder, "cache_dir": tmp_path / "cache", **LONG}
    asked = words(command, encoder, tmp_path / "out", "--do_eval", **options)
    assert run(asked) == EXIT_BAD_DATA
    said = " ".join(capfd.readouterr().err.split())
    assert "split 'validation': cannot be loaded" in said
    assert "name another in --validation_split_name" in said


@pytest.mark.parametrize("name", ["", "train[:5", "train[5:2:1]", "train[:200%]", "train[:0%]"])
def test_split_that_is_none_is_refused(name: str, tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", topic_rows())
    source = HubSource(dataset_name=str(tmp_path), split=name, flag="--train_split_name", cache_dir=tmp_path / "cache")
    with pytest.raises(DataError, match="cannot be loaded") as caught:
        load_split(source)
    assert caught.value.problems[0].fix.startswith("name another in --train_split_name")
