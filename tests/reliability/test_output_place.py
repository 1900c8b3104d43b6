"""R14: ten kinds of places for the output. Each works, or is refused at once, before a model is loaded."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from forked_runs import Child, Corpus, corpus, finish, hook, qa
from tiny_qa import files

from not_shown import not_shown

__all__ = ["corpus"]  # a fixture

pytestmark = pytest.mark.reliability
MOST_S = 3.0
_MODEL = "BertForQuestionAnswering"
"""What the log says once the model is loaded."""


def _short(corpus: Corpus, out: object, **more: object) -> list[str]:
    options = {"max_steps": 1, "eval_strategy": "no", "save_steps": 1} | more
    return corpus.words(out, **options)  # type: ignore[arg-type]


def _refused(child: Child, code: int, *says: str) -> None:
    started_s = time.monotonic()
    assert child.wait() == code, child.text()
    assert time.monotonic() - started_s < MOST_S
    assert _MODEL not in child.text()
    for text in says:
        assert text in child.text()


@pytest.mark.parametrize(
    "name", ["a/b/c", "two words", "Ünïcode-文件夹", "new\nline", "x" * 250, "'quoted' $HOME;", "-dash"], ids=ascii
)
def test_places_that_work(corpus: Corpus, tmp_path: Path, name: str) -> None:
    """Missing parents, spaces, Unicode, a line break, 250 characters: the run, a stop in it, and the resumed run."""
    out = tmp_path / name
    finish(_short(corpus, out), tmp_path / "log")
    assert {"model.safetensors", "checkpoint-1", "all_results.json"} <= files(out)
    assert not {entry for entry in files(out) if entry.startswith(".")}


def test_a_link_to_a_folder(corpus: Corpus, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    finish(_short(corpus, tmp_path / "link"), tmp_path / "log")
    assert "model.safetensors" in files(tmp_path / "real")
    assert (tmp_path / "link").is_symlink()


def test_a_link_to_nothing(corpus: Corpus, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    _refused(qa(_short(corpus, tmp_path / "link"), tmp_path / "log"), 73, "is not a folder", "--output_dir")
    assert not (tmp_path / "nothing").exists()


def test_a_relative_place_is_where_the_command_runs(corpus: Corpus, tmp_path: Path) -> None:
    """Begun in one working directory, gone on in another."""

    def inside(folder: Path) -> Callable[[Callable[[], None]], None]:
        folder.mkdir(exist_ok=True)
        return lambda _: os.chdir(folder)

    first = qa(_short(corpus, "here/out"), tmp_path / "log", inside(tmp_path))
    assert first.wait() == 0, first.text()
    words = [*_short(corpus, "../here/out", max_steps=2), "--resume_from_checkpoint", "auto"]
    second = qa(words, tmp_path / "log2", inside(tmp_path / "elsewhere"))
    assert second.wait() == 0, second.text()
    assert "resumes    after step 1 of" in second.text()
    assert "checkpoint-2" in files(tmp_path / "here" / "out")
    assert files(tmp_path / "elsewhere") == set()


def test_names_that_differ_in_case_alone(corpus: Corpus, tmp_path: Path) -> None:
    """Two folders, or where the disk knows no case one, which then is full: never a mix."""
    finish(_short(corpus, tmp_path / "out"), tmp_path / "log")
    second = qa(_short(corpus, tmp_path / "OUT"), tmp_path / "log2")
    same = (tmp_path / "OUT").samefile(tmp_path / "out") if (tmp_path / "OUT").exists() else False
    assert second.wait() == (78 if same else 0), second.text()


def test_a_folder_that_vanishes_is_made_again(corpus: Corpus, tmp_path: Path) -> None:
    out = tmp_path / "out"
    inside = hook("whet.objectives.span", "PackedSpans.loss_sum", 20, tmp_path / "go")
    child = qa(corpus.words(out), tmp_path / "log", inside)
    assert child.until_told()
    shutil.rmtree(out)
    (tmp_path / "go").touch()
    assert child.wait() == 0, child.text()
    assert {"model.safetensors", "checkpoint-24"} <= files(out)


def test_a_file(corpus: Corpus, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine", "utf-8")
    _refused(qa(_short(corpus, tmp_path / "out"), tmp_path / "log"), 73, "is not a folder", "--output_dir")
    _refused(qa(_short(corpus, tmp_path / "out" / "deeper"), tmp_path / "log2"), 73, "is not a folder")
    assert (tmp_path / "out").read_text("utf-8") == "mine"


def test_a_name_that_no_disk_takes(corpus: Corpus, tmp_path: Path) -> None:
    _refused(qa(_short(corpus, tmp_path / ("x" * 300)), tmp_path / "log"), 73, "output_dir cannot be written")


def test_no_permission(corpus: Corpus, tmp_path: Path) -> None:
    """Root may write anywhere, so the run is somebody else's."""
    (tmp_path / "out").mkdir(mode=0o500)

    def become_nobody(_: Callable[[], None]) -> None:
        if os.geteuid() == 0:
            os.setgid(65534)
            os.setuid(65534)

    child = qa(_short(corpus, tmp_path / "out"), tmp_path / "log", become_nobody)
    _refused(child, 73, "this user may not write in", "--output_dir")


def test_a_disk_that_is_read_only(corpus: Corpus, tmp_path: Path) -> None:
    """Root, too, may not write there: a mount of the folder on itself, in a name space of its own."""
    place = tmp_path / "place"
    place.mkdir()
    script = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'
    apart = ["unshare", "--mount", "sh", "-c", script, str(place)]
    if shutil.which("unshare") is None or subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        not_shown("R14", "this user may not mount anything", "root, or user name spaces (unshare, of util-linux)")
    words = [*apart, sys.executable, "-m", "whet", *_short(corpus, place / "out")]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 73, done.stderr
    assert "output_dir cannot be written" in done.stderr
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("there", [True, False], ids=["folder there", "folder missing"])
def test_bad_data_leaves_the_place_as_it_was(corpus: Corpus, tmp_path: Path, there: bool) -> None:
    (tmp_path / "bad.json").write_text('{"data": 3}', "utf-8")
    out = tmp_path / "a" / "out"
    if there:
        out.mkdir(parents=True)
    _refused(qa(_short(corpus, out, train_file=tmp_path / "bad.json"), tmp_path / "log"), 65)
    assert (tmp_path / "a").exists() == there
    assert not there or list(out.iterdir()) == []
