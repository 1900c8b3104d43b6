"""What a run of `whet tag` says of each sentence: every prediction, and which entities and words are wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForTokenClassification, AutoTokenizer

from text_tasks import load, load_lines, topic_rows, words, write_lines
from whet.cli.main import run
from whet.tasks.tag.job import entities

CLOSE = 1e-4
"""Scores of whet's operators and of transformers' differ by float32 rounding, through two layers."""
_ENTITIES = {"harbour": "B-PLACE", "bow": "B-PLACE", "oven": "B-PLACE", "bread": "B-FOOD", "cake": "B-FOOD"}


def _sentences() -> list[dict[str, Any]]:
    """Sentences with entities: "the harbour" is one of two words."""
    rows = []
    for row in topic_rows():
        tokens = row["text"].split()
        tags = [_ENTITIES.get(token, "O") for token in tokens]
        for n, tag in enumerate(tags):
            if tag == "B-PLACE":
                tags[n - 1 : n + 1] = ["B-PLACE", "I-PLACE"]
        rows.append({"tokens": tokens, "ner_tags": tags})
    return rows


@pytest.fixture(scope="module")
def tagger(word_encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a run that learns twelve sentences by heart."""
    folder = tmp_path_factory.mktemp("runs") / "out"
    options = {"train_file": write_lines(folder.parent / "train.jsonl", _sentences()), "num_train_epochs": 80}
    assert run(words("tag", word_encoder, folder, "--do_train", **options)) == 0
    return folder


def _changed() -> list[dict[str, Any]]:
    """The sentences, in two of which the data says something else than the model has learnt."""
    rows = _sentences()
    n = next(n for n, row in enumerate(rows) if "harbour" in row["tokens"])
    rows[n]["ner_tags"][-2:] = ["O", "B-FOOD"]  # the boat lay in the harbour
    n = next(n for n, row in enumerate(rows) if "cake" in row["tokens"])
    rows[n]["ner_tags"] = ["O"] * len(rows[n]["tokens"])
    return rows


