"""Rows that do not fit the model end with four parts that name the fault, in training and in evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

import engine
import whet
from saved_decoder import save_decoder
from tiny import arguments, tiny_config
from tiny_decoders import tiny_decoder
from whet.models import packed
from whet.models.bad_batch import outside_of_tables

CLASSES, TAGS = AutoModelForSequenceClassification, AutoModelForTokenClassification
WORDS, SPANS = AutoModelForMaskedLM, AutoModelForQuestionAnswering
IDS = [5, 6, 7, 8]
LONG = [5] * 100
BAD: dict[str, tuple[Any, Any, str, str]] = {
    "text": (CLASSES, {"text": "hello", "label": 1}, "no input_ids", "tokenizer(row['text']"),
    "text of words": (TAGS, {"tokens": ["a"], "ner_tags": [0]}, "no input_ids", "tokenise"),
    "questions": (SPANS, {"question": "a", "context": "b"}, "no input_ids", "tokenise"),
    "label too large": (CLASSES, {"input_ids": IDS, "label": 7}, "label 7", "num_labels=8"),
    "label below 0": (CLASSES, {"input_ids": IDS, "label": -1}, "label -1", "from 0"),
    "label of text": (CLASSES, {"input_ids": IDS, "label": "yes"}, "label holds text", "class_encode_column"),
    "label with a fraction": (CLASSES, {"input_ids": IDS, "label": 1.0}, "float32", "int(label)"),
    "tag too large": (TAGS, {"input_ids": IDS, "labels": [0, 1, 2, 1]}, "label 2", "num_labels=3"),
    "tags of text": (TAGS, {"input_ids": IDS, "labels": ["O"] * 4}, "labels holds text", "number"),
    "too few tags": (TAGS, {"input_ids": IDS, "labels": [0, 1]}, "another shape", "-100"),
    "word too large": (WORDS, {"input_ids": IDS, "labels": [0, 1, 2, 333]}, "label 333", "the model's own tokens"),
    "too long": (CLASSES, {"input_ids": LONG, "label": 1}, "100 tokens", "max_length=80"),
    "too long for spans": (
        SPANS,
        {"input_ids": LONG, "start_positions": 1, "end_positions": 1},
        "max_position_embeddings 80",
        "--max_seq_length 80",
    ),
    "unknown token": (CLASSES, {"input_ids": [500], "label": 1}, "input_ids 500", "resize_token_embeddings"),
    "token below 0": (CLASSES, {"input_ids": [-5], "label": 1}, "input_ids -5", "tokenizer"),
    "unknown type": (CLASSES, {"input_ids": [5], "token_type_ids": [3], "label": 1}, "token_type_ids 3", "leave"),
    "no token": (CLASSES, {"input_ids": [], "label": 1}, "not token ids", "empty rows"),
    "no names": (CLASSES, ([1, 2], 1), "no named columns", "dicts"),
}
ROWS = pytest.mark.parametrize(("head", "row", "said", "fix"), BAD.values(), ids=BAD)


def new(head: Any, family: str = "bert", **changes: Any) -> Any:
    torch.manual_seed(0)
    return head.from_config(tiny_config(family, **changes))


def refusal(run: Any) -> tuple[str, str]:
    """Return what the error says, and its fix."""
    with pytest.raises(whet.WhetError) as caught:
        run()
    return str(caught.value), caught.value.problems[0].fix


@ROWS
def test_training_on_bad_rows_says_what_is_wrong(head: Any, row: Any, said: str, fix: str, tmp_path: Path) -> None:
    text, way = refusal(engine.Trainer(new(head), arguments(tmp_path), train_dataset=[row] * 8).train)
    assert said in text
    assert fix in way


@pytest.mark.parametrize("name", ["text", "label too large", "too long", "label of text"])
def test_evaluating_bad_rows_says_what_is_wrong(name: str, tmp_path: Path) -> None:
    head, row, said, fix = BAD[name]
    text, way = refusal(engine.Trainer(new(head), arguments(tmp_path), eval_dataset=[row] * 8).evaluate)
    assert said in text
    assert fix in way


def test_a_family_that_numbers_from_its_padding_token_names_the_length_that_fits(tmp_path: Path) -> None:
    model, row = new(CLASSES, "roberta", pad_token_id=1), {"input_ids": [5] * 79, "label": 1}
    text, fix = refusal(engine.Trainer(model, arguments(tmp_path), train_dataset=[row] * 8).train)
    assert "79 tokens" in text
    assert "max_length=78" in fix


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert"])
def test_an_optimised_model_names_a_sequence_that_is_too_long(family: str) -> None:
    model = whet.optimize(new(CLASSES, family))
    text, fix = refusal(lambda: model(torch.full((2, 100), 5)))
    assert "100 tokens" in text
    assert "max_position_embeddings 80" in text
    assert "truncation=True" in fix
    with pytest.raises(IndexError):  # what torch raises; loops that catch it go on working
        model(torch.full((2, 100), 5))


def test_next_words_without_labels_name_the_collator_that_makes_them(tmp_path: Path) -> None:
    for model, masked in ((tiny_decoder("llama"), False), (new(WORDS), True)):
        trainer = engine.Trainer(model, arguments(tmp_path), train_dataset=[{"input_ids": IDS}] * 8)
        text, fix = refusal(trainer.train)
        assert "rows have no labels" in text
        assert f"DataCollatorForLanguageModeling(tokenizer, mlm={masked})" in fix


def test_labels_that_no_collator_pads_name_one_that_does(tmp_path: Path) -> None:
    save_decoder(tmp_path / "decoder")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "decoder")
    tokenizer.pad_token = tokenizer.eos_token
    rows = [{"input_ids": IDS[:n], "labels": IDS[:n]} for n in (2, 3, 4, 2)] * 2
    trainer = engine.Trainer(tiny_decoder("llama"), arguments(tmp_path), train_dataset=rows, processing_class=tokenizer)
    text, fix = refusal(trainer.train)
    assert "different lengths" in text
    assert "DataCollatorForSeq2Seq" in fix


def test_the_errors_of_a_users_own_code_come_through(tmp_path: Path) -> None:
    def collate(rows: list[Any]) -> dict[str, Any]:
        raise ValueError("mine")

    trainer = engine.Trainer(new(CLASSES), arguments(tmp_path), collate, [{"input_ids": IDS, "label": 1}] * 8)
    with pytest.raises(ValueError, match="mine"):
        trainer.train()


def test_labels_that_are_left_out_and_several_labels_train(tmp_path: Path) -> None:
    several = new(CLASSES, num_labels=3, problem_type="multi_label_classification")
    for model, row in (
        (several, {"input_ids": IDS, "label": [0.0, 1.0, 0.0]}),
        (new(CLASSES, num_labels=1), {"input_ids": IDS, "label": 7.5}),
        (new(TAGS), {"input_ids": IDS, "labels": [-100, 0, 1, -100]}),
    ):
        engine.Trainer(model, arguments(tmp_path, max_steps=1), train_dataset=[row] * 4).train()


def test_text_beside_the_tokens_is_no_fault(tmp_path: Path) -> None:
    rows = [{"input_ids": IDS, "label": 1, "text": "hello"}] * 4
    engine.Trainer(new(CLASSES), arguments(tmp_path, max_steps=1), train_dataset=rows).train()


@pytest.mark.parametrize("name", ["unknown token", "token below 0", "unknown type"])
def test_ids_outside_of_the_tables_are_found_without_the_model(name: str) -> None:
    """A GPU would end the process before anybody could look for them."""
    head, row, said, fix = BAD[name]
    model, good = new(head), {"input_ids": torch.tensor([IDS])}
    bad = {column: torch.tensor([one]) for column, one in row.items() if column != "label"}
    odd = outside_of_tables(model, bad)
    assert odd is not None
    assert said in str(odd)
    assert fix in odd.problems[0].fix
    assert outside_of_tables(model, good) is None


UNKNOWN = 500
"""A token for which no model here has an embedding, such as a [PAD] that was added to a tokenizer alone."""


def padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Return the rows as a batch whose padding is a token that the model does not know."""
    longest = max(len(row["input_ids"]) for row in rows)
    places = torch.arange(longest) < torch.tensor([[len(row["input_ids"])] for row in rows])
    ids = torch.tensor([row["input_ids"] + [UNKNOWN] * (longest - len(row["input_ids"])) for row in rows])
    batch = {"input_ids": ids, "attention_mask": places.long()}
    labels = {"labels": torch.tensor([row["label"] for row in rows])} if "label" in rows[0] else {}
    return batch | labels


