"""Every form of tagged data that docs/tag.md names is read as its table says, and others are refused with a fix."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from text_tasks import documented_forms, words
from whet.cli.main import run
from whet.errors import DataError
from whet.tasks.tag.read import read_file
from whet.tasks.tag.sentences import Named, Sentences

UD = Path(os.environ.get("WHET_TEST_DATA", Path(__file__).resolve().parents[3] / "shared" / "data")) / "ud_ewt"
_TEXT = "Mira sailed to Upper Tarn."
_WORDS = ["Mira", "sailed", "to", "Upper", "Tarn", "."]
_TAGS = ["B-PER", "O", "O", "B-LOC", "I-LOC", "O"]
_PARTS = ["PROPN", "VERB", "ADP", "PROPN", "PROPN", "PUNCT"]


def _columns(line: str, *, above: str = "", words: list[str] = _WORDS, tags: list[str] = _TAGS) -> str:
    """The sentence twice, each word a line: {n} is its number, {w} the word, {t} its tag, {p} its part of speech."""
    rows = zip(range(1, len(words) + 1), words, tags, _PARTS, strict=False)
    return (above + "".join(line.format(n=n, w=w, t=t, p=p) + "\n" for n, w, t, p in rows) + "\n") * 2


def _lines(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _parquet(path: Path) -> None:
    from datasets import ClassLabel, Dataset, Features, List, Value

    names = sorted({*_TAGS})
    features = Features({"tokens": List(Value("string")), "ner_tags": List(ClassLabel(names=names))})
    data = {"tokens": [_WORDS] * 2, "ner_tags": [[names.index(tag) for tag in _TAGS]] * 2}
    Dataset.from_dict(data, features=features).to_parquet(path)


_REST = "\t_" * 6
_SPANS = [[0, 4, "PER"], [15, 25, "LOC"]]
_OBJECTS = [{"start": 0, "end": 4, "label": "PER"}, {"start": 15, "end": 25, "label": "LOC"}]
_AT = [0, 5, 12, 15, 21, 25]
_TOKENS = [
    {"text": w, "start": at, "end": at + len(w), "id": n} for n, (w, at) in enumerate(zip(_WORDS, _AT, strict=True))
]
_ONTONOTES = "bc/cctv/00/cctv_0000 0 {n} {w} {p} (TOP* - - - Speaker#1 {t} * -"
_ROW = {"tokens": _WORDS, "ner_tags": _TAGS}
_LABEL_STUDIO = [
    {"text": _TEXT, "label": [{"start": a, "end": b, "text": _TEXT[a:b], "labels": [kind]} for a, b, kind in _SPANS]}
] * 2

READ: dict[str, Any] = {
    "CoNLL-2003: word POS chunk NER": _columns("{w} {p} B-NP {t}", above="-DOCSTART- -X- -X- O\n\n"),
    "CoNLL-2000, CoNLL-2002, WNUT: word tag": _columns("{w}\t{t}"),
    "numbered lines: 1 EU NNP I-NP I-ORG": _columns("{n} {w} {p} I-NP {t}"),
    "GermEval: 1 word outer inner": _columns("{n}\t{w}\t{t}\tO", above="# http://n-tv.de/#b\t2007 [2009-10-17]\n"),
    "Universal NER: 1 word tag - annotator": _columns("{n}\t{w}\t{t}\t-\tmira", above="# sent_id = 1\n# text = Mira\n"),
    "Label Studio, CONLL2003": _columns("{w} -X- _ {t}", above="-DOCSTART- -X- O\n"),
    "CoNLL-U": (_columns("{n}\t{w}\t{w}\t{p}" + _REST, above="# newdoc\n"), _PARTS),
    "CoNLL-U Plus": _columns("{n}\t{w}\t{t}", above="# global.columns = ID FORM NER\n"),
    "CoNLL-2012 (OntoNotes)": _columns(
        _ONTONOTES, above="#begin document (bc/cctv); part 000\n", tags=["(PER)", "*", "*", "(LOC*", "*)", "*"]
    ),
    "CSV with a word a row": "Sentence #,Word,POS,Tag\n" + "".join(
        f'{f"Sentence: {s}" if n == 0 else ""},{w},{_PARTS[n]},{_TAGS[n]}\n'
        for s in (1, 2) for n, w in enumerate(_WORDS)
    ),
    "CSV with lists": "id,tokens,ner_tags\n" + f'0,"{_WORDS}","{_TAGS}"\n' * 2,
    "CSV with texts and tags": "sentence,word_labels\n" + f'{" ".join(_WORDS)},"{",".join(_TAGS)}"\n' * 2,
    "JSON lines, JSON: lists": _lines(_ROW, _ROW),
    "Parquet and the hub: lists": _parquet,
    "Doccano": _lines({"id": 1, "text": _TEXT, "label": _SPANS}, {"id": 2, "text": _TEXT, "label": _SPANS}),
    "Doccano with relations": _lines(*[
        {"text": _TEXT, "relations": [],
         "entities": [{"id": 7, "label": kind, "start_offset": a, "end_offset": b} for a, b, kind in _SPANS]}
    ] * 2),
    "spaCy": json.dumps([[_TEXT, {"entities": _SPANS}]] * 2),
    "Prodigy": _lines(*[{"text": _TEXT, "tokens": _TOKENS, "spans": _OBJECTS, "answer": "accept"}] * 2,
                      {"text": _TEXT, "spans": [], "answer": "reject"}),
    "Label Studio, JSON-MIN": json.dumps(_LABEL_STUDIO),
}  # fmt: skip
REFUSED: dict[str, tuple[str, str]] = {
    "Label Studio, JSON": (
        json.dumps([{"id": 1, "data": {"text": _TEXT}, "annotations": [{"result": []}]}]), "Label Studio's JSON export",
    ),
    "brat": ("T1\tPER 0 4\tMira\nT2\tLOC 15 25\tUpper Tarn\n", "brat's standoff"),
    "the tag first": (_columns("{t}\t{w}"), "the first column holds tags"),
    "numbered words without tags": (_columns("{n} {w}"), "the tag is missing"),
    "numpy's lists in CSV": ("tokens,ner_tags\n\"['a' 'b']\",\"['O' 'B-X']\"\n", "tokens is a text, not a list"),
    "a text a row with one label": ("text,label\ngood bread,fine food\nno sail today,bad\n", "hold a text each"),
}  # fmt: skip


def _read(
    path: Path, content: Any, named: Named | None = None, *, need_tags: bool = True, skip_bad: bool = False
) -> Sentences:
    if callable(content):
        content(path)
    else:
        path.write_bytes(content.encode())
    return read_file(path, named or Named(), need_tags=need_tags, limit=None, skip_bad=skip_bad)


def _problem(path: Path, content: Any) -> str:
    with pytest.raises(DataError) as caught:
        _read(path, content)
    return str(caught.value)


def test_the_table_names_the_forms_that_are_read() -> None:
    assert documented_forms("tag.md", "Forms of tagged data") == [*READ]


@pytest.mark.parametrize("form", READ)
def test_form_is_read(tmp_path: Path, form: str) -> None:
    content, tags = READ[form] if isinstance(READ[form], tuple) else (READ[form], _TAGS)
    found = _read(tmp_path / "data", content)
    assert [list(one) for one in found.words] == [_WORDS] * 2
    assert found.tags == [tags] * 2


@pytest.mark.parametrize("form", REFUSED)
def test_form_is_refused_with_the_way_forward(tmp_path: Path, form: str) -> None:
    content, message = REFUSED[form]
    said = _problem(tmp_path / "data", content)
    assert message in said
    assert "fix: " in said


# columns


@pytest.mark.parametrize("first", [0, 1, 7])
def test_numbers_of_lines_are_no_words(tmp_path: Path, first: int) -> None:
    """Counted from 0 or 1 in each sentence, or through the file; also in a file to predict, and in CSV."""
    numbers = iter(range(first, 100))
    through = "".join(f"{next(numbers)}\t{w}\t{t}\n" for w, t in zip(_WORDS, _TAGS, strict=True))
    assert _read(tmp_path / "data", through).words == [_WORDS]
    assert _read(tmp_path / "data", through.replace("\t", ",").replace(",.,", ',".",')).words == [_WORDS]
    found = _read(tmp_path / "data", _columns("{n}\t{w}"), need_tags=False)
    assert (found.words, found.tags) == ([_WORDS] * 2, None)


def test_sentences_without_blank_lines_end_where_numbers_begin_again(tmp_path: Path) -> None:
    counted = _columns("{n}\t{w}\t{t}").replace("\n\n", "\n")
    of_sentences = "".join(f"{s}\t{n}\t{w}\tB-X\n" for s in (1, 2, 3) for n, w in enumerate(["a", "b"], 1))
    assert _read(tmp_path / "data", counted).words == [_WORDS] * 2
    found = _read(tmp_path / "data", of_sentences)
    assert (found.words, found.tags) == ([["a", "b"]] * 3, [["B-X"] * 2] * 3)


def test_a_file_of_numbers_and_their_tags_needs_its_columns_named(tmp_path: Path) -> None:
    content = "1 NUM\n2 ORD\n\n3 NUM\n"
    assert "--text_column_name 0 --label_column_name 1" in _problem(tmp_path / "data", content)
    assert _read(tmp_path / "data", content, Named("0", "1")).words == [["1", "2"], ["3"]]
    assert _read(tmp_path / "data", "1 NUM\nx X\n").words == [["1", "x"]]


def test_a_tag_may_hold_spaces_in_sentences_of_it_alone(tmp_path: Path) -> None:
    found = _read(tmp_path / "data", "-DOCSTART- -X- O\nMira -X- _ O\n\nBaker -X- _ B-Job title\n\n")
    assert (found.words, found.tags) == ([["Mira"], ["Baker"]], [["O"], ["B-Job title"]])


def test_widths_are_compared_over_the_file(tmp_path: Path) -> None:
    """A sentence whose lines all have one column more is not read with other columns than the rest."""
    said = _problem(tmp_path / "data", "Mira B-PER\nsailed O\n\nBaker x B-Job\nMaker x B-Job\n")
    assert "line 4 has 3 columns, and line 1 has 2" in said


@pytest.mark.parametrize("space", ["\u00a0", "\u3000", "\u2028", "\u2009", "\u0085", "\u200b", "\ufeff"])
@pytest.mark.parametrize("mark", [" ", "\t", ","])
def test_spaces_of_other_scripts_are_characters_of_a_word(tmp_path: Path, space: str, mark: str) -> None:
    found = _read(tmp_path / "data", f"10{space}000{mark}B-NUM\r\nkm{mark}O\r\n\r\nx{mark}O")
    assert (found.words, found.tags) == ([[f"10{space}000", "km"], ["x"]], [["B-NUM", "O"], ["O"]])


def test_a_word_that_is_blank_is_named_by_its_character(tmp_path: Path) -> None:
    assert "line 2: the word is only U+00A0" in _problem(tmp_path / "data", "a\tO\n\u00a0\tO\n")
    assert "line 2: the word is missing" in _problem(tmp_path / "data", "a\tO\n\tO\n")
    assert "U+00A0, which this line holds" in _problem(tmp_path / "data", "a\u00a0O\nb\u00a0B-X\n")


_SOURCE = "#\thttp://n-tv.de/b [2009-10-17]\n"
"""What GermEval 2014 writes above each sentence."""


@pytest.mark.parametrize("line", ["{n}\t{w}\t{t}\tO", "{n}\t{w}\t{t}", "{w}\t{p}\t{t}"])
def test_comments_with_a_tab_are_read_by_their_columns(tmp_path: Path, line: str) -> None:
    found = _read(tmp_path / "data", _columns(line, above=_SOURCE))
    assert (found.words, found.tags) == ([_WORDS] * 2, [_TAGS] * 2)
    assert any(note.startswith("not read: 2 comments, the first in line 1: #") for note in found.notes)
    found = _read(tmp_path / "data", _columns("{n}\t{w}", above=_SOURCE), need_tags=False)
    assert (found.words, found.tags) == ([_WORDS] * 2, None)


def test_the_word_with_a_tab_is_no_comment(tmp_path: Path) -> None:
    found = _read(tmp_path / "data", "#\tO\na\tB-X\n\nb\tO\n#\tB-X\n\n#\tO\n")
    assert (found.words, found.tags) == ([["#", "a"], ["b", "#"], ["#"]], [["O", "B-X"], ["O", "B-X"], ["O"]])
    found = _read(tmp_path / "data", _SOURCE + "#\tSYM\tO\na\tX\tB-X\n#\tSYM\tO\n")
    assert (found.words, found.tags) == ([["#", "a", "#"]], [["O", "B-X", "O"]])
    assert "line 1: " in _problem(tmp_path / "data", "#\tO\na\tX\tO\nb\tX\tB-X\n")
    assert "line 2: " in _problem(tmp_path / "data", "a\tX\tO\n#\tSYM\nb\tX\tB-X\n")


def test_comments_are_told_from_the_word_and_from_hash_tags(tmp_path: Path) -> None:
    found = _read(tmp_path / "data", "# from the log\n# O\n#sail O\na B-X\n\n# other\n# B-X\n")
    assert (found.words, found.tags) == ([["#", "#sail", "a"], ["#"]], [["O", "O", "B-X"], ["B-X"]])
    assert found.notes == ["not read: 2 comments, the first in line 1: # from the log"]
    assert _read(tmp_path / "data", "# = B-X\na b O\n").words == [["#", "a"]]
    assert "line 2: the tag is missing" in _problem(tmp_path / "data", "a O\n#sail\nb B-X\n")


@pytest.mark.parametrize(
    "content",
    ["a\tO\nb O\n\nc\tB-X\n", "a\tO\t\nb\tO\t\n\nc\tB-X\t\n", "a O\nb O\n \t \nc B-X",
     "a O\nb O\n-DOCSTART- O\nc B-X\n", "\ufeffa\tO\r\nb\tO\r\n\r\nc\tB-X", "a  O\nb\t O\n\n  c B-X \n"],
)  # fmt: skip
def test_separators_of_all_kinds_are_read(tmp_path: Path, content: str) -> None:
    found = _read(tmp_path / "data", content)
    assert (found.words, found.tags) == ([["a", "b"], ["c"]], [["O", "O"], ["B-X"]])


def test_spaces_of_a_word_in_a_line_without_a_tag_part_nothing(tmp_path: Path) -> None:
    assert "line 2: the tag is missing" in _problem(tmp_path / "data", "is\tO\nNew York\nx\tB-X\n")


def test_conllu_names_its_columns(tmp_path: Path) -> None:
    content = _columns("{n}\t{w}\t{w}\t{p}\tX-{p}" + "\t_" * 5).replace(
        "2\tsailed", "2-3\tsailedto" + "\t_" * 8 + "\n2\tsailed"
    )
    content = content.replace("\n\n", f"\n6.1\tx{chr(9)}_{_REST}\t_\n\n")
    assert _read(tmp_path / "data", content, Named(tags="xpos")).tags == [[f"X-{part}" for part in _PARTS]] * 2
    assert _read(tmp_path / "data", content, Named(task="xpos")).words == [_WORDS] * 2
    blank = _columns("{n}\t{w}\t{w}\t_\t{p}" + "\t_" * 5)
    assert "--label_column_name xpos" in _problem(tmp_path / "data", blank)
    assert _read(tmp_path / "data", blank, need_tags=False).tags is None


def test_ontonotes_parts_of_speech_are_read_by_their_name(tmp_path: Path) -> None:
    found = _read(tmp_path / "data", READ["CoNLL-2012 (OntoNotes)"], Named(task="pos"))
    assert (found.words, found.tags) == ([_WORDS] * 2, [_PARTS] * 2)


@pytest.mark.skipif(not UD.exists(), reason="English EWT is not at hand (set WHET_TEST_DATA)")
@pytest.mark.parametrize(
    ("line", "above"),
    [("{w} {t}", "# http://x.y [2009]\n"), ("{n} {w} X {t}", ""), ("{n}\t{w}\t_\t{t}" + _REST, "# sent_id = 1\n")],
)
def test_a_treebank_is_read_back_from_its_columns(tmp_path: Path, line: str, above: str) -> None:
    """2,077 sentences with web addresses, hash tags, the word # and numbers."""
    rows = [json.loads(one) for one in (UD / "test.jsonl").read_text("utf-8").splitlines()]
    text = "".join(
        above
        + "".join(
            f"{line.format(n=n, w=w, t=t)}\n" for n, (w, t) in enumerate(zip(r["tokens"], r["tags"], strict=True), 1)
        )
        + "\n"
        for r in rows
    )
    found = _read(tmp_path / "data", text)
    assert [list(one) for one in found.words] == [row["tokens"] for row in rows]
    assert found.tags == [row["tags"] for row in rows]


