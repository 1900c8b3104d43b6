"""B13: the small files at the end of a run, on a disk that refuses: old or new, exit code 74, what is kept is named."""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from forked_runs import Corpus, corpus, hook, qa
from tiny_qa import files
from tiny_runs import toy_trainer

from not_shown import not_shown
from whet.store import find

__all__ = ["corpus"]  # a fixture

pytestmark = pytest.mark.reliability

_PLACES = {
    "predictions": ("whet.tasks.qa.judge", "write_predictions"),
    "model": ("whet.watch.files", "write_model"),
    "train_results.json": ("whet.engine.engine", "Engine.save_metrics"),
    "trainer_state.json": ("whet.engine.engine", "Engine.save_state"),
}
"""What does not fit -> the function that writes it."""


def _no_room_from(module: str, name: str) -> Callable[[Callable[[], None]], None]:
    """Return what lets files of this process grow no longer once the function is called: the kernel says no."""
    begin = hook(module, name, 1)

    def prepare(tell: Callable[[], None]) -> None:
        begin(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4, resource.RLIM_INFINITY)))

    return prepare


def _words(corpus: Corpus, out: Path, **more: object) -> list[str]:
    return corpus.words(out, **({"max_steps": 2, "save_steps": 2, "eval_strategy": "no"} | more))


@pytest.mark.parametrize("what", _PLACES)
def test_result_that_does_not_fit_ends_with_74_and_names_what_is_kept(
    corpus: Corpus, tmp_path: Path, what: str
) -> None:
    out = tmp_path / "out"
    child = _run_without_a_log(_words(corpus, out), tmp_path, _no_room_from(*_PLACES[what]))
    assert child.returncode == 74
    told = (tmp_path / "said").read_text("utf-8")
    assert what.split("_")[0] in told
    assert str(out / find.folder_name(2)) in told
    assert not [name for name in files(out) if name.endswith(".partial")], "nothing half written is left"
    for name in files(out):
        if name.endswith(".json"):
            json.loads((out / name).read_text("utf-8"))


def _run_without_a_log(words: list[str], folder: Path, prepare: Callable[[Callable[[], None]], None]) -> _Done:
    """Run the command with its output through a pipe: the limit counts for a log file, too."""
    reading, writing = os.pipe()
    with (folder / "said").open("wb") as said:
        reader = subprocess.Popen(["cat"], stdin=reading, stdout=said)
    os.close(reading)

    def to_the_pipe(tell: Callable[[], None]) -> None:
        os.dup2(writing, 1)
        os.dup2(writing, 2)
        sys.stdout, sys.stderr = (open(handle, "w", closefd=False) for handle in (1, 2))  # noqa: SIM115
        prepare(tell)

    child = qa(words, folder / "log", to_the_pipe)
    os.close(writing)
    code = child.wait()
    reader.wait(30)
    return _Done(code)


class _Done:
    def __init__(self, returncode: int) -> None:
        self.returncode = returncode


def test_run_goes_on_without_a_result_if_that_is_the_policy(corpus: Corpus, tmp_path: Path) -> None:
    words = _words(corpus, tmp_path / "out", save_error_policy="continue")
    done = _run_without_a_log(words, tmp_path, _no_room_from(*_PLACES["trainer_state.json"]))
    assert done.returncode == 0, (tmp_path / "said").read_text("utf-8")
    assert "continues without this file" in (tmp_path / "said").read_text("utf-8")
    assert "model.safetensors" in files(tmp_path / "out")


def test_full_disk_keeps_the_results_of_before(tmp_path: Path) -> None:
    """A real small disk that is full when the results are written."""
    place = tmp_path / "disk"
    place.mkdir()
    script = 'mount -t tmpfs -o size=300k tmpfs "$0" && exec "$@"'
    apart = ["unshare", "--mount", "sh", "-c", script, str(place)]
    if shutil.which("unshare") is None or subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        not_shown("R20", "this user may not mount anything", "root, or user name spaces (unshare, of util-linux)")
    paths = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [*apart, sys.executable, "-c", _FULL, str(place)], capture_output=True, text=True, check=False, timeout=120,
        env=os.environ | {"PYTHONPATH": paths},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


_FULL = """
import json, pathlib, sys
from tiny_runs import toy_trainer
from whet.errors import StorageError
place = pathlib.Path(sys.argv[1])
trainer = toy_trainer(place / "out")
trainer.save_metrics("train", {"loss": 1.0})
trainer.save_state()
trainer.save_model()
weights = (place / "out" / "model.safetensors").read_bytes()
try:
    with (place / "ballast").open("wb", buffering=0) as ballast:
        while ballast.write(b"x" * 512): pass
except OSError as error:
    assert error.errno == 28
for save in (lambda: trainer.save_metrics("train", {"loss": 2.0, "note": "x" * 5000}), trainer.save_model):
    try:
        save()
        raise AssertionError("it fits")
    except StorageError as error:
        assert error.exit_code == 74 and "No space left" in str(error), error
assert json.loads((place / "out" / "train_results.json").read_text()) == {"loss": 1.0}
assert (place / "out" / "model.safetensors").read_bytes() == weights
assert not list((place / "out").glob(".*")), list((place / "out").glob(".*"))
"""


def test_shards_of_an_earlier_model_do_not_stay(tmp_path: Path) -> None:
    """Transformers would read them in place of the new weights."""
    trainer = toy_trainer(tmp_path)
    for name in ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "mine.safetensors"):
        (tmp_path / name).write_text("old", "utf-8")
    trainer.save_model()
    assert {path.name for path in tmp_path.glob("*safetensors*")} == {"model.safetensors", "mine.safetensors"}


def test_damaged_results_of_before_are_written_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="whet")
    (tmp_path / "all_results.json").write_text('{"half', "utf-8")
    toy_trainer(tmp_path).save_metrics("eval", {"loss": 1.0})
    assert json.loads((tmp_path / "all_results.json").read_text("utf-8")) == {"loss": 1.0}
    assert "all_results.json cannot be read" in caplog.text
