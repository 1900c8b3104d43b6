"""Kinds of bad question answering data, by name; each says what the message has to name."""

from __future__ import annotations

import gzip
import io
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import ipc, parquet

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


def _arrow(path: Path) -> None:
    with ipc.new_file(path, _table(1).schema) as file:
        file.write_table(_table(1))


def _sparse(path: Path) -> None:
    """A file of 50 terabytes that takes no room; where the file system has a lower limit, of 8."""
    with path.open("wb") as file:
        try:
            file.truncate(50 << 40)
        except OSError:
            file.truncate(8 << 40)


def _table(n: int, **columns: Any) -> pyarrow.Table:
    """A good table of n questions, with other columns."""
    answers = [{"text": ["sung"], "answer_start": [START]}] * n
    good = {"id": [f"q{row}" for row in range(n)], "question": ["What?"] * n, "context": [CONTEXT] * n}
    return pyarrow.table(good | {"answers": answers} | columns)


def _repeated(value: Any, n: int) -> pyarrow.Array:
    """The value n times, stored once."""
    return pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * n, pyarrow.int32()), pyarrow.array([value]))


def _written(make: Callable[[], pyarrow.Table]) -> Make:
    return lambda path: parquet.write_table(make(), path, compression="zstd", store_schema=False)


def _cut(path: Path) -> None:
    parquet.write_table(_table(50), path)
    data = path.read_bytes()
    path.write_bytes(data[:300] + data[500:])


def _same_names() -> pyarrow.Table:
    table = _table(2)
    return table.append_column("id", table.column("id"))


_N_BOMB = 8_500
_parquet_bomb = _written(
    lambda: _table(
        _N_BOMB,
        id=[str(n) for n in range(_N_BOMB)],
        question=_repeated("q", _N_BOMB),
        context=_repeated("a" * 1_000_000, _N_BOMB),
        answers=pyarrow.nulls(_N_BOMB),
    )
)
_parquet_of_nulls = _written(lambda: pyarrow.table({name: pyarrow.nulls(1_000_000, pyarrow.string())
                                                    for name in ("id", "context", "question", "answers")}))  # fmt: skip
_parquet_of_answers = _written(
    lambda: _table(600, answers=[{"text": ["a" * 1_000_000], "answer_start": [0]} for _ in range(600)])
)
_parquet_packed = _written(lambda: _table(600, context=[f"{n} " + "a" * 1_000_000 for n in range(600)]))
_parquet_cut = _cut
_parquet_not_utf8 = _written(
    lambda: _table(2, question=pyarrow.array([b"What?", b"What\xff"], pyarrow.binary()).view(pyarrow.string()))
)
_parquet_of_numbers = _written(lambda: _table(1, question=[7]))
_parquet_of_times = _written(lambda: _table(1, context=pyarrow.array([2**62], pyarrow.timestamp("ms"))))
_parquet_twice = _written(_same_names)


_GOOD = _text(document())
_COMBINED = "Caf\u00e9 Oslo"
Make = Callable[[Path], object]

KINDS: dict[str, tuple[str | bytes | Make, str]] = {
    # the file
    "empty": ("", "the file is empty"),
    "not JSON": ("once upon a time", "line 1, column 1: not JSON"),
    "UTF-16 without a mark": (_GOOD.encode("utf-16-le"), "null bytes, as UTF-16"),
    "UTF-16": (_GOOD.encode("utf-16"), "the text is UTF-16"),
    "Latin-1": ('{"data":\n[{"title": "Br\u00fcssel"}]}'.encode("latin-1"), r"byte 23 \(line 2\) is not UTF-8"),
    "truncated": (json.dumps(document(), indent=1)[:-60], r"line \d+, column \d+: not JSON"),
    "JSON lines with a broken line": (
        _text(question(1) | {"context": CONTEXT}) + '\n{"id": ]\n', "line 2 of the JSON lines: column 8: not JSON",
    ),
    "list of lists at the top": (_text([[question(1)]]), r"data\[0\]: this is a list, not an object"),
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
    "Arrow file": (_arrow, "this is an Arrow file"),
    "pickle": (b"\x80\x04\x95\x00", "this is a pickle file"),
    "file of 50 terabytes": (_sparse, "the file is too large for this machine's memory"),
    # tables
    "Parquet of 8.5 GB in 21 kB": (_parquet_bomb, r"8,500,\d{3},\d{3} bytes of text"),
    "Parquet of a million nulls": (_parquet_of_nulls, "1,000,000 rows or list entries, in a file of"),
    "Parquet of long answers": (_parquet_of_answers, "bytes of text, in a file of"),
    "Parquet unpacked to 600 MB": (_parquet_packed, "bytes when unpacked, in a file of"),
    "Parquet cut off": (_parquet_cut, "the Parquet file cannot be read"),
    "Parquet with bytes in place of text": (
        _parquet_not_utf8, r"row 1, question 'q1': question is unreadable \('utf-8' codec can't decode byte 0xff",
    ),
    "Parquet with numbers in place of text": (_parquet_of_numbers, r"row 0, question 'q0': question is a whole number"),
    "Parquet with a time out of range": (_parquet_of_times, r"row 0, question 'q0': context is unreadable|a datetime"),
    "Parquet with the same column twice": (_parquet_twice, "columns have the same name"),
    "CSV of a million columns": ("id,context,question,answers" + ",a" * 1_000_000 + "\n1\n", "columns"),
    "CSV with a short row": ("id,question,context,answers\n1,a,b,[]\n2,a\n", r"Row #3: Expected 4 columns, got 2"),
    "answers given twice": (
        "id,question,context,answers,answer_text,answer_start\n1,a,b,[],b,0\n", "the answers are given twice",
    ),
    "answer without its start": ("id;question;context;answer_text\n1;a;b;b\n", "the column answer_start is missing"),
    "start that is no number": (
        "id\tquestion\tcontext\tanswer_text\tanswer_start\n1\ta\tb\tb\tx\n", "answer_start of 'b' is a text",
    ),
    # the levels
    "data of a wrong type": (_text({"data": {}}), "`data` is not a list"),
    "article of a wrong type": (_text({"data": [5]}), r"data\[0\]: this is a whole number"),
    "paragraphs of a wrong type": (
        _text({"data": [{"title": "Music", "paragraphs": {}}]}), r"data\[0\], article 'Music': paragraphs is an object",
    ),
    "qas of a wrong type": (_text(document(qas=1.5)), f"{PARAGRAPH}: qas is a number"),
    "no context": (_text({"data": [{"title": "Music", "paragraphs": [{"qas": [question(1)]}]}]}), "context is missing"),
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
    "start with a fraction": (_answer(start=15.5), f"{PLACE}: answer_start of 'sung' is a number with a fraction"),
    "start as a text": (_answer(start="15th"), f"{PLACE}: answer_start of 'sung' is a text"),
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
    "null answers": (_last(answers=None, is_impossible=False), f"{PLACE}: is_impossible is false, but"),
}  # fmt: skip


def write(kind: str, folder: Path) -> Path:
    """Write the data of this kind; return its path."""
    content, path = KINDS[kind][0], folder / FILE
    if callable(content):
        content(path)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path
