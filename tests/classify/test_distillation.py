"""`--teacher_model`: the losses of Hinton's formula for classes, tags, answers and next tokens; refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distilled_runs import by_formula
from tiny_qa import command, squad
from torch import Tensor
from transformers import AutoTokenizer, XLNetConfig, XLNetModel

import engine
from saved_decoder import save_decoder
from text_tasks import SAILING, load, save_encoder, topic_rows, words, write_csv, write_lines
from tiny import Pad, arguments, losses, tiny_model, tiny_rows
from tiny_decoders import collate, tiny_decoder, token_rows
from whet.cli.main import run
from whet.errors import EXIT_BAD_CONFIG
from whet.jobs.tokenising.cache import Cache
from whet.objectives.choose import choose
from whet.objectives.distilled import Distillation, distilled

CLOSE = 1e-5
"""Relative: float32 sums in another order, over ten steps."""
TEMPERATURE, ALPHA, RATE = 3.0, 0.7, 1e-3
HOW = {"temperature": TEMPERATURE, "alpha": ALPHA, "rate": RATE}


def run_of(folder: Path, student: Any, teacher: Any, rows: Any, **given: Any) -> list[float]:
    """Return the losses of ten steps over all rows with a teacher."""
    settings = arguments(
        folder, per_device_train_batch_size=len(rows), max_steps=10, learning_rate=RATE, adam_epsilon=1e-4,
        lr_scheduler_type="constant", warmup_steps=0, weight_decay=0.0,
    )  # fmt: skip
    trainer = engine.Trainer(model=student, args=settings, train_dataset=rows, **given)
    theirs = choose(teacher.eval(), None, trainer.collate)
    if hasattr(theirs, "needs_logits"):
        theirs.needs_logits = False
    how = Distillation(temperature=TEMPERATURE, alpha=ALPHA, teacher="")
    trainer.objective = distilled(trainer.objective, trainer.model, theirs, how)
    trainer.train()
    parts = [entry for entry in trainer.state.log_history if "soft_loss" in entry]
    mixed = [(1 - ALPHA) * entry["hard_loss"] + ALPHA * entry["soft_loss"] for entry in parts]
    assert mixed == pytest.approx(losses(trainer), rel=1e-5)
    return losses(trainer)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_next_tokens_have_the_losses_of_the_formula(family: str, tmp_path: Path) -> None:
    """gemma2 caps its logits; the teacher is wider than the student."""
    rows, sizes = token_rows(6), {"hidden_size": 64, "seed": 5}

    def logits(model: Any, batch: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        labels = batch["labels"][:, 1:]
        found = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
        return [(found[labels != -100], labels[labels != -100])]

    wanted = by_formula(tiny_decoder(family), tiny_decoder(family, **sizes), collate(rows), logits, HOW)
    found = run_of(tmp_path, tiny_decoder(family), tiny_decoder(family, **sizes), rows, data_collator=collate)
    assert found == pytest.approx(wanted, rel=CLOSE)


@pytest.mark.parametrize(
    ("student", "teacher"), [("bert", "bert"), ("roberta", "roberta"), ("distilbert", "distilbert")]
)
def test_answers_have_the_losses_of_the_formula(student: str, teacher: str, tmp_path: Path) -> None:
    rows, pad = tiny_rows(6, student), Pad(1 if student == "roberta" else 0)

    def logits(model: Any, batch: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        out = model(**{name: value for name, value in batch.items() if not name.endswith("_positions")})
        shown = [side.masked_fill(batch["attention_mask"] == 0, -1e4) for side in (out.start_logits, out.end_logits)]
        return list(zip(shown, (batch["start_positions"], batch["end_positions"]), strict=True))

    made = [tiny_model(student), tiny_model(teacher, seed=7)]
    wanted = by_formula(*made, pad([rows[n] for n in range(6)]), logits, HOW)
    made = [tiny_model(student), tiny_model(teacher, seed=7)]
    found = run_of(tmp_path, *made, rows, processing_class=pad)
    assert found == pytest.approx(wanted, rel=CLOSE)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A student without a head, and a teacher that has learnt the topics."""
    folder = tmp_path_factory.mktemp("models")
    save_encoder(folder / "student")
    write_csv(folder / "topics.csv", topic_rows())
    options = {"train_file": folder / "topics.csv", "num_train_epochs": 60}
    assert run(words("classify", folder / "student", folder / "teacher", "--do_train", **options)) == 0
    return {name: folder / name for name in ("student", "teacher", "topics.csv")}


