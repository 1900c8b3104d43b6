"""CSV with a word a row, as spreadsheets and Kaggle's data sets have it; the schemes of tags."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from whet.errors import DataError
from whet.tasks.tag.job import Tags, metrics_of_tags
from whet.tasks.tag.read import read_file
from whet.tasks.tag.sentences import Named, Sentences

WORDS = [["Mira", "sailed", ","], ["Tarn"]]
TAGS = [["B-PER", "O", "O"], ["B-LOC"]]


def _read(path: Path, content: str, named: Named | None = None, *, need_tags: bool = True) -> Sentences:
    path.write_text(content, "utf-8", newline="")
    return read_file(path, named or Named(), need_tags=need_tags, limit=None, skip_bad=False)


@pytest.mark.parametrize(
    "content",
    [
        'word,tag\nMira,B-PER\nsailed,O\n",",O\n\nTarn,B-LOC\n',
        "Word;POS;Tag\r\nMira;NNP;B-PER\r\nsailed;VBD;O\r\n,;,;O\r\n;;\r\nTarn;NNP;B-LOC\r\n",
        "sentence_id\ttoken\tner_tags\n0\tMira\tB-PER\n0\tsailed\tO\n0\t,\tO\n1\tTarn\tB-LOC\n",
        'Sentence #,Word,POS,Tag\nSentence: 1,Mira,NNP,B-PER\n,sailed,VBD,O\n,",",",",O\nSentence: 2,Tarn,NNP,B-LOC\n',
        'Mira,B-PER\nsailed,O\n",",O\n\n\nTarn,B-LOC',
        "\nlabel|words\nB-PER|Mira\nO|sailed\nO|,\n|\nB-LOC|Tarn\n",
    ],
)
def test_csv_with_a_word_a_row_is_read(tmp_path: Path, content: str) -> None:
    found = _read(tmp_path / "rows.csv", content)
    assert (found.words, found.tags) == (WORDS, TAGS)


def test_columns_of_a_word_csv_can_be_named(tmp_path: Path) -> None:
    content = "lemma,form,pos,kind\nmira,Mira,NNP,B-PER\nsail,sailed,VBD,O\n"
    with pytest.raises(DataError, match="the column knd is missing"):
        _read(tmp_path / "rows.csv", content, Named(tags="knd"))
    named = _read(tmp_path / "rows.csv", content, Named(words="lemma", tags="kind"))
    assert (named.words, named.tags, named.tag_column) == ([["mira", "sail"]], [["B-PER", "O"]], "kind")
    assert _read(tmp_path / "rows.csv", content, Named(task="pos")).tags == [["NNP", "VBD"]]


def test_words_alone_in_csv_can_be_predicted(tmp_path: Path) -> None:
    for content in ("word,note\nMira,a\nsailed,\n\nTarn,b\n", "word\nMira\nsailed\n\nTarn\n"):
        found = _read(tmp_path / "rows.csv", content, need_tags=False)
        assert (found.words, found.tags) == ([["Mira", "sailed"], ["Tarn"]], None)


def test_columns_apart_by_spaces_stay_columns(tmp_path: Path) -> None:
    found = _read(tmp_path / "rows.conll", "1,000 O\n, O\n; O\n\nMira,Tarn B-LOC\n")
    assert found.words == [["1,000", ",", ";"], ["Mira,Tarn"]]
    assert _read(tmp_path / "words.txt", "1,000\n,\nMira\n", need_tags=False).words == [["1,000", ",", "Mira"]]


def test_a_file_of_texts_is_refused_by_the_tagger(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="hold a text each") as error:
        _read(tmp_path / "rows.csv", "text,label\nthe bread was good,fine\nno sail today,bad\n")
    assert "whet classify" in str(error.value)


def test_a_comma_without_quotes_is_named_by_its_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="line 3 has 3 columns, and the header 2") as error:
        _read(tmp_path / "rows.csv", "word,tag\nMira,B-PER\n,,O\n")
    assert "into quotes" in str(error.value)


@pytest.mark.parametrize(
    ("gold", "wrong"),
    [
        (["B-P", "I-P", "O", "B-P", "B-P"], ["B-P", "I-P", "O", "B-P", "I-P"]),  # IOB2
        (["I-P", "I-P", "O", "I-P", "B-P"], ["I-P", "I-P", "O", "I-P", "I-P"]),  # IOB1
        (["B-P", "E-P", "O", "S-P", "S-P"], ["B-P", "E-P", "O", "B-P", "E-P"]),  # BIOES
        (["B-P", "L-P", "O", "U-P", "U-P"], ["B-P", "L-P", "O", "B-P", "L-P"]),  # BILOU
    ],
)
def test_entities_are_counted_in_every_scheme_of_tags(gold: list[str], wrong: list[str]) -> None:
    """Three entities; the other reading finds the first one and joins the last two: 1 of 2 found, 1 of 3 wanted."""
    pytest.importorskip("seqeval", reason="seqeval is not installed")
    tags = Tags(tuple(sorted({*gold, *wrong})))
    expected, found = (np.asarray([tags.names.index(tag) for tag in one]) for one in (gold, wrong))
    assert metrics_of_tags([expected], [expected], tags, each_entity=False)["f1"] == 1.0
    assert metrics_of_tags([expected], [found], tags, each_entity=False)["f1"] == pytest.approx(0.4)
