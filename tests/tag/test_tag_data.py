"""Sentences from every format; what is wrong is named by file, line and field; labels stand at first pieces."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from transformers import AutoTokenizer

from text_tasks import save_encoder, write_lines
from whet.data.store import RowStore
from whet.errors import DataError
from whet.jobs.tokenising.cache import Cache
from whet.jobs.tokenising.words import WordRowMaker, WordRows
from whet.tasks.tag.job import Tags, tags_of, token_labels
from whet.tasks.tag.read import read_file
from whet.tasks.tag.sentences import Named, Sentences

CONLL = """-DOCSTART- -X- O

# sent_id = 1
Mira NNP B-PER
sailed VBD O
to TO O
Oldwick NNP B-LOC

[ -LRB- O
Upper NNP B-LOC
Tarn NNP I-LOC
"""
WORDS = [["Mira", "sailed", "to", "Oldwick"], ["[", "Upper", "Tarn"]]
TAGS = [["B-PER", "O", "O", "B-LOC"], ["O", "B-LOC", "I-LOC"]]


def _read(path: Path, named: Named | None = None, *, need_tags: bool = True, skip_bad: bool = False) -> Sentences:
    return read_file(path, named or Named(), need_tags=need_tags, limit=None, skip_bad=skip_bad)


def _write(path: Path, text: str) -> Path:
    path.write_text(text, "utf-8")
    return path


def test_conll_columns_give_words_and_tags(tmp_path: Path) -> None:
    for name, text in (
        ("spaces", CONLL),
        ("tabs", CONLL.replace(" ", "\t").replace("#\tsent_id\t=\t1", "# sent_id = 1")),
    ):
        found = _read(_write(tmp_path / name, text))
        assert (found.words, found.tags) == (WORDS, TAGS), name
        assert list(found.places) == ["line 4", "line 9"]
    parts = _read(tmp_path / "spaces", Named(words="0", tags="1"))
    assert parts.tags == [["NNP", "VBD", "TO", "NNP"], ["-LRB-", "NNP", "NNP"]]


def test_json_lines_json_and_parquet_give_the_same_sentences(tmp_path: Path) -> None:
    rows = [{"tokens": words, "ner_tags": tags} for words, tags in zip(WORDS, TAGS, strict=True)]
    write_lines(tmp_path / "a.jsonl", rows)
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=1))
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.json", "a.parquet"):
        found = _read(tmp_path / name)
        assert ([list(one) for one in found.words], found.tags) == (WORDS, TAGS), name


def test_a_hub_data_set_gives_the_names_of_its_tags(tmp_path: Path) -> None:
    from datasets import ClassLabel, Dataset, Features, List, Value

    from whet.tasks.tag.arguments import TagArguments
    from whet.tasks.tag.read import read_split

    features = Features({"tokens": List(Value("string")), "ner_tags": List(ClassLabel(names=["O", "B-X"]))})
    Dataset.from_dict({"tokens": [["a", "b"]], "ner_tags": [[1, 0]]}, features=features).to_parquet(
        tmp_path / "train.parquet"
    )
    job = TagArguments(model_name_or_path="m", dataset_name=str(tmp_path), cache_dir=str(tmp_path / "cache"))
    found = read_split(job, "train")
    assert found.tags == [["B-X", "O"]]
    assert tags_of(found).names == ("O", "B-X")


def test_tags_of_sentences_that_are_not_trained_are_known(tmp_path: Path) -> None:
    from whet.tasks.tag.arguments import TagArguments
    from whet.tasks.tag.read import read_split

    file = _write(tmp_path / "train.conll", "a B-X\nb O\n\nc B-Y\n")
    found = read_split(TagArguments(model_name_or_path="m", train_file=str(file), max_train_samples=1), "train")
    assert len(found) == 1
    assert tags_of(found).names == ("B-X", "B-Y", "O")


def test_bad_sentences_are_named_by_line_and_field(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "bad.jsonl",
        [
            {"tokens": ["a"], "tags": ["O"]},
            {"tokens": ["a", "b"], "tags": ["O"]},
            {"tokens": "a b", "tags": ["O"]},
            {"tokens": ["a", ""], "tags": ["O", "O"]},
            {"tokens": ["a"], "tags": [None]},
            {"tokens": ["a"]},
        ],
    )
    with pytest.raises(DataError) as caught:
        _read(path)
    assert [problem.what for problem in caught.value.problems] == [
        f"{path}: line 2: tags has 1 tags for 2 words",
        f"{path}: line 3: tokens is a text, not a list",
        f"{path}: line 4: tokens[1] is empty",
        f"{path}: line 5: tags[0] is null",
        f"{path}: line 6: tags is missing",
    ]
    assert len(_read(path, skip_bad=True)) == 1


def test_a_conll_line_without_a_tag_is_named_by_its_line(tmp_path: Path) -> None:
    path = _write(tmp_path / "bad.conll", "good O\n\nMira B-PER\nsailed\n")
    with pytest.raises(DataError, match="the sentence that begins in line 3: line 4: the tag is missing"):
        _read(path)


def test_an_unlabelled_file_has_words_alone(tmp_path: Path) -> None:
    found = _read(_write(tmp_path / "words.conll", "Mira\nsailed\n\nTarn\n"), need_tags=False)
    assert (found.words, found.tags) == ([["Mira", "sailed"], ["Tarn"]], None)


@pytest.mark.parametrize(
    ("content", "tags"),
    [("Mira\nsailed\n", "1"), ("Mira\nsailed\n", "ner"), ("token\nMira\nsailed\n", "ner"),
     ("word,note\nMira,a\nsailed,b\n", "ner"), ("word,note\nMira,a\nsailed,b\n", "3")],
)  # fmt: skip
def test_a_test_file_may_lack_the_column_of_tags_that_is_named(tmp_path: Path, content: str, tags: str) -> None:
    path = _write(tmp_path / "words.conll", content)
    found = _read(path, Named(tags=tags), need_tags=False)
    assert (found.words, found.tags) == ([["Mira", "sailed"]], None)
    with pytest.raises(DataError):
        _read(path, Named(tags=tags))


def test_a_test_file_with_the_column_of_tags_that_is_named_has_tags(tmp_path: Path) -> None:
    path = _write(tmp_path / "words.conll", CONLL)
    assert _read(path, Named(tags="2"), need_tags=False).tags == TAGS
    assert _read(path, Named(words="1", tags="0"), need_tags=False).tags == WORDS


def test_spaces_around_a_tag_make_no_second_tag(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", [{"tokens": ["Mira", "sailed"], "tags": ["B-PER ", "O"]}])
    assert _read(path).tags == [["B-PER", "O"]]
    write_lines(path, [{"tokens": ["Mira", "sailed"], "tags": [" ", "O"]}])
    with pytest.raises(DataError, match=r"tags\[0\] is empty"):
        _read(path)


def test_tags_that_training_has_not_seen_are_named_by_line_word_and_value(tmp_path: Path) -> None:
    path = _write(tmp_path / "eval.conll", CONLL)
    with pytest.raises(DataError) as caught:
        Tags(("B-LOC", "I-LOC", "O")).encode(_read(path))
    (problem,) = caught.value.problems
    assert problem.what.startswith(f"{path}: line 4, word 1 ('Mira'):")
    assert problem.got == "B-PER"


@pytest.mark.parametrize("doc_stride", [None, 2])
def test_rows_do_not_depend_on_threads(doc_stride: int | None, tmp_path: Path) -> None:
    save_encoder(tmp_path / "encoder")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "encoder")
    sentences = [["harbour", "unharbouring", "sail", str(n)] for n in range(1100)]  # more than two calls of tokenizers

    def made(n_threads: int | None) -> WordRows:
        cache = Cache(rows="rows", folder=tmp_path / f"cache of {n_threads}")
        return WordRowMaker(tokenizer, 12, cache, doc_stride, n_threads).rows(sentences)

    wanted, *others = (made(n) for n in (None, 1, 3))
    assert len(wanted.rows) >= len(sentences)
    for found in others:
        for name, array in wanted.rows.arrays().items():
            assert np.array_equal(found.rows.arrays()[name], array)
        assert np.array_equal(found.word_of, wanted.word_of)
        assert np.array_equal(found.text_of, wanted.text_of)


@pytest.mark.parametrize("all_pieces", [False, True])
def test_labels_stand_at_the_pieces_that_run_ner_labels(tmp_path: Path, all_pieces: bool) -> None:
    """Compared with the loop of run_ner.py over `word_ids` of transformers' own tokenizer."""
    save_encoder(tmp_path / "encoder")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "encoder")
    words = [["harbour", "unharbouring", "sail"], ["breadflour", "oven"]]
    given = [["B-A", "B-A", "O"], ["B-A", "I-A"]]
    sentences = Sentences("f", words, given, ["line 1", "line 2"], "tags")
    tags = tags_of(sentences)
    rows = WordRowMaker(tokenizer, 32, Cache(rows="rows", folder=tmp_path / "cache")).rows(words)
    labels = token_labels(rows, tags.encode(sentences), tags, all_pieces=all_pieces)
    encoded = tokenizer(words, is_split_into_words=True)
    assert rows.rows.tokens["input_ids"].tolist() == [token for row in encoded["input_ids"] for token in row]
    wanted: list[int] = []
    for row, tagged in enumerate(given):
        before = None
        for word in encoded.word_ids(row):
            if word is None or (word == before and not all_pieces):
                wanted.append(-100)
            elif word == before:
                wanted.append(tags.names.index(tagged[word].replace("B-", "I-")))
            else:
                wanted.append(tags.names.index(tagged[word]))
            before = word
    assert labels.tolist() == wanted
    assert len(wanted) > 5 + 4, "no word has several pieces"
    assert np.array_equal(rows.first_pieces(0)[0], [0, 1, 2])


def test_words_of_all_rows_are_found_in_time_linear_in_the_tokens() -> None:
    """A tenth of a second; with the first pieces of all rows found again for each row, most of a minute."""
    n_rows, n_tokens = 20_000, 20
    starts = np.arange(n_rows + 1, dtype=np.int64) * n_tokens
    word_of = np.tile(np.repeat(np.arange(n_tokens // 2), 2), n_rows)
    rows = WordRows(RowStore(starts, {"input_ids": np.zeros_like(word_of)}), word_of, np.arange(n_rows))
    began = time.process_time()
    found = [rows.first_pieces(row) for row in range(n_rows)]
    assert time.process_time() - began < 5
    assert all(np.array_equal(words, np.arange(n_tokens // 2)) for words, _ in found)
    assert all(np.array_equal(places, np.arange(0, n_tokens, 2)) for _, places in found)