@pytest.mark.slow
def test_classifier_learns_from_its_teacher_alone(models: dict[str, Path], tmp_path: Path) -> None:
    """Labels are drawn by lot, and the teacher has all of the loss: what is learnt is what the teacher says."""
    rows = topic_rows()
    drawn = np.random.default_rng(0).permutation([row["label"] for row in rows])
    file = write_csv(tmp_path / "drawn.csv", [row | {"label": label} for row, label in zip(rows, drawn, strict=True)])
    options = {"train_file": file, "validation_file": models["topics.csv"], "num_train_epochs": 60, "logging_steps": 10}
    options |= {"teacher_model": models["teacher"], "distillation_alpha": 1.0, "distillation_temperature": 4.0}
    assert run(words("classify", models["student"], tmp_path / "out", "--do_train", "--do_eval", **options)) == 0
    assert load(tmp_path / "out", "eval_results.json")["eval_accuracy"] > 0.6  # of the true labels: by lot, a third
    log = load(tmp_path / "out", "trainer_state.json")["log_history"]
    assert any("soft_loss" in entry for entry in log)


@pytest.mark.slow
def test_answers_are_evaluated_while_a_teacher_helps(encoder: Path, tmp_path: Path) -> None:
    (tmp_path / "squad.json").write_text(json.dumps(squad()), "utf-8")
    usual: dict[str, Any] = {"train_file": tmp_path / "squad.json", "validation_file": tmp_path / "squad.json"}
    usual |= {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 2}
    assert run(command(encoder, tmp_path / "teacher", "--do_train", **usual)) == 0
    taught = command(encoder, tmp_path / "out", "--do_train", "--do_eval", teacher_model=tmp_path / "teacher", **usual)
    assert run(taught) == 0
    assert "eval_f1" in load(tmp_path / "out", "eval_results.json")


@pytest.mark.slow
def test_tags_and_texts_take_a_teacher(tmp_path: Path) -> None:
    save_decoder(tmp_path / "small")
    file = write_lines(tmp_path / "texts.jsonl", [{"text": text} for text in SAILING])
    options = {"train_file": file, "validation_file": file, "num_train_epochs": 40}
    assert run(words("lm", tmp_path / "small", tmp_path / "teacher", "--do_train", **options)) == 0
    options |= {"teacher_model": tmp_path / "teacher", "distillation_alpha": 1.0, "per_device_train_batch_size": 2}
    assert run(words("lm", tmp_path / "small", tmp_path / "out", "--do_train", "--do_eval", **options)) == 0
    assert load(tmp_path / "out", "eval_results.json")["eval_perplexity"] < 10

    save_encoder(tmp_path / "encoder")
    rows = [{"tokens": text.split(), "ner_tags": ["B-X"] + ["O"] * (len(text.split()) - 1)} for text in SAILING]
    tags = write_lines(tmp_path / "tags.jsonl", rows)
    assert run(words("tag", tmp_path / "encoder", tmp_path / "tagger", "--do_train", train_file=tags)) == 0
    taught = {"train_file": tags, "teacher_model": tmp_path / "tagger"}
    assert run(words("tag", tmp_path / "encoder", tmp_path / "tagged", "--do_train", **taught)) == 0


def test_padded_language_models_as_student_and_teacher_are_refused(tmp_path: Path) -> None:
    """Their logits stand one place before their labels, and nothing would move them."""
    models = [tiny_decoder("gemma2", attn_logit_softcapping=50.0, seed=seed) for seed in (0, 5)]
    settings = arguments(tmp_path, max_steps=1)
    trainer = engine.Trainer(model=models[0], args=settings, train_dataset=token_rows(4), data_collator=collate)
    assert not trainer.objective.packed
    how = Distillation(temperature=TEMPERATURE, alpha=ALPHA, teacher="")
    assert distilled(trainer.objective, models[0], choose(models[1].eval(), None, collate), how) is None


