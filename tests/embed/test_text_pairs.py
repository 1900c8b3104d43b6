"""Which files `whet embed` and `whet rerank` read as pairs, triplets and scores, and which they refuse."""

from __future__ import annotations

import csv
import json
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from whet.cli.commands import command
from whet.cli.main import run
from whet.config.command_line import load
from whet.errors import ConfigError, DataError
from whet.tasks.embed import pairs
from whet.tasks.embed.arguments import EmbedArguments
from whet.tasks.embed.pairs import Pairs, read_pairs, read_split, read_texts

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
    "usual names in another order": ("context,page_id,question\ne f,1,a b\ng h,2,c d\n", PAIR),
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
    "Quora's": (
        "id,qid1,qid2,question1,question2,is_duplicate\n0,1,2,a b,e f,1\n1,3,4,c d,g h,0\n",
        {"sentence_A": ["a b", "c d"], "sentence_B": ["e f", "g h"], "score": [1.0, 0.0]},
    ),
    "SICK's": (
        "pair_ID,sentence_A,sentence_B,relatedness_score,entailment_judgment\n1,a b,e f,5,NEUTRAL\n2,c d,g h,2,X\n",
        {"sentence_A": ["a b", "c d"], "sentence_B": ["e f", "g h"], "score": [1.0, 0.4]},
    ),
    "labels that are 0 or 1": (
        "sentence1,sentence2,label\na b,e f,1\nc d,g h,0\n",
        {"sentence_A": ["a b", "c d"], "sentence_B": ["e f", "g h"], "score": [1.0, 0.0]},
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


def test_a_column_that_an_option_names_is_a_score_whatever_its_numbers(tmp_path: Path) -> None:
    text = "premise,hypothesis,label\na b,e f,0\nc d,g h,2\n"
    assert read(tmp_path, text, score_column_name="label").scores == [0.0, 0.4]


def test_named_texts_are_pairs_next_to_numbers(tmp_path: Path) -> None:
    text = "question,answer,year\na b,e f,1999\nc d,g h,2000\n"
    assert read(tmp_path, text, anchor_column_name="question", positive_column_name="answer").columns() == PAIR


_FLAT = [
    {"id": "1", "title": "key", "context": "Ada found the key.", "question": "Who found it?",
     "answers": {"text": ["Ada"], "answer_start": [0]}, "is_impossible": False},
    {"id": "2", "title": "key", "context": "Ada found the key.", "question": "Who lost it?",
     "answers": {"text": [], "answer_start": []}, "is_impossible": True},
]  # fmt: skip


@pytest.mark.parametrize("form", ["JSON lines", "without is_impossible", "answers apart", "CSV", "Parquet", "data set"])
def test_questions_without_an_answer_are_left_out_of_flat_squad_too(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{name: value for name, value in row.items() if name != "is_impossible"} for row in _FLAT]
    if form in ("Parquet", "data set"):
        (tmp_path / "data").mkdir()
        Dataset.from_list(rows).to_parquet(tmp_path / "data" / "train.parquet")
    if form == "data set":
        monkeypatch.setattr(pairs, "require_package", lambda: None)  # no model is loaded
        found = read_split(EmbedArguments(model_name_or_path="m", dataset_name=str(tmp_path / "data")), "train")
    elif form == "Parquet":
        path = tmp_path / "data" / "train.parquet"
        found = read_pairs(path, EmbedArguments(model_name_or_path="m", train_file=str(path)))
    elif form == "CSV":
        table = StringIO()
        lines = csv.writer(table)
        lines.writerows([rows[0].keys(), *([*map(as_cell, row.values())] for row in rows)])
        found = read(tmp_path, table.getvalue())
    else:
        apart = [{"context": row["context"], "question": row["question"], "answer_start": n,
                  "answer_text": "".join(row["answers"]["text"])} for n, row in enumerate(_FLAT)]  # fmt: skip
        chosen: Any = {"JSON lines": _FLAT, "answers apart": apart}.get(form, rows)
        found = read(tmp_path, "\n".join(map(json.dumps, chosen)), "pairs.jsonl")
    assert found.columns() == {"anchor": ["Who found it?"], "positive": ["Ada found the key."]}
    assert "1 question without an answer not read" in found.notes


def as_cell(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def test_numbers_with_gaps_are_numbers_in_parquet_too(tmp_path: Path) -> None:
    path = tmp_path / "pairs.parquet"
    Dataset.from_dict({"query": ["a", "b"], "answer": ["c", "d"], "fits": [float("nan"), 1.0]}).to_parquet(path)
    with pytest.raises(DataError, match="not read: fits"):
        read_pairs(path, EmbedArguments(model_name_or_path="m", train_file=str(path)))


REFUSED = {
    "classes of NLI": ("premise,hypothesis,label\na,b,0\nc,d,2\ne,f,1\n", "label may hold numbers of classes"),
    "two classes of NLI": ("premise,hypothesis,label\na,b,0\nc,d,1\n", "label may hold numbers of classes"),
    "classes of any pair": ("sentence1,sentence2,labels\na,b,0\nc,d,2\n", "labels may hold numbers of classes"),
    "classes behind two texts": ("one,two,kind\na,b,0\nc,d,2\n", "kind may hold numbers of classes"),
    "numbers next to usual names": ("query,answer,fits\na,b,1\nc,d,0\n", "not known whether all pairs belong"),
    "truth next to usual names": ("query,answer,good\na,b,True\nc,d,\n", "not known whether all pairs belong"),
    "classes by name": ("sentence1,sentence2,gold_label\na,b,neutral\n", "not known whether all pairs belong"),
    "a score and negatives": ("query,positive,negative,score\na,b,c,1\nd,e,f,0\n", "a score and texts that do not"),
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


def settings_of(*words: str) -> Any:
    """Return the settings of the training."""
    given = ["--model_name_or_path", "m", "--train_file", "p.csv", "--validation_file", "p.csv", "--do_train"]
    return load(command("embed"), [*given, "--output_dir", "out", *words]).settings[-1]


def test_a_schedule_without_warm_up_is_taken_as_it_is() -> None:
    assert settings_of().warmup_ratio == 0.1
    assert settings_of("--lr_scheduler_type", "constant").warmup_ratio == 0.0
    with pytest.raises(ConfigError, match="the constant schedule has no warm-up"):
        settings_of("--lr_scheduler_type", "constant", "--warmup_ratio", "0.1")


def test_more_of_a_metric_is_better() -> None:
    words = ["--lr_scheduler_type", "reduce_lr_on_plateau", "--eval_strategy", "epoch"]
    found = settings_of(*words, "--lr_scheduler_kwargs", '{"patience": 2}')
    assert (found.warmup_ratio, found.lr_scheduler_kwargs) == (0.0, {"mode": "max", "patience": 2})
    assert settings_of(*words, "--lr_scheduler_kwargs", '{"mode": "min"}').lr_scheduler_kwargs == {"mode": "min"}
    with pytest.raises(ConfigError, match="the worst model would be taken for the best"):
        settings_of(*words, "--greater_is_better", "false")


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


def test_lines_of_a_plain_text_end_where_editors_end_them(tmp_path: Path) -> None:
    path = tmp_path / "texts.txt"
    path.write_bytes("one\u2028two\x0cthree\x85four\r\n\rfive\x1esix\n\n".encode())
    found = read_texts(path, None, None)
    assert found.texts == ["one\u2028two\x0cthree\x85four", "five\x1esix"]
    assert (found.places, found.n_blank) == (["line 1", "line 3"], 1)


def test_texts_to_predict_are_in_the_column_of_the_training(tmp_path: Path) -> None:
    (tmp_path / "both.csv").write_text("id,title,question\n1,a b,c d\n")
    (tmp_path / "other.csv").write_text("id,question\n1,c d\n")
    (tmp_path / "pairs.csv").write_text("title,body\na b,c d\n")
    both, other = (read_texts(tmp_path / f"{name}.csv", None, None, trained=["title"]) for name in ("both", "other"))
    assert (both.texts, both.read) == (["a b"], "text: title; not read: id, question")
    assert (both.column, other.column) == ("title", "question")
    assert (other.texts, other.read) == (
        ["c d"], "text: question; not read: id; it has no title, which the training read"
    )  # fmt: skip
    with pytest.raises(DataError, match="it is not known which column holds the text"):
        read_texts(tmp_path / "pairs.csv", None, None, trained=["title", "body"])
    assert read_texts(tmp_path / "pairs.csv", "body", None, trained=["title", "body"]).texts == ["c d"]


def test_the_reader_says_which_columns_the_model_learns_from(tmp_path: Path) -> None:
    named = {"anchor_column_name": "title", "positive_column_name": "body"}
    found = read(tmp_path, "question,title,body,answer\na b,c d,e f,g h\ni j,k l,m n,o p\n", **named).read
    assert found is not None
    assert (found.anchor, found.positive) == ("title", "body")
