"""Every form of labelled texts that docs/classify.md names is read as its table says, others are refused with a fix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from text_tasks import documented_forms
from whet.errors import DataError
from whet.tasks.classify.examples import Examples, Named, kind_of, read_file, require_clear

_TEXTS, _LABELS = ["good bread", "no sail"], ["fine", "bad"]
_ROWS = [{"text": text, "label": label} for text, label in zip(_TEXTS, _LABELS, strict=True)]


def _lines(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _parquet(path: Path) -> None:
    from datasets import ClassLabel, Dataset, Features, Value

    features = Features({"text": Value("string"), "label": ClassLabel(names=_LABELS)})
    Dataset.from_dict({"text": _TEXTS, "label": [0, 1]}, features=features).to_parquet(path)


READ: dict[str, tuple[Any, list[Any], str]] = {
    "CSV, TSV and others with a heading": ("Sentence\tCategory\ngood bread\tfine\nno sail\tbad\n", _LABELS, "single"),
    "JSON lines": (_lines(*({"text": row["text"], "meta": {"label": row["label"]}} for row in _ROWS)),
                   _LABELS, "single"),
    "JSON: a list, or in data": (json.dumps({"data": _ROWS}), _LABELS, "single"),
    "Parquet and the hub": (_parquet, _LABELS, "single"),
    "two texts (GLUE)": ("sentence1,sentence2,label\ngood bread,a,1\nno sail,b,0\n", ["1", "0"], "single"),
    "scores": ("text,score\ngood bread,0.5\nno sail,-1.25\n", ["0.5", "-1.25"], "regression"),
    "several labels, Doccano": (
        _lines({"id": 1, "text": _TEXTS[0], "label": ["a", "b"]}, {"id": 2, "text": _TEXTS[1], "label": []}),
        [["a", "b"], []], "multi",
    ),
    "Label Studio, JSON-MIN": (
        json.dumps([{"id": 1, "text": row["text"], "mood": row["label"], "annotator": 1} for row in _ROWS]),
        _LABELS, "single",
    ),
}  # fmt: skip
REFUSED: dict[str, tuple[str, str]] = {
    "Label Studio, JSON": (
        json.dumps([{"id": 1, "data": {"text": "a"}, "annotations": [{"result": [{"value": {"choices": ["x"]}}]}]}]),
        "Label Studio's JSON export",
    ),
    "CSV without a heading": ("good bread,fine\nno sail,bad\n", "write a line with names above it"),
    "a column for each label": ("text,toxic,rude\ngood bread,0,1\nno sail,1,0\n", "which column holds the label"),
    "Prodigy, rejected rows": (
        _lines(_ROWS[0] | {"answer": "accept"}, _ROWS[1] | {"answer": "reject"}), "the answer of this row is reject",
    ),
    "spans": (_lines({"text": "Mira sailed", "label": [[0, 4, "PER"]]}, {"text": "x", "label": []}), "use whet tag"),
    "Python's lists in CSV": ("text,labels\ngood bread,\"['a', 'b']\"\nno sail,\"['a']\"\n", "as Python prints it"),
    "an object for each label": (
        _lines(*({"text": row["text"], "a": 1, "label": {"choices": [row["label"]]}} for row in _ROWS)),
        "which column holds the label",
    ),
}  # fmt: skip


def _read(path: Path, content: Any, named: Named | None = None, *, skip_bad: bool = False) -> Examples:
    if callable(content):
        content(path)
    else:
        path.write_text(content, "utf-8")
    found = read_file(path, named or Named(), delimiter=None, need_label=True, limit=None, skip_bad=skip_bad)
    require_clear(found)
    return found


def test_the_table_names_the_forms_that_are_read() -> None:
    assert documented_forms("classify.md", "Forms of labelled texts") == [*READ]


@pytest.mark.parametrize("form", READ)
def test_form_is_read(tmp_path: Path, form: str) -> None:
    content, labels, kind = READ[form]
    found = _read(tmp_path / "data", content, Named(label="mood") if "MIN" in form else None)
    assert (list(found.texts), list(found.labels or ())) == (_TEXTS, labels)
    assert kind_of(found, None, None)[0].startswith(kind)


@pytest.mark.parametrize("form", REFUSED)
def test_form_is_refused_with_the_way_forward(tmp_path: Path, form: str) -> None:
    content, message = REFUSED[form]
    with pytest.raises(DataError) as caught:
        _read(tmp_path / "data", content)
    assert message in str(caught.value)
    assert all(problem.fix for problem in caught.value.problems)


def test_rejected_rows_can_be_left_out(tmp_path: Path) -> None:
    found = _read(tmp_path / "data", REFUSED["Prodigy, rejected rows"][0], skip_bad=True)
    assert (list(found.texts), found.left_out.kinds) == (_TEXTS[:1], {"the answer of this row is reject": 1})


def test_an_answer_that_is_read_as_a_text_may_be_any_word(tmp_path: Path) -> None:
    rows = "question,answer,label\nWhat did they do?,reject,good\nAnd we?,ignore,bad\n"
    found = _read(tmp_path / "data", rows)
    assert (list(found.pairs or ()), list(found.labels or ())) == (["reject", "ignore"], ["good", "bad"])
    with pytest.raises(DataError, match="if Prodigy has not written the column answer, rename it"):
        _read(tmp_path / "data", rows, Named(text="question", pair=""))
