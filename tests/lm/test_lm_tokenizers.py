"""Rows of tokenizers of other kinds: one that begins each text with a mark, and ones that read spaces in their own way.

Llama 2 and Gemma have the first kind, Llama 3, Qwen and GPT-2 the others.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

import hub_server
from text_tasks import SAILING, write_lines
from whet.jobs.tokenising.cache import Cache
from whet.models.loading.load import ModelSource, load_tokenizer
from whet.tasks.lm.examples import read_file
from whet.tasks.lm.job import RowMaker

CODE = "def sail(boat):\n    if boat:\n        return  boat\n\n\n    held = 'fast' \n"
BOOK = "\n".join([*SAILING, "", "", "  the end", CODE]) + "\n"


def metaspace() -> Tokenizer:
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return raw


def prepending() -> Tokenizer:
    raw = Tokenizer(models.BPE())
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return raw


def joining_line_ends() -> Tokenizer:
    """Pieces as Llama 3 and Qwen cut them: line ends in a row are one piece."""
    raw = Tokenizer(models.BPE())
    pieces = Regex(r" ?\p{L}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(pieces, "isolated"), byte_level])
    raw.decoder = decoders.ByteLevel()
    return raw


def tokenizer_of(raw: Tokenizer, *, with_end: bool = False) -> Any:
    """A tokenizer that has read the book, and begins each text with <s>."""
    special = ["<s>", "</s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator([BOOK] * 3, trainers.BpeTrainer(vocab_size=500, special_tokens=special, initial_alphabet=alphabet))  # fmt: skip  # noqa: E501
    single = "<s> $A </s>" if with_end else "<s> $A"
    raw.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<s>", 0), ("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>")


def rows_of(tokenizer: Any, file: Path, **options: Any) -> list[dict[str, Any]]:
    maker = RowMaker(tokenizer, 16, Cache(rows="rows", folder=file.parent / "cache"), **options)
    rows = maker.rows("train", read_file(file, None, limit=None, skip_bad=False))
    return [rows[n] for n in range(len(rows))]


@pytest.mark.parametrize("with_end", [False, True])
@pytest.mark.parametrize("kind", [metaspace, prepending, joining_line_ends])
def test_blocks_of_plain_text_hold_the_tokens_of_the_whole_text(kind: Any, with_end: bool, tmp_path: Path) -> None:
    """And one end-of-text token, at the end, also of a tokenizer that adds it by itself."""
    tokenizer = tokenizer_of(kind(), with_end=with_end)
    file = tmp_path / "book.txt"
    file.write_text(BOOK, "utf-8")
    found = [token for row in rows_of(tokenizer, file) for token in row["input_ids"]]
    wanted = tokenizer(BOOK)["input_ids"]
    assert found == (wanted if with_end else [*wanted, 1])
    assert found.count(1) == 1


def byte_level(*, trims: bool) -> Any:
    """A tokenizer whose tokens of spaces stand empty in the text, if it trims offsets."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = tokenizer_of(raw)
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=trims)
    return tokenizer


@pytest.mark.parametrize("prompt", ["write code:\n", "write code:\n   ", "write  "])
def test_spaces_of_a_completion_are_learnt_if_the_tokenizer_trims_its_offsets(prompt: str, tmp_path: Path) -> None:
    rows = []
    for trims in (False, True):
        folder = tmp_path / str(trims)
        folder.mkdir()
        file = write_lines(folder / "code.jsonl", [{"prompt": prompt, "completion": CODE}])
        maker = RowMaker(byte_level(trims=trims), 200, Cache(rows="rows", folder=folder))
        rows.append(maker.rows("train", read_file(file, None, limit=None, skip_bad=False))[0])
    plain, trimmed = rows
    assert trimmed["input_ids"] == plain["input_ids"]
    assert trimmed["labels"] == plain["labels"]
    learnt = [label for label in trimmed["labels"] if label != -100]
    assert byte_level(trims=True).decode(learnt).startswith((CODE, f"{prompt[-1]}def"))


def test_cached_rows_without_an_end_are_not_those_of_end_0(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(joining_line_ends())
    file = write_lines(tmp_path / "texts.jsonl", [{"text": text} for text in SAILING])
    tokenizer.eos_token = None
    without = rows_of(tokenizer, file)
    tokenizer.eos_token = "<s>"
    assert [row["input_ids"] for row in rows_of(tokenizer, file)] == [[*row["input_ids"], 0] for row in without]


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of httpx, about the hub's client
def test_chat_templates_of_a_model_on_the_hub_are_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They win over an older one in tokenizer_config.json, as in transformers; those of other folders are not read."""
    tokenizer_of(metaspace()).save_pretrained(tmp_path / "saved")
    files = {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()}
    settings = json.loads(files["tokenizer_config.json"]) | {"chat_template": "older"}
    files |= {"tokenizer_config.json": json.dumps(settings).encode(), "chat_template.jinja": b"newer"}
    files |= {"onnx/chat_template.jinja": b"other", "additional_chat_templates/own.py": b"raise SystemExit"}
    with hub_server.taken_for_the_hub(monkeypatch) as hub:
        for name, more in (("one", {}), ("several", {"additional_chat_templates/tools.jinja": b"with tools"})):
            hub.repositories[f"me/{name}"] = files | more
            tokenizer = load_tokenizer(ModelSource(model=f"me/{name}", cache_dir=str(tmp_path / "cache")))
            assert tokenizer.chat_template == ("newer" if not more else {"default": "newer", "tools": "with tools"})
    held = {path.name for path in (tmp_path / "cache").rglob("*")}
    assert "chat_template.jinja" in held
    assert not held & {"onnx", "own.py"}
