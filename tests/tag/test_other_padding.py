"""Tokenizers that pad on the left, and decoders whose tokenizer has no padding token, in tasks that pad rows.

What is found for each text is what transformers finds for it alone.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from saved_decoder import save_decoder
from text_tasks import examples, load, load_lines, topic_rows, words, write_csv, write_lines
from whet.cli.main import run
from whet.errors import EXIT_BAD_CONFIG

CLOSE = 1e-4
"""Scores of whet's operators and of transformers' differ by float32 rounding, through two layers."""


def _padding_on_the_left(encoder: Path, folder: Path) -> Path:
    shutil.copytree(encoder, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.padding_side = "left"
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 without a padding token, whose tokenizer would pad on the left."""
    folder = tmp_path_factory.mktemp("decoder") / "gpt2"
    save_decoder(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.padding_side = "left"
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=64, n_embd=32, n_layer=2, n_head=2, **ids)
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tagged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sentences of several lengths, with tags."""
    rows = [row["text"].split() for row in topic_rows()]
    tags = [["DET" if word == "the" else "X" for word in row] for row in rows]
    found = [{"tokens": row, "tags": of_row} for row, of_row in zip(rows, tags, strict=True)]
    return write_lines(tmp_path_factory.mktemp("data") / "tagged.jsonl", found)


def _tags_alone(folder: Path, rows: list[dict[str, Any]]) -> tuple[list[str], list[float]]:
    """Return the tags of all words and their scores, by transformers, a sentence at a time."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForTokenClassification.from_pretrained(folder).eval()
    tags, scores = list[str](), list[float]()
    for row in rows:
        encoded = tokenizer([f" {word}" for word in row["tokens"]], is_split_into_words=True, return_tensors="pt")
        with torch.no_grad():
            found = model(**encoded).logits[0].softmax(-1).max(-1)
        for place in (encoded.word_ids(0).index(n) for n in range(len(row["tokens"]))):
            tags.append(model.config.id2label[int(found.indices[place])])
            scores.append(float(found.values[place]))
    return tags, scores


@pytest.mark.parametrize(("kind", "more"), [("encoder", {}), ("encoder", {"doc_stride": 2}), ("gpt2", {})])
def test_tags_do_not_move_with_the_padding(
    kind: str, more: dict[str, Any], word_encoder: Path, gpt2: Path, tagged: Path, tmp_path: Path
) -> None:
    model = gpt2 if kind == "gpt2" else _padding_on_the_left(word_encoder, tmp_path / "left")
    options = {"train_file": tagged, "validation_file": tagged, "max_steps": 12, **more}
    assert run(words("tag", model, tmp_path / "out", "--do_train", "--do_eval", **options)) == 0
    rows, out = load_lines(tagged), tmp_path / "out"
    tags, scores = _tags_alone(out, rows)
    assert len({*tags}) == 2
    output = tmp_path / "found.jsonl"
    assert run(["predict", str(out), "--file", str(tagged), "--output", str(output)]) == 0
    for lines in (load_lines(output), load_lines(out / "eval_predictions.jsonl")):
        assert [tag for line in lines for tag in line["tags"]] == tags
        assert [score for line in lines for score in line["scores"]] == pytest.approx(scores, abs=CLOSE)
    expected = [tag for row in rows for tag in row["tags"]]
    right = sum(tag == other for tag, other in zip(tags, expected, strict=True))
    assert load(out, "eval_results.json")["eval_accuracy"] == pytest.approx(right / len(tags))


@pytest.mark.parametrize("kind", ["encoder", "gpt2"])
def test_labels_do_not_change_with_the_padding(kind: str, word_encoder: Path, gpt2: Path, tmp_path: Path) -> None:
    model = gpt2 if kind == "gpt2" else _padding_on_the_left(word_encoder, tmp_path / "left")
    file, out, output = write_csv(tmp_path / "rows.csv", topic_rows()), tmp_path / "out", tmp_path / "found.jsonl"
    assert run(words("classify", model, out, "--do_train", train_file=file, max_steps=12)) == 0
    assert run(["predict", str(out), "--file", str(file), "--output", str(output)]) == 0
    tokenizer: Any = AutoTokenizer.from_pretrained(out)
    trained = transformers.AutoModelForSequenceClassification.from_pretrained(out).eval()
    assert trained.config.pad_token_id == tokenizer.pad_token_id is not None
    with torch.no_grad():
        logits = torch.cat([trained(**tokenizer(row["text"], return_tensors="pt")).logits for row in topic_rows()])
    found = logits.softmax(-1).max(-1)
    lines = load_lines(output)
    assert [line["label"] for line in lines] == [trained.config.id2label[int(n)] for n in found.indices]
    assert [line["score"] for line in lines] == pytest.approx(found.values.tolist(), abs=CLOSE)


def test_model_of_others_without_a_padding_token_predicts(gpt2: Path, tmp_path: Path) -> None:
    """A decoder that was trained elsewhere, one row a batch, has no padding token in its configuration either."""
    folder = tmp_path / "trained"
    shutil.copytree(gpt2, folder)
    torch.manual_seed(1)
    head = transformers.GPT2ForSequenceClassification.from_pretrained(gpt2, num_labels=3)
    head.save_pretrained(folder)
    file, output = write_csv(tmp_path / "rows.csv", topic_rows()), tmp_path / "found.jsonl"
    asked = ["predict", str(folder), "--file", str(file), "--output", str(output), "--max_seq_length", "32"]
    assert run(asked) == 0
    tokenizer: Any = AutoTokenizer.from_pretrained(gpt2)
    with torch.no_grad():
        logits = [head.eval()(**tokenizer(row["text"], return_tensors="pt")).logits[0] for row in topic_rows()]
    wanted = [float(one.softmax(-1).max()) for one in logits]
    assert [line["score"] for line in load_lines(output)] == pytest.approx(wanted, abs=CLOSE)


def test_questions_are_asked_of_a_decoder_without_a_padding_token(gpt2: Path, tmp_path: Path) -> None:
    file, out, output = examples("qa", tmp_path), tmp_path / "out", tmp_path / "found.jsonl"
    options = {"train_file": file, "max_steps": 2, "doc_stride": 8, "max_seq_length": 48}
    assert run(words("qa", gpt2, out, "--do_train", **options)) == 0
    assert run(["predict", str(out), "--file", str(file), "--output", str(output)]) == 0
    assert len(load_lines(output)) == len(topic_rows())


@pytest.mark.parametrize("task", ["classify", "tag"])
def test_tokenizer_that_cannot_pad_is_refused(
    task: str, gpt2: Path, tagged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "endless"
    shutil.copytree(gpt2, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    file = tagged if task == "tag" else write_csv(tmp_path / "rows.csv", topic_rows())
    assert run(words(task, folder, tmp_path / "out", "--do_train", train_file=file, max_steps=1)) == EXIT_BAD_CONFIG
    said = " ".join(capsys.readouterr().err.split())
    assert "the tokenizer has no padding token" in said
    assert "set pad_token in tokenizer_config.json" in said
