"""An invented corpus for text tasks, an encoder that has read it, and the words of a command line."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import normalizers, pre_tokenizers
from transformers import BertConfig, BertModel, BertTokenizer

SAILING = [
    "the boat lay in the harbour",
    "we set the sail at dawn",
    "a wave broke over the bow",
    "the anchor held fast",
]
BAKING = ["the dough rose in the bowl", "bread came out of the oven", "she mixed flour with milk", "the cake was sweet"]
GARDEN = ["the roses need water", "he dug a bed for beans", "weeds grew by the fence", "apples fell from the tree"]
TOPICS = {"sailing": SAILING, "baking": BAKING, "garden": GARDEN}


def topic_rows() -> list[dict[str, Any]]:
    """Twelve sentences with their topics, topics in turn."""
    return [{"text": TOPICS[topic][n], "label": topic} for n in range(4) for topic in TOPICS]


def save_encoder(folder: Path, *, positions: int = 64) -> None:
    """Write a new encoder without a head, and a tokenizer that knows the corpus, as a pretrained model comes."""
    texts = [text for group in TOPICS.values() for text in group]
    tokenizer = BertTokenizer(vocab=vocabulary(texts), model_max_length=positions)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=positions, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def vocabulary(texts: Sequence[str]) -> dict[str, int]:
    """Return the pieces of a WordPiece tokenizer that has read the texts: each word is one, and each of its letters.

    One that `tokenizers` trains has its pieces in another order in each process.
    """
    lower, cut = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
    words = {word for text in texts for word, _ in cut.pre_tokenize_str(lower.normalize_str(text))}
    letters = {letter for word in words for letter in word}
    pieces = sorted(words | letters | {f"##{letter}" for letter in letters})
    return {piece: n for n, piece in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *pieces])}


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]], delimiter: str = ",") -> Path:
    """Write the rows with a header, and return the path."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write the rows as JSON lines, and return the path."""
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
    return path


def words(command: str, model: Path, output: Path, *flags: str, **options: Any) -> list[str]:
    """The words of a command on the CPU with small batches, unless told otherwise."""
    usual: dict[str, Any] = {
        "model_name_or_path": model, "output_dir": output, "max_seq_length": 32, "per_device_train_batch_size": 6,
        "learning_rate": 3e-3, "use_cpu": "true", "save_strategy": "no", "report_to": "none", "precision": "fp32",
    }  # fmt: skip
    return [command, *flags, *(str(word) for name, value in (usual | options).items() for word in (f"--{name}", value))]


def overflowing(model: Path, folder: Path) -> Path:
    """Copy a model, with norms whose weights are finite and whose results are not."""
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith("LayerNorm.weight"):
            weight.fill_(3e38)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def load(folder: Path, name: str) -> Any:
    """The content of a JSON file in the folder."""
    return json.loads((folder / name).read_text("utf-8"))


def load_lines(path: Path) -> list[Any]:
    """The objects of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


TAGS = [{"tokens": row["text"].split(), "ner_tags": ["O"] * (len(row["text"].split()) - 1) + ["B-X"]}
        for row in topic_rows()]  # fmt: skip
QUESTIONS = [
    {"id": str(n), "question": "what?", "context": row["text"],
     "answers": {"text": [row["text"].split()[1]], "answer_start": [row["text"].index(row["text"].split()[1])]}}
    for n, row in enumerate(topic_rows())
]  # fmt: skip


def examples(command: str, folder: Path) -> Path:
    """Write the examples of a task."""
    if command == "classify":
        return write_csv(folder / "rows.csv", topic_rows())
    texts = [{"text": row["text"]} for row in topic_rows()]
    return write_lines(folder / "rows.jsonl", {"tag": TAGS, "qa": QUESTIONS, "lm": texts}[command])


def documented_forms(page: str, heading: str) -> list[str]:
    """The first column of the table below a heading of a page of the docs, without the marks of code."""
    text = (Path(__file__).resolve().parents[1] / "docs" / page).read_text("utf-8")
    lines = text.partition(f"\n### {heading}\n")[2].partition("\n## ")[0].partition("\n### ")[0].splitlines()
    rows = [line for line in lines if line.startswith("| ")]
    return [row.split("|")[1].strip().replace("`", "") for row in rows[1:]]
