"""R4: 600 damaged checkpoints: each is found out, named with file and step, and the one before it is used."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import SEED, count, trials_of
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from trials import OUT, trainer

from whet.errors import EXIT_IO, StorageError
from whet.store import find, manifest

pytestmark = pytest.mark.reliability

ONE, TWO = "checkpoint-1", "checkpoint-2"
_MANIFEST, _WEIGHTS = "MANIFEST.json", "model.safetensors"
_TENSORS = (_WEIGHTS, "optimizer.safetensors")
_PAGE = 4096
_SEED = 4


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a run with checkpoints after steps 1 and 2; about 200 kB of state each."""
    folder = tmp_path_factory.mktemp("saved")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        trainer(max_steps=2, save_steps=1).train()
    return folder / OUT


def _any_file(folder: Path, chance: random.Random) -> Path:
    return chance.choice(sorted(path for path in folder.iterdir() if path.name != _MANIFEST))


def _flip_a_bit(folder: Path, chance: random.Random) -> str:
    path = folder / chance.choice(_TENSORS) if chance.random() < 0.8 else _any_file(folder, chance)
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)
    return path.name


def _truncate(folder: Path, chance: random.Random) -> str:
    path = _any_file(folder, chance)
    path.write_bytes(path.read_bytes()[: chance.randrange(path.stat().st_size)])
    return path.name


def _zero_a_page(folder: Path, chance: random.Random) -> str:
    path = folder / chance.choice(_TENSORS)
    data = bytearray(path.read_bytes())
    start = chance.randrange(0, len(data), _PAGE)
    page = data[start : start + _PAGE]
    assert any(page)
    data[start : start + _PAGE] = bytes(len(page))
    path.write_bytes(data)
    return path.name


def _swap_with_the_step_before(folder: Path, chance: random.Random) -> str:
    other = folder.parent / ONE
    names = [path.name for path in folder.iterdir() if path.read_bytes() != (other / path.name).read_bytes()]
    name = chance.choice(sorted(set(names) - {_MANIFEST}))
    shutil.copyfile(folder.parent / ONE / name, folder / name)
    return name


def _remove(folder: Path, chance: random.Random) -> str:
    path = _any_file(folder, chance)
    path.unlink()
    return path.name


def _add_a_tensor(folder: Path, chance: random.Random) -> str:
    """A tensor more, or one under a second name."""
    path = folder / chance.choice(_TENSORS)
    tensors = load_file(path)
    known = chance.choice(sorted(tensors))
    tensors[f"{known}.more"] = torch.zeros(3) if chance.random() < 0.5 else tensors[known].clone()
    save_file(tensors, path, metadata={"format": "pt"})
    return path.name


def _damage_json(folder: Path, chance: random.Random) -> str:
    path = chance.choice(sorted(path for path in folder.glob("*.json") if path.name != _MANIFEST))
    values = json.loads(path.read_text("utf-8"))
    values[chance.choice(sorted(values))] = chance.choice([None, -1, "x", [], {"a": 1e9}])
    text = json.dumps(values, indent=2)
    path.write_text(text if chance.random() < 0.5 else text[:-1], "utf-8")
    return path.name


def _damage_manifest(folder: Path, chance: random.Random) -> str:
    path = folder / _MANIFEST
    data = bytearray(path.read_bytes())
    where = chance.randrange(len(data) - 1)  # the line's end at the end says nothing
    if chance.random() < 0.5:
        data = data[:where]
    else:
        data[where] = (data[where] + chance.randrange(1, 255)) % 256
    try:  # white space and the like: the same manifest in other words is no damage
        if json.loads(bytes(data)) == json.loads(path.read_bytes()):
            return _damage_manifest(folder, chance)
    except ValueError:
        pass
    path.write_bytes(data)
    return _MANIFEST


_KINDS: dict[Callable[[Path, random.Random], str], int] = {
    _flip_a_bit: 200,
    _truncate: 100,
    _zero_a_page: 50,
    _swap_with_the_step_before: 50,
    _remove: 50,
    _add_a_tensor: 50,
    _damage_json: 50,
    _damage_manifest: 50,
}


