"""A save over a checkpoint of the same step: the one that was there goes only when the new one reads well."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from whet.errors import StorageError
from whet.store import find, write

_STEP = find.folder_name(4)
_LARGE = 100_000
"""More than what a light look at a new checkpoint reads again."""


def _save(folder: Path, content: bytes) -> Path:
    return write.save(folder, 4, lambda to: (to / "weights").write_bytes(content * _LARGE) and None, {})


def _content(folder: Path) -> bytes:
    assert find.problems_of(folder) == []
    return (folder / "weights").read_bytes()[:1]


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _spoil(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(_LARGE // 2)
        file.write(b"?")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A folder with a checkpoint of step 4 that holds an a."""
    _save(tmp_path, b"a")
    return tmp_path


def test_the_new_one_takes_its_place(out: Path) -> None:
    _save(out, b"b")
    assert _names(out) == [_STEP]
    assert _content(out / _STEP) == b"b"


def _flips_a_byte(out: Path) -> None:
    _spoil(out / _STEP / "weights")


def _refuses(_: Path) -> None:
    raise OSError(5, "Input/output error")


@pytest.mark.parametrize("disk", [_flips_a_byte, _refuses], ids=lambda disk: disk.__name__.strip("_"))
def test_a_new_one_that_does_not_read_well_does_not_cost_the_old_one(
    out: Path, monkeypatch: pytest.MonkeyPatch, disk: Callable[[Path], None]
) -> None:
    """The disk goes wrong just after the new folder got its name; the size of what is there is right."""
    monkeypatch.setattr(write, "fsync", lambda _: disk(out))
    with pytest.raises(StorageError, match="step 4 cannot be written"):
        _save(out, b"b")
    assert _names(out) == [_STEP]
    assert _content(out / _STEP) == b"a"


@pytest.fixture
def both(out: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same folder as a save leaves it that is killed when it has just given the new one, a b, its name."""
    (out / _STEP).rename(out / f".{_STEP}.replaced")
    _save(tmp_path_factory.mktemp("new"), b"b").rename(out / _STEP)
    return out


@pytest.mark.parametrize("next_one", [write.clean_up, lambda out: _save(out, b"c")], ids=["a run", "a save"])
def test_killed_before_the_old_one_is_gone(both: Path, next_one: Callable[[Path], object]) -> None:
    next_one(both)
    assert _names(both) == [_STEP]
    assert _content(both / _STEP) in (b"b", b"c")


def test_killed_and_the_new_one_is_damaged(both: Path) -> None:
    _spoil(both / _STEP / "weights")
    write.clean_up(both)
    assert _content(both / _STEP) == b"a"
    assert _names(both) == [_STEP]


def test_killed_and_both_are_damaged(both: Path) -> None:
    """No run starts anew by itself then: the damaged one is there to be named."""
    for name in (_STEP, f".{_STEP}.replaced"):
        _spoil(both / name / "weights")
    write.clean_up(both)
    assert _names(both) == [_STEP]
    with pytest.raises(StorageError, match="none of the 1 checkpoints"):
        find.newest(both)


def test_the_old_one_is_the_only_one(both: Path) -> None:
    """Nobody looks after a killed save but the next one, and that fails, too."""
    _spoil(both / _STEP / "weights")

    def no_room(_: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(StorageError, match="No space left"):
        write.save(both, 4, no_room, {})
    assert _content(both / _STEP) == b"a"


def test_what_is_no_folder_is_left_alone(out: Path) -> None:
    (out / _STEP).rename(out / f".{_STEP}.replaced")
    (out / _STEP).write_text("mine", "utf-8")
    write.clean_up(out)
    assert (out / _STEP).read_text("utf-8") == "mine"
    assert _content(out / f".{_STEP}.replaced") == b"a"
