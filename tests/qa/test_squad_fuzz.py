"""Whatever a file holds, it is read or refused in our words: never another exception."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from whet.errors import DataError
from whet.tasks.qa.read import read_questions

_CONTEXT = "A cave holds bats."
_NAMES = ("data", "paragraphs", "qas", "context", "id", "question", "answers", "text", "answer_start", "is_impossible")
_QUICK = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(_CONTEXT),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_NAMES), inner, max_size=5),
    max_leaves=30,
)


def _row(name: str) -> dict[str, Any]:
    answers = {"text": ["bats"], "answer_start": [13]}
    return {"id": name, "context": _CONTEXT, "question": "What?", "answers": answers}


def _nested() -> str:
    question = {"id": "q1", "question": "What?", "answers": [{"text": "bats", "answer_start": 13}]}
    return json.dumps({"data": [{"title": "Caves", "paragraphs": [{"context": _CONTEXT, "qas": [question]}]}]})


def _lines() -> str:
    return json.dumps(_row("q1")) + "\n" + json.dumps(_row("q2"))


@settings(_QUICK, max_examples=75)
@given(document=_JSON | st.fixed_dictionaries({"data": st.lists(_JSON, max_size=3)}))
def test_any_json_is_read_or_refused(document, tmp_path):
    path = tmp_path / "any.json"
    path.write_text(json.dumps(document))
    _read_or_refuse(path)


@settings(_QUICK, max_examples=75)
@given(field=st.sampled_from(["id", "context", "question", "answers", "is_impossible", "title"]), value=_JSON)
def test_question_with_any_value_in_one_field_is_read_or_refused(field, value, tmp_path):
    path = tmp_path / "any.json"
    path.write_text(json.dumps({"data": [_row("q1"), _row("q2") | {field: value}]}))
    _read_or_refuse(path)


@settings(_QUICK, max_examples=125)
@given(
    content=st.sampled_from([_nested(), _lines(), "id,context,question,answers\n1,a,b,[]\n"]),
    cuts=st.lists(
        st.tuples(
            st.floats(0, 1, exclude_max=True),
            st.integers(0, 3),
            st.binary(max_size=3) | st.sampled_from([b'"', b"{", b"]", b"\n"]),
        ),
        max_size=4,
    ),
)
def test_file_with_changed_bytes_is_read_or_refused(content, cuts, tmp_path):
    damaged = bytearray(content.encode())
    for where, length, new in cuts:
        at = int(where * len(damaged))
        damaged[at : at + length] = new
    path = tmp_path / "damaged"
    path.write_bytes(bytes(damaged))
    _read_or_refuse(path)


def _read_or_refuse(path: Path) -> None:
    try:
        questions = read_questions(path)
    except DataError as error:
        named = str(path) in str(error)
        assert named
        return
    assert len(questions) == len(set(questions.ids)) > 0
