"""Good data in every form gives the same questions."""

from __future__ import annotations

import csv
import io
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from whet.errors import DataError
from whet.tasks.qa.read import read_questions
from whet.tasks.qa.types import Answers, Questions

_SENNA = "The  Senna flows through Brüssel 😀 and on to the Dijle. Most of it is covered."
_CAVE = "A cave holds bats.\nBats sleep there."


def _answer(text: str, context: str) -> dict[str, Any]:
    return {"text": text, "answer_start": context.index(text)}


def _articles() -> list[dict[str, Any]]:
    return [
        {
            "title": "Rivers",
            "paragraphs": [
                {
                    "context": _SENNA,
                    "document_id": 17,
                    "qas": [
                        {
                            "id": "q1",
                            "question": "  Which town?",
                            "answers": [_answer("Brüssel", _SENNA), _answer("Brüssel", _SENNA)],
                            "is_impossible": False,
                        },
                        {
                            "id": "q2",
                            "question": "Who built it?",
                            "answers": [],
                            "is_impossible": True,
                            "plausible_answers": [_answer("Most", _SENNA)],
                        },
                    ],
                }
            ],
        },
        {"paragraphs": [{"context": _CAVE, "qas": [_question("q3", "Who sleeps?", _answer("Bats", _CAVE))]}]},
        {
            "title": "Again",
            "paragraphs": [{"context": _SENNA, "qas": [_question("q4", "?", _answer("😀 and", _SENNA))]}],
        },
    ]


def _question(name: str, question: str, answer: dict[str, Any]) -> dict[str, Any]:
    return {"id": name, "question": question, "answers": [answer]}


def _rows() -> list[dict[str, Any]]:
    """The same questions, one row each."""
    return [
        {
            "id": question["id"],
            "title": article.get("title", ""),
            "context": paragraph["context"],
            "question": question["question"],
            "answers": {
                "text": [answer["text"] for answer in question["answers"]],
                "answer_start": [answer["answer_start"] for answer in question["answers"]],
            },
        }
        for article in _articles()
        for paragraph in article["paragraphs"]
        for question in paragraph["qas"]
    ]


def _write_nested(path: Path) -> None:
    path.write_text(json.dumps({"version": "v2.0", "data": _articles()}, indent=1))


def _write_nested_unicode(path: Path) -> None:
    path.write_text("\n " + json.dumps({"data": _articles()}, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_flat(path: Path) -> None:
    path.write_text(json.dumps({"version": "1", "data": _rows()}))


def _write_flat_lists(path: Path) -> None:
    """Answers as `datasets` writes them when they are a list of structs."""
    rows = _rows()
    for row in rows:
        texts, starts = row["answers"]["text"], row["answers"]["answer_start"]
        row["answers"] = [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)]
    path.write_text(json.dumps({"data": rows}))


def _write_lines(path: Path) -> None:
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in _rows()) + "\n\n", encoding="utf-8")


def _write_csv(path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["title", "id", "question", "answers", "context"])
        writer.writeheader()
        writer.writerows(row | {"answers": json.dumps(row["answers"])} for row in _rows())


def _write_parquet(path: Path) -> None:
    parquet.write_table(pyarrow.Table.from_pylist(_rows()), path)


_FORMS = [
    _write_nested,
    _write_nested_unicode,
    _write_flat,
    _write_flat_lists,
    _write_lines,
    _write_csv,
    _write_parquet,
]


def _columns(questions: Questions) -> tuple[Any, ...]:
    return (
        list(questions.ids),
        list(questions.questions),
        list(questions.answers),
        list(questions.contexts),
        questions.context_of.tolist(),
        list(questions.titles),
    )


