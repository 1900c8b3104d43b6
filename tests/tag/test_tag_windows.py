"""Sentences longer than a row: windows with a stride, whose logits are pooled for each word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForTokenClassification, AutoTokenizer

from text_tasks import load, load_lines, topic_rows, words, write_lines
from whet.cli.main import run
from whet.errors import EXIT_BAD_CONFIG

CLOSE = 1e-4
"""Scores of whet's operators and of transformers' differ by float32 rounding, through two layers."""
_LENGTH, _STRIDE = 12, 4


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All sentences of the corpus as one document, with words that no row holds as one piece."""
    tokens = " ".join(row["text"] for row in topic_rows()).split()
    tokens[5:5] = ["harbourharbour", "milkwave"]
    rows = [{"tokens": tokens, "tags": ["DET" if one == "the" else "X" for one in tokens]}]
    return write_lines(tmp_path_factory.mktemp("data") / "document.jsonl", rows)


@pytest.fixture(scope="module")
def tagger(word_encoder: Path, document: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "out"
    options = {"train_file": document, "validation_file": document, "max_steps": 40}
    line = words("tag", word_encoder, folder, "--do_train", "--do_eval", **options, doc_stride=_STRIDE)
    assert run([*line, "--max_seq_length", str(_LENGTH)]) == 0
    return folder


def _pooled_by_hand(folder: Path, tokens: list[str], pooling: str) -> tuple[list[str], list[float]]:
    """The tags and scores of transformers' own tokenizer and model, window by window, pooled word by word."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForTokenClassification.from_pretrained(folder).eval()
    plain = tokenizer(tokens, is_split_into_words=True, add_special_tokens=False)
    pieces, word_of = plain["input_ids"], plain.word_ids()
    room = _LENGTH - 2
    logits: dict[int, list[torch.Tensor]] = {}
    begin = 0
    while True:
        ids = [tokenizer.cls_token_id, *pieces[begin : begin + room], tokenizer.sep_token_id]
        with torch.no_grad():
            found = model(torch.tensor([ids])).logits[0, 1:-1]
        for n, values in enumerate(found, start=begin):
            if n == 0 or word_of[n] != word_of[n - 1]:
                logits.setdefault(word_of[n], []).append(values)
        if begin + room >= len(pieces):
            break
        begin += room - _STRIDE
    stacked = [torch.stack(logits[n]) for n in range(len(tokens))]
    one = [values.mean(0) if pooling == "mean" else values.max(0).values for values in stacked]
    best = [values.softmax(-1).max(-1) for values in one]
    return [model.config.id2label[int(found.indices)] for found in best], [float(found.values) for found in best]


def test_every_word_of_a_long_document_is_tagged_and_judged(tagger: Path, document: Path) -> None:
    (line,) = load_lines(tagger / "eval_predictions.jsonl")
    (row,) = load_lines(document)
    assert None not in line["tags"]
    right = sum(found == wanted for found, wanted in zip(line["tags"], row["tags"], strict=True))
    assert load(tagger, "eval_results.json")["eval_accuracy"] == pytest.approx(right / len(row["tags"]))


@pytest.mark.parametrize("pooling", ["mean", "max"])
def test_words_in_several_windows_have_pooled_scores(
    tagger: Path, document: Path, tmp_path: Path, pooling: str
) -> None:
    (row,) = load_lines(document)
    output = tmp_path / "found.jsonl"
    asked = ["predict", str(tagger), "--file", str(document), "--output", str(output), "--window_pooling", pooling]
    assert run(asked) == 0
    (line,) = load_lines(output)
    tags, scores = _pooled_by_hand(tagger, row["tokens"], pooling)
    assert line["tags"] == tags
    assert line["scores"] == pytest.approx(scores, abs=CLOSE)


def test_windows_that_cannot_move_on_are_refused(
    word_encoder: Path, document: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = words("tag", word_encoder, tmp_path / "out", "--do_train", train_file=document, doc_stride=10)
    assert run([*line, "--max_seq_length", "12"]) == EXIT_BAD_CONFIG
    assert "fix: use --max_seq_length 13 or more, or a smaller --doc_stride" in capsys.readouterr().err
