"""Which files `whet embed` and `whet rerank` read as pairs, triplets and scores, and which they refuse."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from whet.cli.commands import command
from whet.cli.main import run
from whet.config.command_line import load
from whet.errors import ConfigError, DataError
from whet.tasks.embed.arguments import EmbedArguments
from whet.tasks.embed.pairs import Pairs, read_pairs

_SQUAD = {
    "data": [
        {
            "title": "key",
            "paragraphs": [
                {
                    "context": "Ada found the key.",
                    "qas": [
                        {"id": "1", "question": "Who found it?", "answers": [{"text": "Ada", "answer_start": 0}]},
                        {"id": "2", "question": "Who lost it?", "answers": [], "is_impossible": True},
                    ],
                }
            ],
        }
    ]
}


def read(folder: Path, text: str, name: str = "pairs.csv", **settings: Any) -> Pairs:
    path = folder / name
    path.write_text(text, "utf-8")
    return read_pairs(path, EmbedArguments(model_name_or_path="m", train_file=str(path), **settings))


PAIR = {"anchor": ["a b", "c d"], "positive": ["e f", "g h"]}
FORMS: dict[str, tuple[str, dict[str, list[Any]]]] = {
    "two columns of any names": ("frage,antwort\na b,e f\nc d,g h\n", PAIR),
    "an id before them": ("id,frage,antwort\n1,a b,e f\n2,c d,g h\n", PAIR),
    "usual names in another order": ("context,page,question\ne f,1,a b\ng h,2,c d\n", PAIR),
    "triplets": ("query,positive,negative\na b,e f,x\nc d,g h,y\n", PAIR | {"negative": ["x", "y"]}),
    "several negatives": (
        "anchor,positive,negative_1,negative_2\na b,e f,x,z\nc d,g h,y,w\n",
        PAIR | {"negative_1": ["x", "y"], "negative_2": ["z", "w"]},
    ),
    "scores of 0 to 1": (
        "one,two,fits\na b,e f,0.25\nc d,g h,1\n",
        {"sentence_A": ["a b", "c d"], "sentence_B": ["e f", "g h"], "score": [0.25, 1.0]},
    ),
    "scores of 0 to 5": (
        "sentence1,sentence2,score\na b,e f,5\nc d,g h,1\n",
        {"sentence_A": ["a b", "c d"], "sentence_B": ["e f", "g h"], "score": [1.0, 0.2]},
    ),
    "lists of positives": (
        '{"query": "a b", "pos": ["e f", "g h"], "neg": ["x"]}\n{"query": "c d", "pos": ["i"], "neg": ["y"]}\n',
        {"anchor": ["a b", "a b", "c d"], "positive": ["e f", "g h", "i"], "negative": ["x", "x", "y"]},
    ),
    "SQuAD": (json.dumps(_SQUAD), {"anchor": ["Who found it?"], "positive": ["Ada found the key."]}),
}


@pytest.mark.parametrize("form", FORMS)
def test_pairs_are_read_from_this_form(form: str, tmp_path: Path) -> None:
    text, wanted = FORMS[form]
    assert read(tmp_path, text).columns() == wanted


def test_named_columns_are_read_whatever_else_is_there(tmp_path: Path) -> None:
    text = "title,body,lead,year\na b,e f,x,1999\nc d,g h,y,2000\n"
    found = read(tmp_path, text, anchor_column_name="title", positive_column_name="body", negative_column_names="lead")
    assert found.columns() == PAIR | {"negative": ["x", "y"]}


REFUSED = {
    "three columns of texts": ("title,question,reply\na,b,c\n", "which columns hold the texts"),
    "a number among the texts": ("question,year\na,1999\n", "which columns hold the texts"),
    "no line with names": ("Can I bring it back on Sunday?,Yes you can do it\na,b\n", "which columns hold the texts"),
    "scores of another scale": ("one,two,score\na,b,7\nc,d,40\n", "has no usual scale"),
    "one score": ("one,two,score\na,b,1\nc,d,1\n", "all pairs have the same score"),
    "classes": ("premise,hypothesis,label\na,b,entailment\n", "label is a text, not a number"),
    "an empty text": ("query,positive\na b,\nc d,g h\n", "positive is empty"),
    "other numbers of negatives": (
        '{"query": "a", "pos": "b", "neg": ["x"]}\n{"query": "c", "pos": "d", "neg": ["y", "z"]}\n',
        "the row has 2 negatives, and others have 1",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_more_than_one_reading_fits_is_refused(case: str, tmp_path: Path) -> None:
    text, said = REFUSED[case]
    with pytest.raises(DataError, match=said):
        read(tmp_path, text)


def test_bad_rows_can_be_left_out_and_are_counted(tmp_path: Path) -> None:
    found = read(tmp_path, "query,positive\na b,\nc d,g h\n", skip_bad=True)
    assert (found.anchors, found.left_out.n_rows) == (["c d"], 1)


def test_settings_that_the_trainer_would_not_carry_out_are_refused_at_once() -> None:
    words = ["--model_name_or_path", "m", "--train_file", "p.csv", "--do_train", "--zero_stage", "2", "--lora_r", "4",
             "--auto", "--mini_batch_size", "4", "--precision", "int8", "--anchor_column_name", "a",
             "--matryoshka_dims", "64,x"]  # fmt: skip
    with pytest.raises(ConfigError) as refused:
        load(command("embed"), words)
    for said in (
        "zero_stage would change nothing here", "lora_r would change nothing here", "auto would change nothing here",
        "mini-batches are given to a loss without them", "a format that these models do not train in",
        "one column of a pair is named, and not the other", "matryoshka_dims are no lengths of vectors",
    ):  # fmt: skip
        assert said in str(refused.value)


@pytest.mark.skipif(find_spec("sentence_transformers") is not None, reason="sentence-transformers is installed here")
@pytest.mark.parametrize("words", ["embed --train_file p.csv --model_name_or_path {m} --do_train --output_dir {out}",
                                   "search {m} --corpus p.csv --query x"])  # fmt: skip
def test_missing_package_is_named_with_what_installs_it(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.csv").write_text("a,b\nc,d\ne,f\n")
    (tmp_path / "m").mkdir()
    assert run(words.format(m="m", out="out").split()) == 78
    assert "pip install 'whet-train[embed]'" in capsys.readouterr().err