def _by_transformers(folder: Path, row: dict[str, Any]) -> torch.Tensor:
    """The log-probability of each word's expected tag, by transformers' own model and tokenizer."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForTokenClassification.from_pretrained(folder)
    encoded = tokenizer(row["tokens"], is_split_into_words=True, return_tensors="pt")
    with torch.no_grad():
        shares = model.eval()(**encoded).logits[0].log_softmax(-1)
    places = [encoded.word_ids(0).index(n) for n in range(len(row["tokens"]))]
    return shares[places, [model.config.label2id[tag] for tag in row["ner_tags"]]]


@pytest.mark.slow
def test_errors_name_entities_and_words(tagger: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = _changed()
    file = write_lines(tmp_path / "changed.jsonl", rows)
    assert run(words("tag", tagger, tmp_path / "out", "--do_eval", validation_file=file)) == 0
    errors = load_lines(tmp_path / "out" / "errors.jsonl")
    first = {line["text"]: line for line in errors[:2]}
    harbour, cake = first["the boat lay in the harbour"], first["the cake was sweet"]
    assert (harbour["expected"], harbour["predicted"]) == (["harbour (FOOD)"], ["the harbour (PLACE)"])
    assert [(one["word"], one["token"], one["expected"], one["predicted"]) for one in harbour["wrong_words"]] == [
        (4, "the", "O", "B-PLACE"),
        (5, "harbour", "B-FOOD", "I-PLACE"),
    ]
    assert (cake["expected"], cake["predicted"]) == ([], ["cake (FOOD)"])
    assert all(line["expected"] == line["predicted"] and not line["wrong_words"] for line in errors[2:])
    every = load_lines(tmp_path / "out" / "eval_predictions.jsonl")
    for row, line in zip(rows, every, strict=True):
        assert (line["text"], line["expected"]) == (" ".join(row["tokens"]), row["ner_tags"])
        shares = _by_transformers(tagger, row)
        assert line["loss"] == pytest.approx(-float(shares.mean()), abs=CLOSE)
        wrong = [one != other for one, other in zip(line["expected"], line["predicted"], strict=True)]
        asked = shares[torch.tensor(wrong)] if any(wrong) else shares
        assert line["probability"] == pytest.approx(float(asked.min().exp()), abs=CLOSE)
    results = load(tmp_path / "out", "eval_results.json")
    weights = [len(row["tokens"]) for row in rows]
    assert np.average([line["loss"] for line in every], weights=weights) == pytest.approx(
        results["eval_loss"], abs=CLOSE
    )
    assert [results[f"eval_examples_{name}"] for name in ("wrong", "judged", "listed")] == [2, 12, 12]
    said = capsys.readouterr().out
    assert "wrong: 2 of 12 examples, the worst first in errors.jsonl" in said
    assert "nothing cake (FOOD) the cake was sweet" in " ".join(said.split())


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [{}, {"max_seq_length": 9, "doc_stride": 3}, {"max_seq_length": 7}])
def test_rows_and_words_that_are_left_out_do_not_shift_the_others(
    tagger: Path, tmp_path: Path, lengths: dict[str, int]
) -> None:
    """Without a stride, the words after the seventh token have no tag, and are neither right nor wrong."""
    rows: list[dict[str, Any]] = _changed()
    rows.insert(0, {"tokens": [], "ner_tags": []})
    rows.insert(3, {"tokens": ["one", "two"], "ner_tags": ["O"]})
    file = write_lines(tmp_path / "changed.jsonl", rows)
    options = {"validation_file": file, "max_eval_samples": 12, "per_device_eval_batch_size": 3} | lengths
    assert run(words("tag", tagger, tmp_path / "out", "--do_eval", "--skip_bad", **options)) == 0
    every = load_lines(tmp_path / "out" / "eval_predictions.jsonl")
    assert [line["row"] for line in every] == [f"line {n + 1}" for n in range(12) if n not in (0, 3)]
    learnt = {" ".join(row["tokens"]): row["ner_tags"] for row in _sentences()}
    cut = lengths == {"max_seq_length": 7}
    for line in every:
        row = rows[int(line["row"].split()[1]) - 1]
        assert (line["text"], line["expected"]) == (" ".join(row["tokens"]), row["ner_tags"])
        if not lengths:
            assert line["predicted"] == learnt[line["text"]]
        assert [tag is None for tag in line["predicted"]] == [cut and n > 4 for n in range(len(row["tokens"]))]
    errors = load_lines(tmp_path / "out" / "errors.jsonl")
    assert {line["row"] for line in errors} == {line["row"] for line in every}
    for line in errors:
        judged = next(one for one in every if one["row"] == line["row"])
        wrong = [n for n, tag in enumerate(judged["predicted"]) if tag not in (None, judged["expected"][n])]
        assert [one["word"] for one in line["wrong_words"]] == wrong
        assert all(one["probability"] <= 0.5 for one in line["wrong_words"])
    n_wrong = load(tmp_path / "out", "eval_results.json")["eval_examples_wrong"]
    assert [bool(line["wrong_words"]) for line in errors] == [n < n_wrong for n in range(len(errors))]


def test_errors_of_a_test_split_are_those_of_sentences_with_known_tags(tagger: Path, tmp_path: Path) -> None:
    rows = _changed()
    rows[0].pop("ner_tags")
    rows[1]["ner_tags"] = ["B-NEW"] * len(rows[1]["tokens"])
    file = write_lines(tmp_path / "test.jsonl", rows)
    asked = words("tag", tagger, tmp_path / "out", "--do_predict", test_file=file)
    assert run(asked) == 0
    every = load_lines(tmp_path / "out" / "predict_predictions.jsonl")
    assert [line["expected"] for line in every] == [row.get("ner_tags") for row in rows]
    learnt = _sentences()
    wrong = {f"line {n + 1}" for n in range(2, 12) if rows[n]["ner_tags"] != learnt[n]["ner_tags"]}
    errors = load_lines(tmp_path / "out" / "predict_errors.jsonl")
    assert {line["row"] for line in errors} == {f"line {n + 1}" for n in range(2, 12)}
    assert {line["row"] for line in errors if line["wrong_words"]} == wrong
    assert {line["row"] for line in errors[: len(wrong)]} == wrong
    write_lines(file, [{"tokens": row["tokens"]} for row in rows])
    assert run(asked) == 0
    assert not (tmp_path / "out" / "predict_errors.jsonl").exists()


def test_plain_tags_are_named_by_word(word_encoder: Path, tmp_path: Path) -> None:
    rows = [{"tokens": row["tokens"], "upos": ["DET" if one == "the" else "X" for one in row["tokens"]]}
            for row in _sentences()]  # fmt: skip
    train = write_lines(tmp_path / "train.jsonl", rows)
    changed = [{**rows[0], "upos": ["X"] * len(rows[0]["tokens"])}, *rows[1:]]
    options = {"train_file": train, "validation_file": write_lines(tmp_path / "changed.jsonl", changed)}
    flags = ("--do_train", "--do_eval", "--task_name", "pos")
    assert run(words("tag", word_encoder, tmp_path / "out", *flags, **options, num_train_epochs=40)) == 0
    worst = load_lines(tmp_path / "out" / "errors.jsonl")[0]
    assert worst["expected"] == ["the (X)"] * rows[0]["tokens"].count("the")
    assert worst["predicted"] == ["the (DET)"] * rows[0]["tokens"].count("the")


_MARKS = st.lists(st.sampled_from(["O", "B-A", "I-A", "E-A", "S-A", "B-B", "I-B", "E-B", "S-B"]), max_size=8)


@given(tags=_MARKS)
def test_entities_are_those_of_seqeval(tags: list[str]) -> None:
    labeling = pytest.importorskip("seqeval.metrics.sequence_labeling", reason="seqeval is not installed")
    assert entities(tags) == [(kind, begin, end + 1) for kind, begin, end in labeling.get_entities(tags)]
    bilou = [{"E": "L", "S": "U"}.get(tag[0], tag[0]) + tag[1:] for tag in tags]
    assert entities(bilou) == entities(tags)