# spans


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ([[0, 2, "PER"]], r"label[0] begins or ends inside a word"),
        ([[0, 4, "PER"], [0, 11, "LOC"]], "label[1] overlaps another span"),
        ([[0, 99, "PER"]], "label[0] does not fit its text"),
        ([{"start": 0, "end": 4, "labels": ["PER", "LOC"]}], "label[0] is no span with one label"),
        ([{"start": 1, "end": 5, "labels": ["PER"], "text": "Mira"}], "label[0] does not fit its text"),
        ([[True, 4, "PER"]], "label[0] is no span"),
        (None, "label is missing"),
    ],
)
def test_spans_that_give_no_tags_are_refused_by_their_row(tmp_path: Path, label: Any, message: str) -> None:
    rows = [{"text": _TEXT, "label": _SPANS}, {"text": _TEXT, "label": label}]
    said = _problem(tmp_path / "data", _lines(*rows))
    assert f"line 2: {message}" in said
    assert len(_read(tmp_path / "data", _lines(*rows), skip_bad=True)) == 1


def test_spaces_around_a_span_and_scripts_without_spaces_are_read(tmp_path: Path) -> None:
    found = _read(tmp_path / "data", _lines({"text": "Mira  sailed", "label": [[0, 6, "PER"]]},
                                            {"text": "米拉去北京。", "label": [[3, 5, "LOC"]]}))  # fmt: skip
    assert found.words == [["Mira", "sailed"], list("米拉去北京。")]
    assert found.tags == [["B-PER", "O"], ["O", "O", "O", "B-LOC", "I-LOC", "O"]]


