"""Forty-five kinds of bad question answering data, by name; each says what the message has to name."""

from __future__ import annotations

import gzip
import io
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONTEXT = "\U0001f600 Pop music is sung in Oslo. Oslo is cold."
START = CONTEXT.index("sung")
PLACE = r"data\[0\]\.paragraphs\[1\]\.qas\[1\], article 'Music', question 'q4'"
PARAGRAPH = r"data\[0\]\.paragraphs\[1\], article 'Music'"
FILE = "data.json"


def question(number: int, **changes: Any) -> dict[str, Any]:
    """A good question about CONTEXT, with other fields."""
    whole = {"id": f"q{number}", "question": "What is pop?", "answers": [{"text": "sung", "answer_start": START}]}
    return {name: value for name, value in (whole | changes).items() if value is not ...}


def document(last: dict[str, Any] | None = None, **paragraph: Any) -> dict[str, Any]:
    """Four questions in two paragraphs; the last question, or its paragraph, is the given one."""
    second = {"context": CONTEXT + " Yes.", "qas": [question(3), last or question(4)]} | paragraph
    first = {"context": CONTEXT, "qas": [question(1), question(2)]}
    return {"version": "1.1", "data": [{"title": "Music", "paragraphs": [first, second]}]}


def _text(value: Any) -> str:
    return json.dumps(value)


def _last(**changes: Any) -> str:
    return _text(document(question(4, **changes)))


def _answer(text: Any = "sung", start: Any = START) -> str:
    return _last(answers=[{"text": text, "answer_start": start}])


def _zip_bomb() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("data.json", b"0" * 50_000_000)
    return file.getvalue()


_GOOD = _text(document())
_COMBINED = "Caf\u00e9 Oslo"
Make = Callable[[Path], object]

KINDS: dict[str, tuple[str | bytes | Make, str]] = {
    # the file
    "empty": ("", "the file is empty"),
    "not JSON": ("once upon a time", "line 1, column 1: not JSON"),
    "byte order mark": (b"\xef\xbb\xbf" + _GOOD.encode(), "byte order mark"),
    "UTF-16": (_GOOD.encode("utf-16"), "the text is UTF-16"),
    "Latin-1": ('{"data":\n[{"title": "Br\u00fcssel"}]}'.encode("latin-1"), r"byte 23 \(line 2\) is not UTF-8"),
    "truncated": (json.dumps(document(), indent=1)[:-60], r"line \d+, column \d+: not JSON"),
    "JSON lines with a broken line": (
        _text(question(1) | {"context": CONTEXT}) + '\n{"id": ]\n', "line 2 of the JSON lines: column 8: not JSON",
    ),
    "list at the top": (_text([question(1)]), "a list, not an object"),
    "no data": (_text({"version": "1.1"}), "the document has no `data`"),
    "nesting": ('{"data":' + "[" * 200_000, "nested too deep"),
    "5,000 digits": (_GOOD.replace('"1.1"', "7" * 5000), "line 1, column 13: a number has too many digits"),
    "NaN": (_GOOD.replace('"1.1"', "NaN"), "line 1, column 13: NaN is not JSON"),
    "Infinity": (_GOOD.replace('"1.1"', "-Infinity"), "line 1, column 13: -Infinity is not JSON"),
    "duplicate keys": (_GOOD.replace('"version"', '"data": [], "version"'), "has the key 'data' more than once"),
    "gzip bomb": (gzip.compress(b"0" * 50_000_000), "this is a gzip file"),
    "zip bomb": (_zip_bomb(), "this is a zip file"),
    "pipe": (os.mkfifo, "a pipe, a socket or a device"),
    "folder": (Path.mkdir, "this is a folder, not a file"),
    # the levels
    "data of a wrong type": (_text({"data": {}}), "`data` is not a list"),
    "article of a wrong type": (_text({"data": [5]}), r"data\[0\]: this is a whole number"),
    "paragraphs of a wrong type": (
        _text({"data": [{"title": "Music", "paragraphs": {}}]}), r"data\[0\], article 'Music': paragraphs is an object",
    ),
    "qas of a wrong type": (_text(document(qas=1.5)), f"{PARAGRAPH}: qas is a number"),
    "no context": (_text({"data": [{"title": "Music", "paragraphs": [{"qas": []}]}]}), "context is missing"),
    "empty context": (_text(document(context=" \u2003\n")), f"{PARAGRAPH}: context is empty"),
    "control character": (_GOOD.replace("Pop", "P\x01p"), r"line 1, column \d+: not JSON: Invalid control character"),
    # the question
    "no id": (_last(id=...), r"paragraphs\[1\]\.qas\[1\], article 'Music': id is missing"),
    "duplicate id": (_last(id="q2"), "question 'q2': the id has been used before"),
    "null question": (_last(question=None), f"{PLACE}: question is null"),
    "empty question": (_last(question=" \t"), f"{PLACE}: question is empty"),
    "lone surrogate": (_last(question="\ud83d?"), rf"{PLACE}: question holds the character U\+D83D"),
    "null character": (_last(question="a\0b"), rf"{PLACE}: question holds the character U\+0000"),
    "is_impossible of a wrong type": (_last(is_impossible="no"), f"{PLACE}: is_impossible is a text"),
    "impossible and answered": (_last(is_impossible=True), f"{PLACE}: is_impossible is true, but"),
    # the answers
    "no answers": (_last(answers=...), f"{PLACE}: answers is missing"),
    "empty answer": (_answer(text="", start=3), f"{PLACE}: an answer is empty"),
    "negative start": (_answer(start=-1), f"{PLACE}: an answer does not stand"),
    "start with a fraction": (_answer(start=15.0), f"{PLACE}: answer_start of 'sung' is a number with a fraction"),
    "start as a text": (_answer(start="15"), f"{PLACE}: answer_start of 'sung' is a text"),
    "start true": (_answer(start=True), f"{PLACE}: answer_start of 'sung' is true or false"),
    "start past the end": (_answer(start=10**30), f"{PLACE}: an answer does not stand"),
    "start off by one": (_answer(start=START + 1), f"{PLACE}(.*\n)*.*occurs at {START}"),
    "start in UTF-16 units": (_answer(start=START + 1), f"{PLACE}(.*\n)*.*counted in UTF-16"),
    "bidi control in the answer": (_answer(text="su\u202eng"), f"{PLACE}: an answer does not stand"),
    "combining mark in the answer": (
        _text(document(question(4, answers=[{"text": "Cafe\u0301", "answer_start": 0}]), context=_COMBINED,
                       qas=[question(4, answers=[{"text": "Cafe\u0301", "answer_start": 0}])])),
        "question 'q4': an answer does not stand",
    ),
    "null answers": (_last(answers=None), f"{PLACE}: answers does not hold"),
}  # fmt: skip


def write(kind: str, folder: Path) -> Path:
    """Write the data of this kind; return its path."""
    content, path = KINDS[kind][0], folder / FILE
    if callable(content):
        content(path)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path
