"""Every command reads the splits of a dataset that its command line names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from text_tasks import QUESTIONS, TAGS, topic_rows, words, write_lines
from whet.cli.main import run
from whet.data.files.bad_rows import Rejected
from whet.data.files.row_fields import text_field
from whet.data.files.table import read_table
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


ODD = {
    "classify": ({"text": 7}, "row 3: text is a whole number, not a text"),
    "lm": ({"text": ["a"]}, "row 3: text is a list"),
    "qa": ({"question": 7}, "question is a whole number, not a text"),
    "tag": ({"tokens": ["a", 7], "ner_tags": ["O", "O"]}, r"tokens\[1\] is a whole number, not a text"),
}
"""Fields of the fourth row that are no texts, and what is said of them."""


@pytest.mark.parametrize("command", TASKS)
def test_values_of_several_types_are_refused_by_their_row(command: str, tmp_path: Path) -> None:
    """`datasets` makes JSON texts of such a column: each text would stand in quotes."""
    arguments, read, rows = TASKS[command]
    odd, said = ODD[command]
    folder = tmp_path / "data"
    folder.mkdir()
    write_lines(folder / "train.jsonl", [*rows[:3], rows[3] | odd, *rows[4:]])
    job = arguments(model_name_or_path="m", dataset_name=str(folder), cache_dir=str(tmp_path / "cache"))
    with pytest.raises(DataError, match=said):
        read(job, "train")
    assert len(read(replace(job, skip_bad=True), "train")) == len(rows) - 1


def _texts(folder: Path, **splits: list[dict[str, Any]]) -> ClassifyArguments:
    """The settings that read these splits from a folder."""
    (folder / "data").mkdir()
    for name, rows in splits.items():
        write_lines(folder / "data" / f"{name}.jsonl", rows)
    return ClassifyArguments(model_name_or_path="m", dataset_name=str(folder / "data"), cache_dir=str(folder / "cache"))


def test_labels_of_several_types_have_no_quotes(tmp_path: Path) -> None:
    rows = [{"text": "a", "label": "sport"}, {"text": "b", "label": 3}, {"text": "c", "label": "sport"}]
    job = _texts(tmp_path, train=rows)
    assert list(read_classify(job, "train").labels or ()) == ["sport", 3, "sport"]


def test_values_of_several_types_in_a_later_file_are_refused(tmp_path: Path) -> None:
    """Its columns are as the first file has them: texts, and the quotes would be characters."""
    job = _texts(tmp_path, train=topic_rows(), validation=[*topic_rows(), {"text": 7, "label": "garden"}])
    assert len(read_classify(job, "train")) == len(topic_rows())
    with pytest.raises(DataError, match="a column holds values of several types"):
        read_classify(job, "validation")


def test_texts_in_quotes_stay_as_they_are(tmp_path: Path) -> None:
    rows = [{"text": '"Well said"', "label": "good"}, {"text": '"Not at all"', "label": "bad"}]
    job = _texts(tmp_path, train=rows)
    assert list(read_classify(job, "train").texts) == ['"Well said"', '"Not at all"']


def test_json_texts_of_parquet_are_their_values(tmp_path: Path) -> None:
    in_json = pyarrow.array(['"good bread"', "7", None, "no JSON"], pyarrow.json_())
    lists = pyarrow.ListArray.from_arrays([0, 1, 3, 3, 3], pyarrow.array(['"a"', '"b"', "3"], pyarrow.json_()))
    parquet.write_table(pyarrow.table({"text": in_json, "label": lists}), tmp_path / "rows.parquet")
    found = [row for _, row in read_table(tmp_path / "rows.parquet").take(("text", "label"))]
    assert [row["label"] for row in found] == [["a"], ["b", 3], [], []]
    assert [row["text"] for row in found[:3]] == ["good bread", 7, None]
    with pytest.raises(Rejected, match=r"text is unreadable .*not JSON"):
        text_field(found[3], "text")
