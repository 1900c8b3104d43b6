"""B11: what a tokenizer or processor writes goes into checkpoints, sub-folders included; what cannot is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import toy_trainer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

import engine
from whet.errors import ConfigError
from whet.store import find

_TEMPLATES = {"default": "{{ messages }}", "rag": "{{ documents }}", "tool_use": "{{ tools }}"}
_ONE = find.folder_name(1)


def _trainer(folder: Path, processing: Any, **changes: Any) -> engine.Trainer:
    trainer = toy_trainer(folder, **({"max_steps": 1, "save_strategy": "steps", "save_steps": 1} | changes))
    trainer.processing_class = processing
    return trainer


@pytest.fixture
def with_templates(encoder: Path) -> PreTrainedTokenizerBase:
    """A tokenizer with named chat templates, which it writes into a folder of their own."""
    tokenizer = AutoTokenizer.from_pretrained(encoder)
    tokenizer.chat_template = dict(_TEMPLATES)
    return tokenizer


@pytest.mark.parametrize("saving", [{}, {"save_async": True}, {"save_total_limit": 1}], ids=["plain", "async", "one"])
def test_named_chat_templates_are_saved_and_loaded(
    with_templates: PreTrainedTokenizerBase, tmp_path: Path, saving: dict[str, Any]
) -> None:
    trainer = _trainer(tmp_path, with_templates, max_steps=2, **saving)
    trainer.train()
    trainer.save_model()
    for folder in (tmp_path, tmp_path / find.folder_name(2)):
        assert AutoTokenizer.from_pretrained(folder).chat_template == _TEMPLATES
    assert find.problems_of(tmp_path / find.folder_name(2)) == []
    _trainer(tmp_path, with_templates, max_steps=3, **saving).train(resume_from_checkpoint="auto")
    trainer.save_model()
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == _TEMPLATES


class _Writes:
    """A processor of the user's own: writes these files."""

    def __init__(self, write: Callable[[Path], Any]) -> None:
        self._write = write

    def save_pretrained(self, folder: str | Path) -> None:
        self._write(Path(folder))


def _nested(folder: Path) -> None:
    for name in ("a/b/c/deep.bin", "feature_extractor/preprocessor_config.json", "tokenizer/.hidden"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name, "utf-8")
    (folder / "empty").mkdir()


_ODD = ["two words", "new\nline", "Ünïcode", "back\\slash", ".hidden", b"\xff\xfe".decode("utf-8", "surrogateescape")]


@pytest.mark.parametrize("name", _ODD, ids=ascii)
def test_odd_names_are_kept(tmp_path: Path, name: str) -> None:
    trainer = _trainer(tmp_path, _Writes(lambda folder: (folder / name).write_text("content", "utf-8")))
    trainer.train()
    trainer.save_model()
    assert (tmp_path / _ONE / name).read_text("utf-8") == (tmp_path / name).read_text("utf-8") == "content"
    assert find.problems_of(tmp_path / _ONE) == []


def test_folders_in_folders_are_covered_by_the_manifest(tmp_path: Path) -> None:
    _trainer(tmp_path, _Writes(_nested)).train()
    names = json.loads((tmp_path / _ONE / "MANIFEST.json").read_text("utf-8"))["files"]
    assert {"a/b/c/deep.bin", "feature_extractor/preprocessor_config.json", "tokenizer/.hidden"} <= names.keys()
    (tmp_path / _ONE / "a/b/c/deep.bin").write_text("a/b/c/deer.bin", "utf-8")
    assert find.problems_of(tmp_path / _ONE) == ["a/b/c/deep.bin: does not match its checksum"]


def _damage(folder: Path, outside: Path) -> dict[str, Callable[[], Any]]:
    inner = folder / "tokenizer"
    return {
        "more": lambda: (inner / "more").write_text("x", "utf-8"),
        "less": (inner / ".hidden").unlink,
        "folder": lambda: (inner / "new").mkdir(),
        "link": lambda: (inner / "link").symlink_to(outside),
        "folder is a link": lambda: (inner.rename(outside / "moved"), inner.symlink_to(outside / "moved")),
    }


@pytest.mark.parametrize("kind", ["more", "less", "folder", "link", "folder is a link"])
def test_damage_in_a_sub_folder_is_found(tmp_path: Path, kind: str) -> None:
    _trainer(tmp_path / "out", _Writes(_nested)).train()
    (tmp_path / "outside").mkdir()
    _damage(tmp_path / "out" / _ONE, tmp_path / "outside")[kind]()
    assert "tokenizer" in find.problems_of(tmp_path / "out" / _ONE)[0]


def _link(folder: Path) -> None:
    (folder / "vocab.txt").symlink_to("/etc/hostname")


_REFUSED = {
    "manifest": lambda folder: (folder / "MANIFEST.json").write_text("{}", "utf-8"),
    "whet's file": lambda folder: (folder / "state.json").write_text("{}", "utf-8"),
    "weights": lambda folder: (folder / "model.safetensors").write_text("{}", "utf-8"),
    "link": _link,
}


@pytest.mark.parametrize("kind", _REFUSED)
def test_files_that_cannot_be_kept_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    with pytest.raises(ConfigError, match="files of _Writes cannot be saved"):
        _trainer(tmp_path, _Writes(_REFUSED[kind])).train()
    assert find.list_all(tmp_path) == []


def test_processing_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="save_pretrained"):
        _trainer(tmp_path, lambda text: text).train()