@pytest.mark.parametrize("by", ["engine", "own loop", "decoder in engine", "decoder in own loop"])
def test_padding_that_nobody_computes_may_be_any_token(
    by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a GPU reads ids, they are compared with the model's tables: those of the tokens that it computes."""
    monkeypatch.setattr(packed, "_is_on_gpu", lambda _: True)
    lines = [IDS[:n] for n in (4, 2, 3, 4)] * 2
    decodes = by.startswith("decoder")

    def run(lines: list[list[int]]) -> None:
        rows = [{"input_ids": one} if decodes else {"input_ids": one, "label": 1} for one in lines]

        def batch(rows: list[Any]) -> dict[str, torch.Tensor]:
            found = padded(rows)
            words = found["input_ids"].where(found["attention_mask"].bool(), -100)
            return found | {"labels": words} if decodes else found

        model = tiny_decoder("llama") if decodes else new(CLASSES)
        if by.endswith("engine"):
            engine.Trainer(model, arguments(tmp_path, max_steps=1), batch, rows).train()
        else:
            whet.optimize(model.train())(**batch(rows)).loss.backward()

    run(lines)
    text, fix = refusal(lambda: run([[*IDS[:2], UNKNOWN], *lines[1:]]))
    assert "input_ids 500" in text
    assert "resize_token_embeddings" in fix