@pytest.mark.parametrize("name", ["data.json", "data.csv", "no_suffix"])
@pytest.mark.parametrize("write", _FORMS, ids=lambda write: write.__name__.removeprefix("_write_"))
def test_every_form_of_data_gives_the_same_questions(write, name, tmp_path):
    write(tmp_path / name)
    ids, texts, answers, contexts, context_of, titles = _columns(read_questions(tmp_path / name))
    assert ids == ["q1", "q2", "q3", "q4"]
    assert texts == ["  Which town?", "Who built it?", "Who sleeps?", "?"]
    assert answers == [
        Answers(("Brüssel", "Brüssel"), (25, 25)),
        Answers(),
        Answers(("Bats",), (19,)),
        Answers(("😀 and",), (33,)),
    ]
    assert contexts == [_SENNA, _CAVE]  # once each, though articles 1 and 3 share one
    assert context_of == [0, 0, 1, 0]
    assert titles == ["Rivers", "Rivers", "", "Again"]


@pytest.mark.parametrize("write", _FORMS, ids=lambda write: write.__name__.removeprefix("_write_"))
@pytest.mark.parametrize("limit", [1, 3, 4, 9])
def test_the_limit_keeps_the_first_questions(write, limit, tmp_path):
    write(tmp_path / "data")
    whole, some = read_questions(tmp_path / "data"), read_questions(tmp_path / "data", limit=limit)
    assert list(some.ids) == list(whole.ids)[:limit]
    assert [some.context(i) for i in range(len(some))] == [whole.context(i) for i in range(len(some))]


def test_keys_of_other_levels_are_ignored(tmp_path):
    articles = [article | {"question": "of the quiz", "context": None} for article in _articles()]
    (tmp_path / "more.json").write_text(json.dumps({"data": articles, "answers": 4, "licence": "none"}))
    assert list(read_questions(tmp_path / "more.json").ids) == ["q1", "q2", "q3", "q4"]


def test_a_file_of_one_line_may_be_json_lines(tmp_path):
    (tmp_path / "one.json").write_text(json.dumps(_rows()[0]))
    assert list(read_questions(tmp_path / "one.json").ids) == ["q1"]


def test_questions_without_answers_are_read_if_allowed(tmp_path):
    rows = [{"id": "a", "context": "One.", "question": "What?"}, {"id": "b", "context": "One.", "question": "Why?"}]
    path = tmp_path / "test.json"
    path.write_text(json.dumps({"data": rows}))
    assert list(read_questions(path, require_answers=False).answers) == [Answers(), Answers()]
    with pytest.raises(DataError, match="column answers is missing"):
        read_questions(path)


def test_hidden_answers_are_accepted_if_answers_are_not_required(tmp_path):
    question = {"id": "a", "question": "What?", "answers": [], "is_impossible": False}
    path = tmp_path / "test.json"
    path.write_text(json.dumps({"data": [{"paragraphs": [{"context": "One.", "qas": [question]}]}]}))
    assert list(read_questions(path, require_answers=False).answers) == [Answers()]
    with pytest.raises(DataError, match="is_impossible is false, but the question has no answers"):
        read_questions(path)


@pytest.mark.parametrize(
    "context",
    ["abc \u202e\u05d0\u05d1 \u202c def", "e\u0301te\u0301 def", "x" * 5_000_000 + "def", "\ufeff\u2028\u0085 def"],
    ids=["bidi controls", "combining marks", "one word of 5 MB", "line separators"],
)
def test_unusual_valid_texts_are_read(context, tmp_path):
    row = {
        "id": "a",
        "context": context,
        "question": "?",
        "answers": {"text": ["def"], "answer_start": [context.index("def")]},
    }
    path = tmp_path / "odd.jsonl"
    path.write_text(json.dumps(row, ensure_ascii=False) + "\n" + json.dumps(row | {"id": "b"}), encoding="utf-8")
    questions = read_questions(path)
    assert questions.context(0) == context
    assert np.array_equal(questions.context_of, [0, 0])