def test_texts_are_cut_into_the_same_words_for_predicting(tmp_path: Path) -> None:
    found = _read(tmp_path / "data", _lines({"text": _TEXT}), need_tags=False)
    assert (found.words, found.tags) == ([_WORDS], None)


def test_rejected_rows_are_left_out_and_named(tmp_path: Path) -> None:
    assert _read(tmp_path / "data", READ["Prodigy"]).notes == ["not read: 1 row with the answer reject or ignore"]


def test_a_list_of_words_next_to_the_text_is_read(tmp_path: Path) -> None:
    rows = [{"text": _TEXT, "tokens": _WORDS, "ner_tags": _TAGS}] * 2
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    for found in (_read(tmp_path / "data", _lines(*rows)), read_file(
        tmp_path / "rows.parquet", Named(), need_tags=True, limit=None, skip_bad=False
    )):  # fmt: skip
        assert ([list(one) for one in found.words], found.tags) == ([_WORDS] * 2, [_TAGS] * 2)


def test_the_run_names_its_columns_and_shows_a_tagged_sentence(
    word_encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = "# n-tv.de\t2009\n1\tso\tO\tO\n\n" + _columns("{n}\t{w}\t{t}\tO")
    (tmp_path / "data").write_text(content, "utf-8")
    assert (
        run(words("tag", word_encoder, tmp_path / "out", "--do_train", train_file=tmp_path / "data", max_steps=1)) == 0
    )
    said = capsys.readouterr().out
    assert "train: 3 sentences, 13 words; words: column 1; tags: column 2\n" in said
    unfolded = " ".join(said.split())
    assert "the first tagged sentence is Mira (B-PER) sailed (O) to (O) Upper (B-LOC) Tarn (I-LOC) . (O)" in unfolded
    assert "train: not read: column 0, which numbers the lines" in said
    assert "train: not read: 1 comment, the first in line 1: # n-tv.de" in said
