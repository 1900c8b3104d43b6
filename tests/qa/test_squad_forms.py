"""Every form of questions that docs/qa.md names is read as its table says, and others are refused with a fix."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import csv, parquet

from text_tasks import documented_forms
from whet.errors import DataError
from whet.tasks.qa.read import read_questions
from whet.tasks.qa.types import Answers, Questions

_CONTEXT = "Born in Oslo, she sang."
_OSLO = Answers(("Oslo",), (8,))
_GIVEN = [{"text": "Oslo", "answer_start": 8}]


def _nested(*questions: dict[str, Any], **paragraph: Any) -> str:
    """The questions, with ids 1, 2, ..., unless they have others, about one context."""
    qas = [{"id": str(n), "question": f"What {n}?", **one} for n, one in enumerate(questions, start=1)]
    first = {"context": _CONTEXT, "qas": qas} | paragraph
    return json.dumps({"version": "v2.0", "data": [{"title": "Songs", "paragraphs": [first]}]})


def _rows(**answer: Any) -> list[dict[str, Any]]:
    return [{"id": "1", "context": _CONTEXT, "question": "Where?", **answer},
            {"id": "2", "context": _CONTEXT, "question": "When?", "answers": []}]  # fmt: skip


def _haystack() -> str:
    answer = {"answer_id": 3, "document_id": 7, "question_id": 1, "text": "Oslo", "answer_start": 8, "answer_end": 12,
              "answer_category": None}  # fmt: skip
    none = answer | {"text": "", "answer_start": 0, "answer_category": "NO_ANSWER"}
    return _nested({"id": 1, "answers": [answer], "is_impossible": False},
                   {"id": 2, "answers": [none], "is_impossible": True}, document_id=7)  # fmt: skip


def _in_paragraphs(**last: Any) -> str:
    document = json.loads(_nested({"answers": _GIVEN}, {"answers": []}))
    document["data"][0]["paragraphs"] += [{"context": "Nobody asked.", "qas": []}, {"context": "", "qas": None}, last]
    document["data"] += [{"title": "Empty", "paragraphs": None}, {"title": 7, "paragraphs": []}]
    return json.dumps(document)


def _csv() -> str:
    rows = [row | {"answers": json.dumps(row["answers"]) if row["answers"] else ""} for row in _rows(answers=_GIVEN)]
    file = io.BytesIO()
    csv.write_csv(pyarrow.Table.from_pylist(rows), file)
    return file.getvalue().decode()


def _parquet(path: Path) -> None:
    rows = [row | {"id": int(row["id"]), "answers": row["answers"] or None} for row in _rows(answers=_GIVEN)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def _paragraphs_alone() -> list[dict[str, Any]]:
    asked = [{"id": "1", "question": "Where?", "answers": _GIVEN}, {"id": "2", "question": "When?", "answers": []}]
    return [{"context": _CONTEXT, "qas": [one]} for one in asked]


_NONE = {"answers": []}
READ: dict[str, Any] = {
    "SQuAD 1.1 and 2.0": _nested({"answers": _GIVEN}, {"answers": [], "is_impossible": True,
                                                       "plausible_answers": _GIVEN}),
    "Haystack, deepset's annotation tool": _haystack(),
    "whole numbers as ids": _nested({"id": 1, "answers": _GIVEN}, {"id": 2, "answers": []}),
    "is_impossible with an empty answer": _nested(
        {"answers": _GIVEN, "is_impossible": False},
        {"answers": [{"text": "", "answer_start": -1}], "is_impossible": True},
    ),
    "answers: null": _nested({"answers": _GIVEN}, {"answers": None, "is_impossible": True}),
    "is_impossible without answers": _nested({"answers": _GIVEN, "is_impossible": False}, {"is_impossible": True}),
    "one answer that is no list": _nested({"answers": _GIVEN[0]}, _NONE),
    "answer_start as a text or a float": _nested({"answers": [{"text": "Oslo", "answer_start": "8"}]}, _NONE),
    "paragraphs without questions": _in_paragraphs(qas=[]),
    "paragraphs alone": json.dumps(_paragraphs_alone()),
    "rows: JSON lines, JSON": "\n".join(map(json.dumps, _rows(answers={"text": ["Oslo"], "answer_start": [8.0]}))),
    "rows: CSV": _csv(),
    "rows: Parquet and the hub": _parquet,
    "rows: answer_text and answer_start": "id,context,question,answer_text,answer_start\n"
    '1,"Born in Oslo, she sang.",Where?,Oslo,8.0\n2,"Born in Oslo, she sang.",When?,,\n',
    "rows: answer_text alone": "id,context,question,answer_text\n"
    '1,"Born in Oslo, she sang.",Where?,Oslo\n2,"Born in Oslo, she sang.",When?,\n',
}  # fmt: skip
REFUSED: dict[str, tuple[str, str]] = {
    "an id twice": (_nested({"id": 1, "answers": _GIVEN}, {"id": "1", "answers": []}), "the id has been used before"),
    "is_impossible with an answer": (_nested({"answers": _GIVEN, "is_impossible": True}), "is_impossible is true, but"),
    "an answer that is elsewhere": (_nested({"answers": [{"text": "Oslo", "answer_start": 9}]}), "occurs at 8"),
    "an answer_text in two places": (
        'id,context,question,answer_text\n1,"Born in Oslo, sang in Oslo.",Where?,Oslo\n', "the text occurs at 8, 22",
    ),
    "an empty answer without is_impossible": (
        _nested({"answers": [{"text": "", "answer_start": 0}]}), "an answer is empty",
    ),
    "Label Studio, JSON": (
        json.dumps([{"id": 1, "data": {"text": _CONTEXT}, "annotations": [{"result": []}]}]), "Label Studio",
    ),
}  # fmt: skip


def _read(path: Path, content: Any, *, skip_bad: bool = False) -> Questions:
    if callable(content):
        content(path)
    else:
        path.write_text(content, "utf-8")
    return read_questions(path, skip_bad=skip_bad)


def test_the_table_names_the_forms_that_are_read() -> None:
    assert documented_forms("qa.md", "Forms of question answering data") == [*READ]


@pytest.mark.parametrize("skip_bad", [False, True])
@pytest.mark.parametrize("form", READ)
def test_form_is_read(tmp_path: Path, form: str, skip_bad: bool) -> None:
    """Nothing of it is bad: with --skip_bad the question without an answer stays too."""
    found = _read(tmp_path / "data", READ[form], skip_bad=skip_bad)
    assert list(found.ids) == ["1", "2"]
    assert list(found.answers) == [_OSLO, Answers()]
    assert found.left_out.n_rows == 0


def test_paragraphs_alone_are_read_in_lines_one_by_one_and_as_data(tmp_path: Path) -> None:
    alone = _paragraphs_alone()
    for content in ("\n".join(map(json.dumps, alone)), json.dumps({"data": alone})):
        found = _read(tmp_path / "data", content)
        assert (list(found.ids), list(found.answers)) == (["1", "2"], [_OSLO, Answers()])
    assert list(_read(tmp_path / "data", json.dumps(alone[0])).ids) == ["1"]


def test_problem_of_a_paragraph_alone_is_found_at_its_place(tmp_path: Path) -> None:
    good, bad = _paragraphs_alone()
    bad["qas"][0]["answers"] = [{"text": "Oslo", "answer_start": 9}]
    with pytest.raises(DataError, match=r"data\[1\]\.qas\[0\], question '2'"):
        _read(tmp_path / "data", json.dumps([good, bad]))
    with pytest.raises(DataError, match=r"line 2\.qas\[0\]"):
        _read(tmp_path / "data", "\n".join(map(json.dumps, [good, bad])))


@pytest.mark.parametrize("form", REFUSED)
def test_form_is_refused_with_the_way_forward(tmp_path: Path, form: str) -> None:
    content, message = REFUSED[form]
    with pytest.raises(DataError, match=message) as caught:
        _read(tmp_path / "data", content)
    assert all(problem.fix for problem in caught.value.problems)


@pytest.mark.parametrize("flag", [True, "true", "True", 1, "1"])
def test_flags_of_tables_are_read(tmp_path: Path, flag: Any) -> None:
    other = {True: False, "true": "false", "True": "False", "1": "0"}.get(flag, 0)
    rows = [row | {"is_impossible": flag if row["id"] == "2" else other} for row in _rows(answers=_GIVEN)]
    for row in rows:
        row["answers"] = json.dumps(row["answers"])
    file = io.BytesIO()
    csv.write_csv(pyarrow.Table.from_pylist([row | {"is_impossible": str(row["is_impossible"])} for row in rows]), file)
    for content in ("\n".join(map(json.dumps, rows)), file.getvalue().decode()):
        assert list(_read(tmp_path / "data", content).answers) == [_OSLO, Answers()]


def test_contradictions_stay_refused(tmp_path: Path) -> None:
    for question in ({"answers": None, "is_impossible": False}, {"answers": [{"text": ""}], "is_impossible": False}):
        with pytest.raises(DataError, match=r"is_impossible is false, but|an answer is empty"):
            _read(tmp_path / "data", _nested({"answers": _GIVEN}, question))
    with pytest.raises(DataError, match="answers is missing"):
        _read(tmp_path / "data", _nested({"answers": _GIVEN}, {}))
    with pytest.raises(DataError, match="context is missing"):
        _read(tmp_path / "data", _in_paragraphs().replace('"context": "", "qas": null', '"qas": [{"id": "9"}]'))


def test_every_kind_of_question_that_is_left_out_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also one that stands behind a dozen of another kind."""
    wrong = [{"answers": [{"text": "Oslo", "answer_start": 9}]} for _ in range(12)]
    empty = {"answers": [{"text": "", "answer_start": 0}]}
    contrary = {"answers": [], "is_impossible": False}
    found = _read(tmp_path / "data", _nested({"answers": _GIVEN}, *wrong, empty, contrary), skip_bad=True)
    found.left_out.log("train", "question")
    assert [record.getMessage() for record in caplog.records][:4] == [
        "train: 14 questions are bad and were left out:",
        "  12 questions: an answer does not stand where answer_start says",
        "  1 question: an answer is empty",
        "  1 question: is_impossible is false, but the question has no answers",
    ]
    assert caplog.records[-1].getMessage() == "  and 4 more problems"
    caplog.clear()
    _read(tmp_path / "data", _nested({"answers": _GIVEN}, empty), skip_bad=True).left_out.log("train", "question")
    assert caplog.records[0].getMessage() == "train: 1 question is bad and was left out:"


def test_quotes_of_a_file_with_tabs_join_no_questions(tmp_path: Path) -> None:
    asked = ['"Where was she born?', "Where?", 'Where was she "born"?']
    rows = [f"{n}\t{_CONTEXT}\t{question}\tOslo\t8\n" for n, question in enumerate(asked)]
    path = tmp_path / "rows.tsv"
    path.write_text("id\tcontext\tquestion\tanswer_text\tanswer_start\n" + "".join(rows), "utf-8")
    assert list(read_questions(path).questions) == asked
    path.write_text(path.read_text("utf-8").replace('she "born"?', 'she born"'), "utf-8")
    with pytest.raises(DataError, match="line 2: a quote joins it with line 4"):
        read_questions(path)
