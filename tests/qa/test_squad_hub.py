"""Data sets in the hub's layout, from a local folder; nothing goes to a network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from whet.errors import DataError
from whet.jobs.hub_data import HubSource, load_split
from whet.tasks.qa.read import read_hub
from whet.tasks.qa.types import Answers

_CONTEXT = "A cave holds bats."


def _row(name: str) -> dict[str, Any]:
    return {
        "id": name,
        "title": "Caves",
        "context": _CONTEXT,
        "question": "What does it hold?",
        "answers": {"text": ["bats"], "answer_start": [13]},
    }


@pytest.fixture
def folder(tmp_path) -> Path:
    """A data set with a training split in JSON lines and a validation split in Parquet of its own."""
    import pyarrow
    from pyarrow import parquet

    for kind in ("lines", "tables", "other"):
        (tmp_path / kind).mkdir()
    lines = "".join(json.dumps(_row(f"t{n}")) + "\n" for n in range(5))
    (tmp_path / "lines" / "train.json").write_text(lines)
    for split, n_rows in (("train", 5), ("validation", 2)):
        rows = [_row(f"{split[0]}{n}") for n in range(n_rows)]
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "tables" / f"{split}.parquet")
    (tmp_path / "other" / "train.json").write_text(json.dumps({"sentence": "One.", "label": 1}) + "\n")
    return tmp_path


def _source(folder: Path, kind: str, split: str = "train") -> HubSource:
    name = str(folder / kind)
    return HubSource(dataset_name=name, split=split, flag=f"--{split}_split_name", cache_dir=folder / "cache")


@pytest.mark.parametrize("kind", ["lines", "tables"])
def test_local_folder_is_read(kind, folder):
    questions = read_hub(_source(folder, kind))
    assert list(questions.ids) == ["t0", "t1", "t2", "t3", "t4"]
    assert list(questions.contexts) == [_CONTEXT]
    assert list(questions.answers) == [Answers(("bats",), (13,))] * 5
    assert list(questions.titles) == ["Caves"] * 5


def test_split_and_limit_are_honoured(folder):
    assert list(read_hub(_source(folder, "tables", "validation")).ids) == ["v0", "v1"]
    assert list(read_hub(_source(folder, "tables"), 2).ids) == ["t0", "t1"]
    assert list(read_hub(_source(folder, "tables"), 99).ids) == ["t0", "t1", "t2", "t3", "t4"]


def test_other_columns_are_refused_and_listed(folder):
    with pytest.raises(DataError, match=r"columns id, context, question, answers are missing\n.*sentence, label"):
        read_hub(_source(folder, "other"))


@pytest.mark.parametrize(("kind", "split"), [("tables", "test"), ("nowhere", "train")])
def test_missing_dataset_is_named(kind, split, folder):
    with pytest.raises(DataError, match="cannot be loaded") as caught:
        read_hub(_source(folder, kind, split))
    assert kind in str(caught.value)
    assert split in str(caught.value)


def test_split_that_is_missing_is_named_with_the_option_for_it(folder):
    with pytest.raises(DataError, match=r"Unknown split \"test\"") as caught:
        load_split(_source(folder, "tables", "test"))
    assert caught.value.problems[0].fix.startswith("name another in --test_split_name; or leave --dataset_name out")


def test_dataset_with_code_is_refused_and_not_run(folder):
    """`datasets` once ran a script of the data set's own name."""
    (folder / "scripted").mkdir()
    marker = folder / "marker"
    (folder / "scripted" / "scripted.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    with pytest.raises(DataError, match="cannot be loaded"):
        read_hub(_source(folder, "scripted"))
    assert not marker.exists()


def test_hub_token_is_not_shown():
    assert "hf_secret" not in repr(HubSource(dataset_name="squad", split="train", flag="", token="hf_secret"))
