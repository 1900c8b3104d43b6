"""B14: whatever is planted in an output folder or the cache, nothing outside is written, emptied or waited for."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tiny_qa import command, squad, write_json

from whet.cli.main import run

pytestmark = pytest.mark.reliability

NAMES = (
    "model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "training_args.json",
    "trainer_state.json", "train_results.json", "eval_results.json", "all_results.json", "eval_predictions.json",
    "eval_nbest_predictions.json", "predict_predictions.json", "predict_nbest_predictions.json", "predict_results.json",
    "train_left_out.json", "run.log", "run.jsonl", "report.html", "errors.jsonl", "eval_predictions.jsonl",
    "predict_errors.jsonl", "predict_predictions.jsonl",
)  # fmt: skip
"""The files of a run, next to its checkpoints."""
STAGING = (
    ".checkpoint-1.partial", ".checkpoint-1.replaced", ".checkpoint-1.removed", ".model.partial",
    *(f".{name}.partial" for name in NAMES),
)  # fmt: skip


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """A folder of somebody else, which has to stay as it is."""
    folder = tmp_path / "outside"
    (folder / "inner").mkdir(parents=True)
    (folder / "victim").write_text("mine", "utf-8")
    (folder / "inner" / "victim").write_text("mine", "utf-8")
    yield folder
    assert sorted(path.name for path in folder.rglob("*")) == ["inner", "victim", "victim"]
    assert (folder / "victim").read_text("utf-8") == (folder / "inner" / "victim").read_text("utf-8") == "mine"


def _link(place: Path, outside: Path) -> None:
    place.symlink_to(outside / "victim")


def _link_to_nothing(place: Path, outside: Path) -> None:
    place.symlink_to(outside / "new")


def _link_to_a_folder(place: Path, outside: Path) -> None:
    place.symlink_to(outside / "inner")


def _second_name(place: Path, outside: Path) -> None:
    place.hardlink_to(outside / "victim")


def _pipe(place: Path, outside: Path) -> None:
    os.mkfifo(place)


def _socket(place: Path, outside: Path) -> None:
    here = Path.cwd()
    os.chdir(place.parent)  # the address of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(place.name)
    finally:
        os.chdir(here)


PLANTS: tuple[Callable[[Path, Path], None], ...] = (_link, _link_to_nothing, _link_to_a_folder, _second_name, _pipe,
                                                    _socket)  # fmt: skip


def _words(encoder: Path, tmp_path: Path, **options: object) -> list[str]:
    data = write_json(tmp_path / "data.json", squad())
    usual = {"train_file": data, "validation_file": data, "test_file": data, "max_steps": 1, "save_steps": 1}
    flags = ("--do_train", "--do_eval", "--do_predict", "--overwrite_output_dir", "--skip_bad")
    return command(encoder, tmp_path / "out", *flags, **(usual | options))


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__.strip("_"))
def test_results_are_written_in_the_place_of_what_was_planted(
    plant: Callable[[Path, Path], None], encoder: Path, tmp_path: Path, outside: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for name in NAMES:
        plant(out / name, outside)
    assert run(_words(encoder, tmp_path)) == 0
    written = [out / name for name in NAMES if name != "train_left_out.json"]
    assert all(path.is_file() and not path.is_symlink() and path.stat().st_nlink == 1 for path in written)
    assert (out / "model.safetensors").stat().st_size > 1000


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__.strip("_"))
@pytest.mark.parametrize("name", ["staging", "checkpoint", "lock", "abandoned"])
def test_places_of_checkpoints_and_lock_are_not_written_through(
    name: str, plant: Callable[[Path, Path], None], encoder: Path, tmp_path: Path, outside: Path
) -> None:
    """The run replaces what is in its way, or is refused: it does not write through it, wait, or fail otherwise."""
    names = {"staging": STAGING, "checkpoint": ("checkpoint-1",), "lock": (".whet.lock",)}
    (tmp_path / "out").mkdir()
    for one in names.get(name, ("abandoned-unnamed",)):
        plant(tmp_path / "out" / one, outside)
    assert run(_words(encoder, tmp_path)) in (0, 73, 74)


def test_logs_are_not_written_through_a_link(encoder: Path, tmp_path: Path, outside: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is missing")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "runs").symlink_to(outside / "inner")
    assert run(_words(encoder, tmp_path, report_to="tensorboard")) == 78


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__.strip("_"))
def test_cache_is_not_written_through(
    plant: Callable[[Path, Path], None], encoder: Path, tmp_path: Path, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of windows, its lock, and the file that it is written to first."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words = _words(encoder, tmp_path)
    assert run(words) == 0
    made = list((tmp_path / "cache" / "whet").glob("windows-*.safetensors"))
    assert made
    for path in made:
        for name in (path, path.with_name(f"{path.name}.lock"), path.with_suffix(".unfinished")):
            name.unlink(missing_ok=True)
            plant(name, outside)
    assert run([*words, "--overwrite_cache"]) == 0
