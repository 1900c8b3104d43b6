"""An invented corpus, a tokenizer trained on it, a tiny model to begin with, and the command line that uses them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertModel, BertTokenizer

from text_tasks import vocabulary

MAX_SEQ_LENGTH, DOC_STRIDE = 40, 12
"""Small enough that every context takes several windows."""

_PEOPLE = ["Mira", "Tovan", "Elsi", "Borin", "Cadda"]
_PLACES = ["Upper Tarn", "Oldwick", "Venn on Sea", "Marrow Hill", "Skelby"]
_ISLANDS = ["Hesper", "Nool", "Carra", "Ilvane", "Quay"]
_BUILDERS = ["Odo", "Runa", "Pell", "Sigrid", "Wat"]
_THINGS = ["boat", "mill", "cart", "kiln", "loom"]
_FILLER = "The rain fell on the hills and the sheep slept by the wall while the wind went over the water."


def _paragraph(n: int) -> dict[str, Any]:
    """One person's context with four questions, each with its answer in another place."""
    who, thing, year = _PEOPLE[n], _THINGS[n], f"{1801 + 7 * n}"
    context = (
        f"{who} keeps an old {thing} in {_PLACES[n]}. {_FILLER} Each spring {who} sails to {_ISLANDS[n]}. "
        f"{_FILLER} The {thing} was made by {_BUILDERS[n]} in {year}."
    )
    asked = {
        f"In which town does the {thing} stand?": _PLACES[n],
        f"To which island goes {who}?": _ISLANDS[n],
        "Who made it?": _BUILDERS[n],
        "When?": year,
    }
    questions = [
        {"id": f"{who}-{q}", "question": question, "answers": [{"text": text, "answer_start": context.index(text)}]}
        for q, (question, text) in enumerate(asked.items())
    ]
    return {"context": context, "qas": questions}


def squad(*, version_2: bool = False) -> dict[str, Any]:
    """Five paragraphs and 20 questions in SQuAD's form; as version 2, each paragraph has one more without an answer."""
    paragraphs = [_paragraph(n) for n in range(len(_PEOPLE))]
    if version_2:
        for n, paragraph in enumerate(paragraphs):
            for question in paragraph["qas"]:
                question["is_impossible"] = False
            paragraph["qas"].append(
                {"id": f"none-{n}", "question": "Who sold the horse?", "answers": [], "is_impossible": True}
            )
    return {"version": "v2.0" if version_2 else "1.1", "data": [{"title": "People", "paragraphs": paragraphs}]}


def without_answers(document: dict[str, Any]) -> dict[str, Any]:
    """The same questions, as a test set comes."""
    copy = json.loads(json.dumps(document))
    for paragraph in copy["data"][0]["paragraphs"]:
        for question in paragraph["qas"]:
            del question["answers"]
    return copy


def questions_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Every question with its context beside it."""
    paragraphs = [paragraph for article in document["data"] for paragraph in article["paragraphs"]]
    return [{"context": paragraph["context"], **question} for paragraph in paragraphs for question in paragraph["qas"]]


def trained_tokenizer() -> BertTokenizer:
    """A WordPiece tokenizer that has read the corpus: each word is one of its pieces."""
    texts = [text for q in questions_of(squad()) for text in (q["context"], q["question"])]
    return BertTokenizer(vocab=vocabulary(texts), model_max_length=64)


def save_encoder(folder: Path) -> None:
    """Write a new encoder without a head, and its tokenizer, as a pretrained model comes."""
    tokenizer = trained_tokenizer()
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128,
        max_position_embeddings=64, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1,
    )  # fmt: skip
    BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_json(path: Path, content: Any) -> Path:
    """Write the file and return its path."""
    path.write_text(json.dumps(content), "utf-8")
    return path


def command(model: Path, output: Path, *words: Any, **options: Any) -> list[str]:
    """The words of a `whet qa` command: on the CPU, with the windows of this corpus, unless told otherwise."""
    usual: dict[str, Any] = {
        "model_name_or_path": model, "output_dir": output, "max_seq_length": MAX_SEQ_LENGTH, "doc_stride": DOC_STRIDE,
        "per_device_train_batch_size": 12, "per_device_eval_batch_size": 16, "learning_rate": 2e-3, "use_cpu": "true",
        "save_strategy": "no", "report_to": "none",
    }  # fmt: skip
    return ["qa", *map(str, words), *_flags(usual | options)]


def _flags(options: dict[str, Any]) -> Sequence[str]:
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def files(folder: Path) -> set[str]:
    """The names of what lies in the folder."""
    return {path.name for path in folder.iterdir()}


def load(folder: Path, name: str) -> Any:
    """The content of a JSON file in the folder; NaN and Infinity, which JSON does not have, are refused."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{name}: {constant} is no JSON")

    return json.loads((folder / name).read_text("utf-8"), parse_constant=refuse)