def test_hundred_thousand_answers_to_one_question_are_read_fast(tmp_path):
    path = tmp_path / "many.json"
    answers = [{"text": "One", "answer_start": 0}] * 100_000
    question = {"id": "a", "question": "What?", "answers": answers}
    path.write_text(json.dumps({"data": [{"paragraphs": [{"context": "One.", "qas": [question]}]}]}))
    began = time.process_time()
    assert len(read_questions(path).answers[0].texts) == 100_000
    assert time.process_time() - began < 2  # the goal for any one file of this size; takes about 0.1 s


def test_xquad_is_read_completely(xquad_dir):
    train, dev = read_questions(xquad_dir / "train.json"), read_questions(xquad_dir / "dev.json")
    assert (len(train), len(train.contexts)) == (894, 180)
    for questions in (train, dev):
        for i, answers in enumerate(questions.answers):
            assert answers.texts, questions.ids[i]
            for text, start in zip(answers.texts, answers.starts, strict=True):
                assert questions.context(i)[start : start + len(text)] == text


def _flat(**changes: Any) -> str:
    """A table with one answer a row, in columns of its own."""
    rows = [
        ["id", "context", "question", "answer_text", "answer_start"],
        ["a", "Born in Oslo, she sang.", "Where?", "Oslo", "8"],
        ["b", "Born in Oslo; she sang.", "What did she do?", "sang", "18.0"],
        ["c", "Born in Oslo, she sang.", "When?", "", ""],
    ]
    file = io.StringIO()
    csv.writer(file, **changes).writerows(rows)
    return file.getvalue()


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "with a byte order mark"])
@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_table_with_answer_columns_is_read_with_any_delimiter(delimiter: str, mark: bytes, tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes(mark + _flat(delimiter=delimiter).encode())
    found = read_questions(path)
    assert list(found.ids) == ["a", "b", "c"]
    assert list(found.answers) == [Answers(("Oslo",), (8,)), Answers(("sang",), (18,)), Answers()]
    assert found.context(1) == "Born in Oslo; she sang."


def test_answer_columns_are_read_from_json_lines_and_parquet(tmp_path: Path) -> None:
    row = {"id": "a", "context": "Born in Oslo.", "question": "Where?", "answer_text": "Oslo", "answer_start": 8}
    gap = row | {"id": "b", "answer_text": None, "answer_start": None}
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, (row, gap))), "utf-8")
    parquet.write_table(pyarrow.Table.from_pylist([row, gap]), tmp_path / "rows.parquet")
    several = row | {"answer_text": ["Oslo", "in Oslo"], "answer_start": [8, 5]}
    (tmp_path / "several.json").write_text(json.dumps([several]), "utf-8")
    for name in ("rows.jsonl", "rows.parquet"):
        assert list(read_questions(tmp_path / name).answers) == [Answers(("Oslo",), (8,)), Answers()]
    assert read_questions(tmp_path / "several.json").answers[0].starts == (8, 5)


def test_a_list_at_the_top_holds_rows_or_articles(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(_rows()), "utf-8")
    (tmp_path / "articles.json").write_text(json.dumps(_articles()), "utf-8")
    (tmp_path / "squad.json").write_text(json.dumps({"data": _articles()}), "utf-8")
    assert list(read_questions(tmp_path / "rows.json").ids) == [row["id"] for row in _rows()]
    assert read_questions(tmp_path / "articles.json").ids == read_questions(tmp_path / "squad.json").ids


def test_a_parquet_file_of_a_real_size_is_read_as_its_rows(tmp_path: Path) -> None:
    """One context for many questions, over several row groups: honest repetition is not taken for a bomb."""
    context = "Born in Oslo. " * 2000
    rows = [row | {"id": f"q{n}", "context": context} for n, row in enumerate(_rows()[:1] * 2000)]
    for row in rows:
        row["answers"] = {"text": ["Oslo"], "answer_start": [8]}
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "big.parquet", row_group_size=300)
    found = read_questions(tmp_path / "big.parquet")
    assert (len(found), len(found.contexts)) == (2000, 1)
    assert found.answers[1999] == Answers(("Oslo",), (8,))
