"""Tokenizers that multiply text, name ids that do not exist, or make Rust give up: one sentence, fast."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from whet.errors import ConfigError
from whet.hardware.memory import peak_bytes
from whet.jobs.tokenising.encode import encode_texts, rust_tokenizer
from whet.models.loading.load import ModelSource, load_tokenizer

pytestmark = pytest.mark.reliability
_MOST_S, _MOST_MIB = 5.0, 200
Spoil = Callable[[dict[str, Any]], object]
_TEXTS = ["rain " * 50, "a" * 60 + "b"]


def _replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _normalizer(*steps: dict[str, Any]) -> Spoil:
    return lambda values: values.update(normalizer={"type": "Sequence", "normalizers": list(steps)})


def _template(*, token_id: int = 2, kind: int = 0) -> Spoil:
    special = {"SpecialToken": {"id": "[CLS]", "type_id": kind}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return lambda values: values.update(
        post_processor={
            "type": "TemplateProcessing", "single": [special, first], "pair": [special, first, special, second],
            "special_tokens": {"[CLS]": {"id": "[CLS]", "ids": [token_id], "tokens": ["[CLS]"]}},
        }
    )  # fmt: skip


def _added(values: dict[str, Any]) -> None:
    for n in range(300):
        values["added_tokens"].append(
            {"id": 1000 + n, "content": f"[NEW{n}]", "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True}
        )  # fmt: skip


HOSTILE: dict[str, tuple[Spoil, str]] = {
    "one to thousands": (_normalizer(_replace({"String": "a"}, "b " * 5000)), "multiplies text"),
    "a chain of thirties": (_normalizer(*[_replace({"String": "a"}, "a" * 30)] * 3), "multiplies text"),
    "between all characters": (_normalizer(_replace({"Regex": ""}, "b" * 99)), "multiplies text"),
    "nested sequences": (
        _normalizer({"type": "Sequence", "normalizers": [_replace({"Regex": "."}, "b" * 999)]}), "multiplies text",
    ),
    "a million in front": (_normalizer({"type": "Prepend", "prepend": "a " * 500_000}), "multiplies text"),
    "words of any length": (lambda v: v["model"].update(max_input_chars_per_word=10**9), "max_input_chars_per_word"),
    "id of a template": (_template(token_id=999_999), "input_ids that the model does not know"),
    "largest id": (_template(token_id=2**32 - 1), "input_ids that the model does not know"),
    "token type": (_template(kind=7), "token_type_ids that the model does not know"),
    "token type beyond a byte": (_template(kind=300), "token_type_ids that the model does not know"),
    "added tokens": (_added, "tokens that the model does not know"),
    "no unknown token": (lambda v: v["model"].update(unk_token="nope"), "cannot"),
    "a panic while loading": (
        _normalizer({"type": "Precompiled", "precompiled_charsmap": "AAAA"}), "cannot be loaded",
    ),
    "a panic in a text": (_normalizer(_replace({"Regex": "(a+)+$"}, "a")), "cannot tokenise"),
    "a list": (lambda v: v.clear(), "cannot"),
}  # fmt: skip


def _use(folder: Path) -> None:
    encode_texts(rust_tokenizer(load_tokenizer(ModelSource(model=str(folder)))), [*_TEXTS, "\N{SNOWMAN}"])


def _copied(encoder: Path, folder: Path, spoil: Spoil) -> Path:
    """Copy the model with another tokenizer.json, to be read as it is: BertTokenizer and others rebuild it."""
    shutil.copytree(encoder, folder)
    values = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    spoil(values)
    (folder / "tokenizer.json").write_text(json.dumps(values), "utf-8")
    settings = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": ["input_ids", "token_type_ids"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    return folder


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_tokenizer_is_refused(kind: str, encoder: Path, tmp_path: Path) -> None:
    spoil, message = HOSTILE[kind]
    folder = _copied(encoder, tmp_path / "model", spoil)
    began_s, before = time.process_time(), peak_bytes() or 0
    with pytest.raises(ConfigError, match=message) as caught:
        _use(folder)
    assert time.process_time() - began_s < _MOST_S
    assert ((peak_bytes() or 0) - before) < _MOST_MIB << 20
    assert caught.value.problems[0].fix


@pytest.mark.parametrize(
    "step",
    [
        {"type": "Prepend", "prepend": "\u2581"},
        _replace({"String": " "}, "\u2581"),
        _replace({"Regex": " {2,}"}, " "),
        _replace({"String": "``"}, '"'),
        {"type": "NFKD"},
    ],
    ids=["prepend", "space", "spaces", "quotes", "NFKD"],
)
def test_steps_of_published_tokenizers_are_taken(step: dict[str, Any], encoder: Path, tmp_path: Path) -> None:
    _use(_copied(encoder, tmp_path / "model", _normalizer(step)))
