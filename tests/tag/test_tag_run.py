"""`whet tag` from the command line to the files: entities by seqeval, plain tags, prediction, kill and resume."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForTokenClassification, AutoTokenizer

from text_tasks import load, load_lines, topic_rows, words, write_lines
from whet.cli.main import run
from whet.errors import EXIT_BAD_CONFIG, EXIT_BAD_DATA
from whet.tasks.tag.job import Tags, metrics_of_tags

CLOSE = 1e-4
"""Scores of whet's operators and of transformers' differ by float32 rounding, through two layers."""
_DEADLINE_S = 300.0
_THINGS = {"boat", "harbour", "sail", "bow", "anchor", "dough", "bowl", "bread", "oven", "flour", "milk", "roses"}


def _sentences() -> list[dict[str, Any]]:
    """Sentences whose things are entities: "the bowl" is B-THING I-THING."""
    rows = []
    for row in topic_rows():
        tokens = row["text"].split()
        tags = ["O"] * len(tokens)
        for n, token in enumerate(tokens):
            if token in _THINGS and n > 0 and tokens[n - 1] == "the":
                tags[n - 1 : n + 1] = ["B-THING", "I-THING"]
            elif token in _THINGS:
                tags[n] = "B-THING"
        rows.append({"tokens": tokens, "ner_tags": tags})
    return rows


@pytest.fixture(scope="module")
def things(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of sentences with entities."""
    return write_lines(tmp_path_factory.mktemp("data") / "things.jsonl", _sentences())


@pytest.fixture(scope="module")
def tagger(word_encoder: Path, things: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a run that learns twelve sentences by heart."""
    pytest.importorskip("seqeval", reason="seqeval is not installed")
    folder = tmp_path_factory.mktemp("runs") / "out"
    asked = [{"tokens": ["the", "boat", "fell"]}, {"tokens": ["sweet", "milk"]}]
    test = write_lines(folder.parent / "test.jsonl", asked)
    flags = ("--do_train", "--do_eval", "--do_predict", "--return_entity_level_metrics")
    files = {"train_file": things, "validation_file": things, "test_file": test}
    line = words("tag", word_encoder, folder, *flags, **files, num_train_epochs=80)
    assert run(line) == 0
    return folder


@pytest.mark.slow
def test_a_run_learns_entities_and_reports_them_by_seqeval(tagger: Path) -> None:
    results = load(tagger, "all_results.json")
    assert results["eval_f1"] == results["eval_precision"] == results["eval_recall"] == 1.0
    assert results["eval_THING_f1"] == 1.0
    assert results["eval_THING_number"] == sum(row["ner_tags"].count("B-THING") for row in _sentences())
    assert results["train_samples"] == 12


def test_transformers_reads_tags_and_weights(tagger: Path) -> None:
    model = AutoModelForTokenClassification.from_pretrained(tagger).eval()
    assert model.config.id2label == {0: "B-THING", 1: "I-THING", 2: "O"}
    tokenizer = AutoTokenizer.from_pretrained(tagger)
    first, second = load_lines(tagger / "predict_predictions.jsonl")
    encoded = tokenizer(first["tokens"], is_split_into_words=True, return_tensors="pt")
    with torch.no_grad():
        scores = model(**encoded).logits[0].softmax(-1).max(-1)
    places = [encoded.word_ids(0).index(n) for n in range(3)]
    assert first["tags"] == [model.config.id2label[int(scores.indices[place])] for place in places]
    assert first["scores"] == pytest.approx([float(scores.values[place]) for place in places], abs=CLOSE)
    assert (tagger / "predictions.txt").read_text() == f"{' '.join(first['tags'])}\n{' '.join(second['tags'])}\n"


def test_plain_tags_are_judged_by_accuracy_and_macro_f1(word_encoder: Path, tmp_path: Path) -> None:
    rows = [{"tokens": row["tokens"], "tags": ["DET" if token == "the" else "X" for token in row["tokens"]]}
            for row in _sentences()]  # fmt: skip
    file = write_lines(tmp_path / "plain.jsonl", rows)
    options = {"train_file": file, "validation_file": file, "num_train_epochs": 60, "task_name": "pos"}
    line = words("tag", word_encoder, tmp_path / "out", "--do_train", "--do_eval", **options)
    assert run(line) == 0
    results = load(tmp_path / "out", "eval_results.json")
    assert results["eval_accuracy"] == results["eval_f1_macro"] == 1.0
    assert "eval_f1" not in results


def test_metrics_of_each_entity_are_refused_for_plain_tags(
    word_encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"tokens": row["tokens"], "tags": ["DET" if token == "the" else "X" for token in row["tokens"]]}
            for row in _sentences()]  # fmt: skip
    file = write_lines(tmp_path / "plain.jsonl", rows)
    line = words("tag", word_encoder, tmp_path / "out", "--do_train", train_file=file, max_steps=1)
    assert run([*line, "--return_entity_level_metrics"]) == EXIT_BAD_CONFIG
    said = " ".join(capsys.readouterr().err.split())
    assert "return_entity_level_metrics would change nothing here" in said
    assert "plain tags: DET, X" in said


def test_unknown_tags_in_the_evaluation_end_the_run(
    tagger: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_lines(tmp_path / "odd.jsonl", [{"tokens": ["we", "dug"], "ner_tags": ["O", "B-ACT"]}])
    assert run(words("tag", tagger, tmp_path / "out", "--do_eval", validation_file=file)) == EXIT_BAD_DATA
    told = capsys.readouterr().err
    assert "line 1, word 2 ('dug')" in told
    assert "got: B-ACT" in told


def test_words_that_are_cut_are_counted_and_have_no_tag(
    tagger: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_lines(tmp_path / "long.jsonl", [{"tokens": ["bread"] * 40}])
    assert run(words("tag", tagger, tmp_path / "out", "--do_predict", test_file=file, max_seq_length=12)) == 0
    printed = capsys.readouterr()
    assert "30 words are not read" in printed.out + printed.err
    (found,) = load_lines(tmp_path / "out" / "predict_predictions.jsonl")
    assert found["tags"][10:] == [None] * 30
    assert None not in found["tags"][:10]


def test_without_seqeval_accuracy_alone_is_reported(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    import numpy as np

    from whet.log import logger

    monkeypatch.setitem(sys.modules, "seqeval", None)
    monkeypatch.setitem(sys.modules, "seqeval.metrics", None)
    monkeypatch.setattr(logger, "propagate", True)
    numbers = [np.array([0, 1])]
    assert metrics_of_tags(numbers, numbers, Tags(("B-A", "O")), each_entity=False) == {"accuracy": 1.0}
    assert "pip install 'whet-train[tag]'" in caplog.text


def _best_by_f1(model: Path, output: Path, file: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What a run says that shall keep the model with the best F1, and is refused before its training."""
    options = {"train_file": file, "validation_file": file, "eval_strategy": "epoch", "save_strategy": "epoch"}
    asked = ("--do_train", "--do_eval", "--load_best_model_at_end")
    assert run(words("tag", model, output, *asked, **options, metric_for_best_model="f1")) == EXIT_BAD_CONFIG
    assert not [*output.rglob("checkpoint-*")]
    return " ".join(capsys.readouterr().err.split())


def test_the_best_f1_of_entities_needs_seqeval_before_the_training(
    word_encoder: Path,
    things: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "seqeval", None)
    monkeypatch.setitem(sys.modules, "seqeval.metrics", None)
    said = _best_by_f1(word_encoder, tmp_path / "out", things, capsys)
    assert "--metric_for_best_model f1 needs it" in said
    assert "pip install 'whet-train[tag]'" in said


def test_plain_tags_have_no_f1_of_entities_to_choose_by(
    word_encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"tokens": row["tokens"], "tags": ["DET" if token == "the" else "X" for token in row["tokens"]]}
            for row in _sentences()]  # fmt: skip
    said = _best_by_f1(word_encoder, tmp_path / "out", write_lines(tmp_path / "plain.jsonl", rows), capsys)
    assert "an evaluation then computes accuracy, f1_macro, loss" in said


