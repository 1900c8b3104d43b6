"""BANKING77 and English EWT, read as a user has them; both lie outside of the repository and are skipped without."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from whet.tasks.classify.examples import Named, kind_of, read_file, scheme_of
from whet.tasks.tag import read as tag_splits
from whet.tasks.tag.job import tags_of
from whet.tasks.tag.sentences import Named as NamedTags


def _data(name: str) -> Path:
    root = Path(os.environ.get("WHET_TEST_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))
    if not (root / name).is_dir():
        pytest.skip(f"{name} is not at hand in {root} (set WHET_TEST_DATA to the folder that holds it)")
    return root / name


def test_banking77_is_read_without_a_flag() -> None:
    """Some of its texts hold quoted line breaks, and its label column is called category."""
    file = _data("banking77") / "train.csv"
    found = read_file(file, Named(), delimiter=None, need_label=True, limit=None, skip_bad=False)
    assert len(found) == 10_003
    assert (found.columns.text, found.columns.label) == (("text",), "category")
    assert kind_of(found, None, None)[0] == "single_label_classification"
    assert len(scheme_of(found, "single_label_classification").names) == 77


def test_ewt_has_plain_tags() -> None:
    file = _data("ud_ewt") / "test.jsonl"
    found = tag_splits.read_file(file, NamedTags(task="pos"), need_tags=True, limit=None, skip_bad=False)
    assert len(found) == 2_077
    tags = tags_of(found)
    assert {"NOUN", "VERB"} <= set(tags.names)
    assert not tags.are_entities