def _other_labels(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text("utf-8"))
    names = list(config["id2label"].values())[::-1]
    config |= {"id2label": dict(enumerate(names)), "label2id": {name: n for n, name in enumerate(names)}}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")


def _other_words(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    one, other = list(vocabulary)[-2:]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")


@pytest.mark.parametrize(("change", "said"), [(_other_labels, "other labels"), (_other_words, "another vocabulary")])
def test_teacher_of_other_labels_or_words_is_refused(
    models: dict[str, Path], tmp_path: Path, change: Any, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(models["teacher"], tmp_path / "teacher")
    change(tmp_path / "teacher")
    options = {"train_file": models["topics.csv"], "teacher_model": tmp_path / "teacher"}
    assert run(words("classify", models["student"], tmp_path / "out", "--do_train", **options)) == EXIT_BAD_CONFIG
    assert said in capfd.readouterr().err


@pytest.mark.parametrize("task", ["classify", "lm"])
def test_teacher_with_fewer_positions_than_the_rows_is_refused_before_anything_is_tokenised(
    task: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save = save_encoder if task == "classify" else save_decoder
    save(tmp_path / "model")
    save(tmp_path / "small", positions=16)
    AutoTokenizer.from_pretrained(tmp_path / "model").save_pretrained(tmp_path / "small")  # trained words differ
    file = write_lines(tmp_path / "rows.jsonl", topic_rows())
    options: dict[str, Any] = {"train_file": file, "max_steps": 1}
    short = words(task, tmp_path / "small", tmp_path / "teacher", "--do_train", **options, max_seq_length=16)
    assert run(short) == 0
    options |= {"teacher_model": tmp_path / "teacher", "max_seq_length": 16}
    assert run(words(task, tmp_path / "model", tmp_path / "fits", "--do_train", **options)) == 0
    capfd.readouterr()
    monkeypatch.setattr(Cache, "take", None)
    asked = words(task, tmp_path / "model", tmp_path / "out", "--do_train", **(options | {"max_seq_length": 17}))
    assert run(asked) == EXIT_BAD_CONFIG
    assert "fewer positions than the rows" in " ".join(capfd.readouterr().err.split())


def test_labels_of_a_head_with_an_unusual_name_are_compared(
    models: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """XLNet's head is its `logits_proj`; other models have a `classifier` or a `score`."""
    tokenizer = AutoTokenizer.from_pretrained(models["student"])
    sizes = {"d_model": 32, "n_layer": 1, "n_head": 2, "d_inner": 32}
    XLNetModel(XLNetConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    options = {"train_file": models["topics.csv"], "max_steps": 1}
    assert run(words("classify", tmp_path / "model", tmp_path / "teacher", "--do_train", **options)) == 0
    options |= {"teacher_model": tmp_path / "teacher"}
    _other_labels(tmp_path / "teacher")
    assert run(words("classify", tmp_path / "model", tmp_path / "out", "--do_train", **options)) == EXIT_BAD_CONFIG
    assert "other labels" in capfd.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        {"distillation_alpha": 0},
        {"distillation_alpha": 1.5},
        {"distillation_temperature": 0},
        {"label_smoothing_factor": 0.1},
        {"teacher_model": None, "distillation_alpha": 0.9},
    ],
)
def test_setting_that_a_teacher_cannot_honour_is_refused(
    models: dict[str, Path], tmp_path: Path, options: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    given = {"train_file": models["topics.csv"], "teacher_model": models["teacher"]} | options
    given = {name: value for name, value in given.items() if value is not None}
    assert run(words("classify", models["student"], tmp_path / "out", "--do_train", **given)) == EXIT_BAD_CONFIG
    assert "fix:" in capfd.readouterr().err


def test_teacher_that_is_nowhere_is_named_before_the_data_is_read(
    models: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = {"train_file": models["topics.csv"], "teacher_model": tmp_path / "nowhere"}
    assert run(words("classify", models["student"], tmp_path / "out", "--do_train", **options)) == EXIT_BAD_CONFIG
    said = capfd.readouterr()
    assert "--teacher_model: no such folder" in said.err
    assert "examples" not in said.out
