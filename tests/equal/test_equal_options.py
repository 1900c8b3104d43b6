"""Options that only say how others would lay out a batch, or who does the work, do not change a bit of the result."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertTokenizer

import engine
from tiny import arguments, losses, tiny_model, weights_of
from whet.tasks.qa.arguments import QaArguments
from whet.tasks.qa.splits import read_split
from whet.tasks.qa.task import TASK

_CONTEXTS = {
    "The river flows through the old town and on to the sea.": [
        ("Where does the river flow?", "through the old town"),
        ("Where does it end?", "the sea"),
    ],
    "Bats sleep in caves during the day. At night they hunt moths, beetles and mosquitoes over lakes and fields.": [
        ("What do bats hunt?", "moths, beetles and mosquitoes"),
        ("Where do bats sleep during the day?", "caves"),
        ("When do they hunt?", "night"),
    ],
    "Two sisters opened a bakery in the harbour. Bread was sold from four in the morning, for the fishermen.": [
        ("Who opened the bakery?", "Two sisters"),
        ("From when on was bread sold?", "four in the morning"),
        ("For whom?", "the fishermen"),
    ],
}


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """A file of questions in SQuAD's form."""
    paragraphs = [
        {
            "context": context,
            "qas": [
                {"id": f"{text}", "question": text, "answers": [{"text": a, "answer_start": context.index(a)}]}
                for text, a in asked
            ],
        }
        for context, asked in _CONTEXTS.items()
    ]
    path = tmp_path / "questions.json"
    path.write_text(json.dumps({"version": "1.1", "data": [{"title": "t", "paragraphs": paragraphs}]}), "utf-8")
    return path


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A tiny BERT with dropout and a tokenizer that knows the words of the questions."""
    text = " ".join([*_CONTEXTS, *(question for asked in _CONTEXTS.values() for question, _ in asked)])
    words = sorted(set(re.findall(r"\w+|[^\w\s]", text.lower())))
    vocab = {piece: n for n, piece in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words])}
    folder = tmp_path / "model"
    tiny_model("bert", dropout=0.1).save_pretrained(folder)
    BertTokenizer(vocab=vocab, model_max_length=80).save_pretrained(folder)
    return folder


def _trained(model: Path, questions: Path, folder: Path, **changes: Any) -> tuple[engine.Trainer, float]:
    """Train as `whet qa` does; return the trainer and the part of the padding that was avoided."""
    usual = {"max_seq_length": 48, "doc_stride": 8, "overwrite_cache": True}
    qa = QaArguments(model_name_or_path=str(model), train_file=str(questions), **(usual | changes))
    args = arguments(folder, do_train=True, num_train_epochs=3)
    job = TASK.begin(qa, args, {"train": read_split(qa, "train")})
    avoided = job.engine.train().metrics["train_padding_avoided"]
    return job.engine, avoided


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_pad_to_max_length_changes_the_log_alone(tmp_path: Path, model_folder: Path, questions: Path) -> None:
    on, avoided_on = _trained(model_folder, questions, tmp_path / "on", pad_to_max_length=True)
    off, avoided_off = _trained(model_folder, questions, tmp_path / "off", pad_to_max_length=False)
    assert avoided_on > avoided_off > 0
    assert losses(on) == losses(off)
    assert _different(on, off) == []


def test_tokenizing_threads_and_the_cache_change_nothing(tmp_path: Path, model_folder: Path, questions: Path) -> None:
    one, _ = _trained(model_folder, questions, tmp_path / "one", preprocessing_num_workers=1)
    two, _ = _trained(model_folder, questions, tmp_path / "two", preprocessing_num_workers=2)
    cached, _ = _trained(model_folder, questions, tmp_path / "cached", overwrite_cache=False)
    assert losses(one) == losses(two) == losses(cached)
    assert _different(one, two) == _different(one, cached) == []


def _different(one: engine.Trainer, other: engine.Trainer) -> list[str]:
    """Return the weights that differ in any bit."""
    found, wanted = weights_of(one.model), weights_of(other.model)
    return [name for name in wanted if not torch.equal(found[name], wanted[name])]