@pytest.mark.reliability
@pytest.mark.slow
def test_a_killed_tagging_run_resumes_bitwise(word_encoder: Path, things: Path, tmp_path: Path) -> None:
    def line(folder: Path) -> list[str]:
        flags = words("tag", word_encoder, folder, "--do_train", train_file=things, max_steps=600,
                      save_strategy="steps", save_steps=20)  # fmt: skip
        return [sys.executable, "-m", "whet", *flags]

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert subprocess.run(line(whole), capture_output=True, check=False).returncode == 0
    process = subprocess.Popen(line(cut), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    give_up = time.monotonic() + _DEADLINE_S
    while not (cut / "checkpoint-20" / "MANIFEST.json").exists():
        assert process.poll() is None
        assert time.monotonic() < give_up
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() != 0
    resumed = [*line(cut), "--resume_from_checkpoint", "auto"]
    assert subprocess.run(resumed, capture_output=True, check=False).returncode == 0
    found, wanted = (load_file(folder / "model.safetensors") for folder in (cut, whole))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_lines_about_the_data_fit_the_terminal(
    word_encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    long = {"tokens": ["the", "boat", "lay"] * 10, "ner_tags": ["DET", "X", "X"] * 10}
    train = write_lines(tmp_path / "long.jsonl", [long] * 3)
    assert run(words("tag", word_encoder, tmp_path / "out", "--do_train", train_file=train, max_steps=1)) == 0
    shown = capsys.readouterr().out.splitlines()
    assert any("the first tagged sentence is the (DET)" in line for line in shown)
    assert max(map(len, shown)) <= 80
