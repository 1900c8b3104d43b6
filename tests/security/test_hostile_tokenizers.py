"""Tokenizers that multiply text, or name ids that do not exist, are refused in one sentence, fast."""

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


def _template(*, token_id: int) -> Spoil:
    special = {"SpecialToken": {"id": "[CLS]", "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return lambda values: values.update(
        post_processor={
            "type": "TemplateProcessing", "single": [special, first], "pair": [special, first, special, second],
            "special_tokens": {"[CLS]": {"id": "[CLS]", "ids": [token_id], "tokens": ["[CLS]"]}},
        }
    )  # fmt: skip


HOSTILE: dict[str, tuple[Spoil, str]] = {
    "a chain of thirties": (_normalizer(*[_replace({"String": "a"}, "a" * 30)] * 3), "multiplies text"),
    "id of a template": (_template(token_id=999_999), "input_ids that the model does not know"),
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


def test_steps_of_published_tokenizers_are_taken(encoder: Path, tmp_path: Path) -> None:
    steps = (
        {"type": "Prepend", "prepend": "\u2581"}, _replace({"String": " "}, "\u2581"),
        _replace({"Regex": " {2,}"}, " "), {"type": "NFKD"},
    )  # fmt: skip
    _use(_copied(encoder, tmp_path / "model", _normalizer(*steps)))
