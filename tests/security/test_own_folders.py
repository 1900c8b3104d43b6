"""Links and names laid into whet's own folders lead nothing out of them: twelve cases, nothing outside changes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash
from tiny_qa import command, squad, write_json

from whet.cli.main import run
from whet.errors import StorageError
from whet.store import find, manifest, write

pytestmark = pytest.mark.reliability
_ONE = find.folder_name(1)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder that is nobody's business, with a file and a checkpoint of its own."""
    folder = tmp_path / "outside"
    (folder / _ONE).mkdir(parents=True)
    (folder / "mine.json").write_text('{"mine": 1}', "utf-8")
    (folder / _ONE / "mine.json").write_text('{"mine": 2}', "utf-8")
    return folder


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """An output folder."""
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def _content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def _save(out: Path, step: int = 1) -> Path:
    return write.save(out, step, lambda folder: (folder / "state.json").write_text("{}", "utf-8") and None, {})


def _seal(folder: Path, files: object) -> None:
    """Write a manifest that matches its own checksum, as a forger would."""
    content = {"format_version": 2, "step": find.step_of(folder), "files": files}
    digest = xxhash.xxh3_128(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (folder / manifest.MANIFEST).write_text(json.dumps(content | {"checksum": digest}), "utf-8")


def _facts(path: Path) -> dict[str, object]:
    raw = path.read_bytes() if path.is_file() else b""
    return {"bytes": len(raw), "xxh3_128": xxhash.xxh3_128(raw).hexdigest()}


def _linked_checkpoint(out: Path, outside: Path) -> None:
    (out / _ONE).symlink_to(outside / _ONE)
    assert find.list_all(out) == []
    write.remove_all(out)
    write.rotate([*find.list_all(out), _save(out, 2), _save(out, 3)], 1, None)


def _none_is_taken(out: Path) -> bool:
    """Whether no checkpoint counts; where some are there and none is whole, that is an error."""
    try:
        return find.newest(out) is None
    except StorageError:
        return True


def _linked_file_in_a_checkpoint(out: Path, outside: Path) -> None:
    folder = _save(out)
    (folder / "state.json").unlink()
    (folder / "state.json").symlink_to(outside / "mine.json")
    assert _none_is_taken(out)
    write.rotate([folder, _save(out, 2)], 1, None)
    assert not folder.exists()


def _linked_folder_in_a_checkpoint(out: Path, outside: Path) -> None:
    folder = _save(out)
    (folder / "more").symlink_to(outside)
    assert _none_is_taken(out)
    write.remove_all(out)
    assert not folder.exists()


def _linked_staging(out: Path, outside: Path) -> None:
    (out / f".{_ONE}.partial").symlink_to(outside)
    try:
        _save(out)
    except StorageError:
        assert not (out / _ONE).exists()


def _linked_target(out: Path, outside: Path) -> None:
    (out / _ONE).symlink_to(outside / _ONE)
    try:
        _save(out)
    except (StorageError, OSError):
        assert (out / _ONE).is_symlink()


def _name_with(name: str) -> Callable[[Path, Path], None]:
    def attempt(out: Path, outside: Path) -> None:
        folder = _save(out)
        told = name.replace("OUTSIDE", str(outside))
        plain = "\0" not in told and (folder / told).is_file()
        _seal(folder, {"state.json": _facts(folder / "state.json"), told: _facts(folder / told if plain else folder)})
        assert _none_is_taken(out)

    return attempt


def _pipe_in_a_checkpoint(out: Path, outside: Path) -> None:
    folder = _save(out)
    os.mkfifo(folder / "pipe")
    _seal(folder, {"state.json": _facts(folder / "state.json"), "pipe": {"bytes": 0, "xxh3_128": "0"}})
    assert _none_is_taken(out)


def _manifest_of_another_kind(out: Path, outside: Path) -> None:
    folder = _save(out)
    _seal(folder, ["state.json"])
    assert _none_is_taken(out)


CASES: dict[str, Callable[[Path, Path], None]] = {
    "checkpoint is a link": _linked_checkpoint,
    "file in a checkpoint is a link": _linked_file_in_a_checkpoint,
    "folder in a checkpoint is a link": _linked_folder_in_a_checkpoint,
    "staging folder is a link": _linked_staging,
    "target is a link": _linked_target,
    "manifest names a file above": _name_with("../../outside/mine.json"),
    "manifest names an absolute file": _name_with("OUTSIDE/mine.json"),
    "manifest names null": _name_with("state\0.json"),
    "manifest names a device": _name_with("/dev/zero"),
    "pipe in a checkpoint": _pipe_in_a_checkpoint,
    "manifest of another kind": _manifest_of_another_kind,
}


@pytest.mark.parametrize("case", CASES)
def test_nothing_outside_changes(case: str, out: Path, outside: Path) -> None:
    before = _content(outside)
    try:
        CASES[case](out, outside)
    finally:
        assert _content(outside) == before


def test_links_in_the_cache_of_windows_lead_nowhere(
    encoder: Path, tmp_path: Path, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twelfth case: the file, the lock and the unfinished file of the cache are links to files elsewhere."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data = write_json(tmp_path / "train.json", squad())
    words = command(encoder, tmp_path / "run", "--do_train", "--overwrite_output_dir", train_file=data, max_steps=1)
    assert run(words) == 0
    (made,) = (tmp_path / "cache" / "whet").glob("windows-*.safetensors")
    for name in (made.name, f"{made.name}.lock", made.with_suffix(".unfinished").name):
        place = made.with_name(name)
        place.unlink(missing_ok=True)
        place.symlink_to(outside / "mine.json")
    before = _content(outside)
    assert run(words) == 0
    assert _content(outside) == before
    shutil.rmtree(tmp_path / "cache")
    assert len(CASES) + 1 == 12