@pytest.mark.parametrize("damage", _KINDS, ids=lambda damage: damage.__name__.strip("_"))
def test_damage_is_found_and_the_checkpoint_before_is_used(
    saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path, random.Random], str]
) -> None:
    n, chance = trials_of(_KINDS[damage]), random.Random(_SEED + SEED)
    shutil.copytree(saved, tmp_path / OUT)
    folder, quiet = tmp_path / OUT / TWO, 0

    def found() -> bool:
        nonlocal quiet
        shutil.rmtree(folder)
        shutil.copytree(saved / TWO, folder)
        name = damage(folder, chance)
        quiet += name in _TENSORS and _loads(folder / name)
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="whet"):
            used = find.newest(tmp_path / OUT)
        return used == tmp_path / OUT / ONE and all(part in caplog.text for part in (name, TWO, "before it is tried"))

    results = [found() for _ in range(n)]
    print(f"safetensors alone loads {quiet} of them without a word")
    count(f"damage by {damage.__name__.strip('_')}, found and passed over", results, n)


def _loads(path: Path) -> bool:
    try:
        return path.exists() and bool(load_file(path))
    except SafetensorError:
        return False


def test_all_damaged_is_an_error_and_no_fresh_start(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(saved, OUT)
    chance = random.Random(_SEED)
    for name in (ONE, TWO):
        _flip_a_bit(Path(OUT, name), chance)
    run = trainer(max_steps=3)
    with pytest.raises(StorageError, match=r"(?s)none of the 2 checkpoints.*fix: .*--overwrite_output_dir") as caught:
        run.train(resume_from_checkpoint="auto")
    assert caught.value.exit_code == EXIT_IO
    assert run.state.global_step == 0


def _replaced(path: Path, values: Any) -> None:
    """Put down a manifest that holds these values and fits its own checksum."""
    content = json.loads(path.read_text("utf-8"))
    del content["checksum"]
    content |= values
    path.write_text(json.dumps(content | {"checksum": manifest.digest_of(content)}), "utf-8")


_STRANGE = ["../secret", "/etc/hostname", "..", ".", "", "a\0b", "a/b", "a\\b", "\ud800", _MANIFEST]
_ODD = [{"files": []}, {"files": {"a": 1}}, {"format_version": 3}, {"step": "1"}, {"step": 7}]


@pytest.mark.parametrize("name", _STRANGE, ids=ascii)
def test_a_manifest_cannot_name_a_file_elsewhere(saved: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(saved / ONE, tmp_path / ONE)
    (tmp_path / "secret").write_text("x", "utf-8")
    files = json.loads((tmp_path / ONE / _MANIFEST).read_text("utf-8"))["files"]
    _replaced(tmp_path / ONE / _MANIFEST, {"files": files | {name: {"bytes": 1, "xxh3_128": "0"}}})
    assert len(find.problems_of(tmp_path / ONE)) == 1


@pytest.mark.parametrize("values", _ODD, ids=str)
def test_a_manifest_that_fits_itself_and_says_something_else(saved: Path, tmp_path: Path, values: Any) -> None:
    shutil.copytree(saved / ONE, tmp_path / ONE)
    _replaced(tmp_path / ONE / _MANIFEST, values)
    assert find.problems_of(tmp_path / ONE)


@pytest.mark.parametrize("name", [_MANIFEST, "model.safetensors"])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "huge"])
def test_what_is_no_plain_file_is_neither_followed_nor_waited_for(
    saved: Path, tmp_path: Path, name: str, kind: str
) -> None:
    shutil.copytree(saved / ONE, tmp_path / ONE)
    path = tmp_path / ONE / name
    path.rename(tmp_path / "moved")
    if kind == "link":
        path.symlink_to(tmp_path / "moved")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        with path.open("wb") as file:
            file.truncate(1 << 40)
    (problem,) = find.problems_of(tmp_path / ONE)
    assert name in problem
