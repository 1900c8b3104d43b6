"""Small things under the names that examples use, so that the examples run as they stand, offline and at once.

`transformers` and `datasets` look for a folder of a name before they ask the hub. In the folder that is made here, the
name `distilbert-base-uncased` is a model of a few thousand random weights, and `squad` holds a dozen questions.
"""

import json
from pathlib import Path
from typing import Any

MODELS = ("distilbert-base-uncased", "distilbert/distilbert-base-uncased", "bert-base-uncased")
DATA_SETS = ("squad", "rajpurkar/squad")
FILES = ("train.json", "dev.json", "test.json")
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_LETTERS = list("abcdefghijklmnopqrstuvwxyz0123456789.,?!'\"-")
_TEXT = "Ada found the old key under the third stone of the garden wall. She gave it to her brother on Monday."
_ASKED = {"Who found the key?": "Ada", "Where was the key?": "under the third stone", "When was it given?": "Monday"}


def write_stand_ins(folder: Path) -> None:
    """Put models, data sets, data files and a text to ask about (notes.txt) into the folder."""
    for name in MODELS:
        _write_model(folder / name, distilled=name.startswith("distil"))
    _write_decoder(folder / "gpt2")
    for name in DATA_SETS:
        _write_data_set(folder / name)
    for name in FILES:
        (folder / name).write_text(json.dumps(_nested()), "utf-8")
    (folder / "notes.txt").write_text(_TEXT, "utf-8")


def _write_model(folder: Path, *, distilled: bool) -> None:
    from transformers import BertConfig, BertModel, BertTokenizer, DistilBertConfig, DistilBertModel

    pieces = [*_SPECIAL, *_LETTERS, *(f"##{letter}" for letter in _LETTERS)]
    if distilled:
        model = DistilBertModel(DistilBertConfig(vocab_size=len(pieces), n_layers=2, n_heads=2, dim=16, hidden_dim=32))
    else:
        shape = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}
        model = BertModel(BertConfig(vocab_size=len(pieces), **shape))
    model.save_pretrained(folder)
    BertTokenizer(vocab={piece: at for at, piece in enumerate(pieces)}).save_pretrained(folder)


def _write_decoder(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|endoftext|>"]
    raw = Tokenizer(models.BPE(vocab={piece: at for at, piece in enumerate(pieces)}, merges=[]))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 64, "bos_token_id": 256, "eos_token_id": 256}
    GPT2LMHeadModel(GPT2Config(vocab_size=len(pieces), **shape)).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|endoftext|>").save_pretrained(folder)


def _questions() -> list[dict[str, Any]]:
    return [
        {"id": str(number), "question": question, "answers": {"text": [text], "answer_start": [_TEXT.index(text)]}}
        for number, (question, text) in enumerate(list(_ASKED.items()) * 4)
    ]


def _write_data_set(folder: Path) -> None:
    folder.mkdir(parents=True)
    rows = [{"title": "key", "context": _TEXT} | question for question in _questions()]
    for split in ("train", "validation"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def _nested() -> dict[str, Any]:
    asked = [
        question
        | {"answers": [{"text": text, "answer_start": _TEXT.index(text)} for text in question["answers"]["text"]]}
        for question in _questions()
    ]
    return {"version": "1.1", "data": [{"title": "key", "paragraphs": [{"context": _TEXT, "qas": asked}]}]}
