"""The engine compared with transformers' Trainer: equal curves from the same rows, and what callbacks and files get."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import transformers
from override_runs import Smoothed, class_rows, losses, ours, theirs
from tiny_runs import assert_same_weights, tiny_bert
from transformers import (
    BertForSequenceClassification,
    DataCollatorWithFlattening,
    DataCollatorWithPadding,
    TrainerCallback,
)

import engine
from tiny_decoders import tiny_decoder
from tiny_decoders import token_rows as decoder_rows


@pytest.fixture(scope="module")
def tokenizer(encoder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(encoder)


def classifier(**changes: Any) -> Any:
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 3}
    return tiny_bert(BertForSequenceClassification, **(still | changes))


def texts(tokenizer: Any, n: int = 12) -> datasets.Dataset:
    """As the course does it: batched tokenisation, text columns left in."""
    words = ["where", "is", "the", "river", "and", "a", "town", "of", "old"]
    raw = {
        "text": [" ".join(words[: 2 + i % 7]) for i in range(n)],
        "idx": list(range(n)),
        "label": [i % 3 for i in range(n)],
    }
    return datasets.Dataset.from_dict(raw).map(lambda rows: tokenizer(rows["text"]), batched=True)


def test_the_courses_example_trains_as_in_transformers(tmp_path: Path, tokenizer: Any) -> None:
    rows = texts(tokenizer)
    found = []
    for base, args in ((engine.Trainer, ours(tmp_path / "a")), (transformers.Trainer, theirs(tmp_path / "b"))):
        model = classifier(vocab_size=len(tokenizer))
        collate = DataCollatorWithPadding(tokenizer)
        trainer = base(
            model, args, train_dataset=rows, eval_dataset=rows, data_collator=collate, processing_class=tokenizer
        )
        trainer.train()
        found.append([*losses(trainer), trainer.evaluate()["eval_loss"]])
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_the_courses_example_with_a_collator_of_ones_own(tmp_path: Path, tokenizer: Any) -> None:
    """It sees the columns of the model, as transformers' does; one that asks for another column gets it."""
    seen: list[list[str]] = []

    def collate(rows: list[dict[str, Any]]) -> Any:
        seen.append(sorted(rows[0]))
        assert [row["text"] for row in rows]
        return tokenizer.pad([dict(row) for row in rows], return_tensors="pt")

    rows = texts(tokenizer).rename_column("label", "labels")
    engine.Trainer(classifier(vocab_size=len(tokenizer)), ours(tmp_path), collate, rows).train()
    assert "text" not in seen[0]
    assert "input_ids" in seen[0]


def test_a_padding_collator_lets_a_question_answering_model_run_packed(tmp_path: Path, tokenizer: Any) -> None:
    from tiny_runs import span_rows

    collate = DataCollatorWithPadding(tokenizer)
    given = engine.Trainer(tiny_bert(), ours(tmp_path / "a"), collate, span_rows())
    plain = engine.Trainer(tiny_bert(), ours(tmp_path / "b"), None, span_rows())
    given.train()
    plain.train()
    assert given.objective.packed
    assert_same_weights(given.model, plain.model)


def test_predictions_pass_through_preprocess_logits_for_metrics(tmp_path: Path) -> None:
    seen: list[Any] = []

    def judge(prediction: Any) -> dict[str, Any]:
        seen.append(prediction.predictions)
        return {"right": (prediction.predictions == prediction.label_ids).mean(), "array": np.float32(0.5)}

    rows, best = class_rows(), lambda logits, labels: logits.argmax(-1)
    trainer = engine.Trainer(
        Smoothed(), ours(tmp_path), eval_dataset=rows, compute_metrics=judge, preprocess_logits_for_metrics=best
    )
    metrics = trainer.evaluate()
    assert seen[0].shape == (14,)
    assert type(metrics["eval_array"]) is float
    trainer.save_metrics("eval", metrics)
    assert json.loads((tmp_path / "eval_results.json").read_text())["eval_array"] == 0.5


def test_callbacks_are_told_what_transformers_tells_them(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    class Looks(TrainerCallback):
        def on_epoch_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
            seen.update(known)

    rows = class_rows()
    trainer = engine.Trainer(
        Smoothed(), ours(tmp_path, eval_strategy="epoch"), train_dataset=rows, eval_dataset=rows, callbacks=[Looks]
    )
    trainer.train()
    assert {"model", "processing_class", "optimizer", "lr_scheduler"} <= seen.keys()


def test_metrics_and_state_are_written(tmp_path: Path) -> None:
    trainer = engine.Trainer(Smoothed(), ours(tmp_path), train_dataset=class_rows(), eval_dataset=class_rows(5))
    metrics = trainer.train().metrics
    trainer.save_metrics("train", metrics)
    trainer.save_metrics("eval", trainer.evaluate())
    trainer.save_state()
    assert {"train_loss", "eval_loss"} <= json.loads((tmp_path / "all_results.json").read_text()).keys()
    assert json.loads((tmp_path / "trainer_state.json").read_text())["global_step"] == 4


@pytest.mark.filterwarnings("ignore:Using .DataCollatorWithFlattening:UserWarning")  # asks for flash kernels
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("more", "ours_alone", "shared"),
    [
        ({}, {}, {}),
        ({"return_flash_attn_kwargs": True, "return_seq_idx": True}, {}, {}),
        ({}, {"attn_implementation": "eager"}, {}),
        ({}, {}, {"gradient_checkpointing": True}),
    ],
    ids=["positions", "named", "eager", "checkpointing"],
)
def test_sequences_end_to_end_train_as_in_transformers(
    tmp_path: Path, more: dict[str, bool], ours_alone: dict[str, Any], shared: dict[str, Any]
) -> None:
    """DataCollatorWithFlattening with a model whose configuration has a cache, which both Trainers leave out."""
    rows, found = decoder_rows(12), []
    shared = {"per_device_eval_batch_size": 12} | shared
    for base, args in (
        (engine.Trainer, ours(tmp_path / "a", **shared, **ours_alone)),
        (transformers.Trainer, theirs(tmp_path / "b", **shared)),
    ):
        model, collate = tiny_decoder("llama"), DataCollatorWithFlattening(**more)
        trainer: Any = base(model, args, collate, rows, rows)
        trainer.train()
        found.append([*losses(trainer), trainer.evaluate()["eval_loss"]])
        assert model.config.use_cache is (base is engine.Trainer)
    assert found[0] == pytest.approx(found[1], rel=1e-5)  # float32 rounding; rows that see each other are 1e-3 off
