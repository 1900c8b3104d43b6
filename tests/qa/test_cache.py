"""Windows are made once for one input, found again, and never taken from a file that is not what it says."""

from __future__ import annotations

import logging
import os
import resource
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_tokenizers

from whet.paths import default_cache_dir
from whet.tasks.qa import windows as windows_module
from whet.tasks.qa.types import Answers, Questions, Windows
from whet.tasks.qa.windows import WindowOptions, cached_windows, make_windows, windows_key

_OPTIONS = WindowOptions(max_seq_length=32, doc_stride=8)


@pytest.fixture(scope="module")
def bert() -> Any:
    return tiny_tokenizers.bert()


@pytest.fixture
def n_made(monkeypatch) -> list[int]:
    """One entry for every time that windows are made."""
    made: list[int] = []

    def count(*args: Any, **options: Any) -> Windows:
        made.append(1)
        return make_windows(*args, **options)

    monkeypatch.setattr(windows_module, "make_windows", count)
    return made


def _questions(**changes: Any) -> Questions:
    context = "Bats sleep in caves during the day. " * 4
    questions = Questions(
        ids=["a", "b"],
        questions=["Who sleeps?", "Where is the river?"],
        answers=[Answers(("Bats",), (0,)), Answers()],
        context_of=np.array([0, 1]),
        contexts=[context, "The river flows through the town."],
    )
    return replace(questions, **changes)


def _assert_same(found: Windows, expected: Windows) -> None:
    for field in fields(Windows):
        if field.name != "rows":
            assert np.array_equal(getattr(found, field.name), getattr(expected, field.name)), field.name
    arrays = expected.rows.arrays()
    assert found.rows.arrays().keys() == arrays.keys()
    for name, array in found.rows.arrays().items():
        assert array.dtype == arrays[name].dtype
        assert np.array_equal(array, arrays[name])


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def test_second_call_reads_the_cached_windows(bert, tmp_path, n_made):
    made, read = (cached_windows(_questions(), bert, _OPTIONS, cache_dir=tmp_path / "new") for _ in range(2))
    assert len(n_made) == 1
    _assert_same(made, make_windows(_questions(), bert, _OPTIONS))
    _assert_same(read, made)
    (file,) = _files(tmp_path / "new")
    assert file.stem == f"windows-{windows_key(_questions(), bert, _OPTIONS)}"


def test_windows_without_labels_are_cached(bert, tmp_path, n_made):
    options = replace(_OPTIONS, with_labels=False)
    made, read = (cached_windows(_questions(), bert, options, cache_dir=tmp_path) for _ in range(2))
    assert len(n_made) == 1
    _assert_same(read, made)


def test_cache_does_not_depend_on_threads(bert, tmp_path, n_made):
    for n_threads in (None, 1, 2):
        cached_windows(_questions(), bert, _OPTIONS, cache_dir=tmp_path, n_threads=n_threads)
    assert len(n_made) == 1


def test_cache_key_covers_all_inputs_of_windows(bert):
    questions, n_keys = _questions(), 0
    keys = set()
    for changed in (
        questions,
        _questions(questions=["Who sleeps?", "Where is the river ?"]),
        _questions(questions=["Who sleeps?Where", " is the river?"]),
        _questions(contexts=[questions.contexts[0], questions.contexts[1] + "."]),
        _questions(context_of=np.array([0, 0])),
        _questions(answers=[Answers(("Bats",), (36,)), Answers()]),
        _questions(answers=[Answers(("Bat",), (0,)), Answers()]),
        _questions(answers=[Answers(), Answers()]),
        _questions(answers=[Answers(), Answers(("Bats",), (0,))]),
    ):
        keys.add(windows_key(changed, bert, _OPTIONS))
        n_keys += 1
    for options in ({"max_seq_length": 33}, {"doc_stride": 9}, {"with_labels": False}):
        keys.add(windows_key(questions, bert, replace(_OPTIONS, **options)))
        n_keys += 1
    for other in (
        tiny_tokenizers.bert(padding_side="left"),
        tiny_tokenizers.bert(truncation_side="left"),
        tiny_tokenizers.bert(do_lower_case=False),
        tiny_tokenizers.bert(model_input_names=["input_ids"]),
        tiny_tokenizers.bert(split_special_tokens=True),
        tiny_tokenizers.roberta(),
    ):
        keys.add(windows_key(questions, other, _OPTIONS))
        n_keys += 1
    assert len(keys) == n_keys


def test_cache_key_covers_nothing_else(bert):
    key = windows_key(_questions(), bert, _OPTIONS)
    assert windows_key(_questions(ids=["c", "d"], titles=["A", "B"]), bert, _OPTIONS) == key
    used = tiny_tokenizers.bert()
    used(["One.", "The river flows."], truncation=True, max_length=4, padding=True)  # leaves its settings behind
    assert windows_key(_questions(), used, _OPTIONS) == key


def test_overwrite_cache_makes_the_windows_again(bert, tmp_path, n_made):
    for overwrite_cache in (False, True, False):
        cached_windows(_questions(), bert, _OPTIONS, cache_dir=tmp_path, overwrite_cache=overwrite_cache)
    assert len(n_made) == 2
    assert len(_files(tmp_path)) == 1


def _damages(good: bytes) -> dict[str, bytes]:
    flips = {f"bit at {at}": good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :] for at in range(0, len(good), 37)}
    return flips | {
        "empty": b"",
        "cut": good[:-1],
        "half": good[: len(good) // 2],
        "longer": good + b"\0",
        "zeros": bytes(len(good)),
        "text": b"once upon a time",
    }


def test_damaged_cache_file_is_made_again_and_logged_once(bert, tmp_path, n_made, caplog):
    caplog.set_level(logging.INFO, logger="whet")
    expected = cached_windows(_questions(), bert, _OPTIONS, cache_dir=tmp_path)
    (file,) = _files(tmp_path)
    good = file.read_bytes()
    damages = _damages(good)
    assert len(damages) > 50
    for n, (name, damage) in enumerate(damages.items(), start=2):
        caplog.clear()
        file.write_bytes(damage)
        found = cached_windows(_questions(), bert, _OPTIONS, cache_dir=tmp_path)
        _assert_same(found, expected)
        assert len(n_made) == n, name
        assert len([line for line in caplog.messages if "damaged, and made again" in line]) == 1, name
        _assert_same(cached_windows(_questions(), bert, _OPTIONS, cache_dir=tmp_path), expected)
        assert len(n_made) == n, name


def test_cache_file_of_other_windows_is_not_used(bert, tmp_path, n_made):
    other = _questions(questions=["Who?", "Where?"])
    cached_windows(other, bert, _OPTIONS, cache_dir=tmp_path)
    (file,) = _files(tmp_path)
    file.rename(tmp_path / f"windows-{windows_key(_questions(), bert, _OPTIONS)}.safetensors")
    found = cached_windows(_questions(), bert, _OPTIONS, cache_dir=tmp_path)
    _assert_same(found, make_windows(_questions(), bert, _OPTIONS))
    assert len(n_made) == 2


@pytest.mark.parametrize("overwrite_cache", [False, True])
def test_concurrent_runs_make_the_windows_once(overwrite_cache, bert, tmp_path, n_made, monkeypatch):
    """Each has a lock of its own, as processes do; the first lets go only when the others wait."""
    n_waiting = []
    log = logging.getLogger("whet")
    info = log.info
    monkeypatch.setattr(log, "info", lambda text, *rest: (n_waiting.append("waiting" in text), info(text, *rest)))
    count = windows_module.make_windows

    def make_when_all_wait(*args: Any, **options: Any) -> Windows:
        give_up = time.monotonic() + 20
        while sum(n_waiting) < 3 and time.monotonic() < give_up:
            time.sleep(0.001)
        return count(*args, **options)

    monkeypatch.setattr(windows_module, "make_windows", make_when_all_wait)
    with ThreadPoolExecutor(4) as pool:
        jobs = [
            pool.submit(
                cached_windows, _questions(), bert, _OPTIONS, cache_dir=tmp_path, overwrite_cache=overwrite_cache
            )
            for _ in range(4)
        ]
        for job in jobs:
            _assert_same(job.result(timeout=30), jobs[0].result())
    assert len(n_made) == 1


def test_remains_of_a_killed_process_do_no_harm(bert, tmp_path, n_made):
    name = f"windows-{windows_key(_questions(), bert, _OPTIONS)}"
    (tmp_path / f"{name}.safetensors.lock").touch()
    (tmp_path / f"{name}.unfinished").write_bytes(b"half of it")
    for _ in range(2):
        cached_windows(_questions(), bert, _OPTIONS, cache_dir=tmp_path)
    assert len(n_made) == 1
    assert not list(tmp_path.glob("*.unfinished"))


def test_windows_are_not_cached_without_a_folder(bert, tmp_path, n_made, caplog):
    (tmp_path / "file").touch()
    for _ in range(2):
        found = cached_windows(_questions(), bert, _OPTIONS, cache_dir=tmp_path / "file" / "cache")
    _assert_same(found, make_windows(_questions(), bert, _OPTIONS))
    assert len(n_made) == 2
    assert [line for line in caplog.messages if "not cached" in line]


def test_windows_are_not_cached_in_a_folder_that_cannot_be_entered(bert, tmp_path, caplog):
    """As the home of another user is; root may enter any, so it is somebody else meanwhile."""
    folder = tmp_path / "locked"
    cached_windows(_questions(), bert, _OPTIONS, cache_dir=folder / "cache")  # also imports what nobody else may read
    (folder / "cache").chmod(0)
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        found = cached_windows(_questions(), bert, _OPTIONS, cache_dir=folder / "cache")
    finally:
        os.seteuid(before)
        (folder / "cache").chmod(0o700)
    _assert_same(found, make_windows(_questions(), bert, _OPTIONS))
    assert [line for line in caplog.messages if "not cached" in line and "Permission denied" in line]


def test_folder_that_takes_no_cache_is_named_once(bert, tmp_path, caplog):
    """Not for each split of a run."""
    (tmp_path / "file").write_text("mine")
    for _ in range(2):
        cached_windows(_questions(), bert, _OPTIONS, cache_dir=tmp_path / "file" / "cache")
    assert len([line for line in caplog.messages if "not cached" in line]) == 1


def test_windows_are_not_cached_if_the_rename_fails(bert, tmp_path, caplog):
    """Something else has its name; what was written until then is removed."""
    (tmp_path / f"windows-{windows_key(_questions(), bert, _OPTIONS)}.safetensors").mkdir()
    cached_windows(_questions(), bert, _OPTIONS, cache_dir=tmp_path)
    assert [line for line in caplog.messages if "not cached" in line]
    assert [path for path in tmp_path.iterdir() if path.is_file() and path.stat().st_size] == []


def test_windows_are_not_cached_on_a_full_disk(bert, tmp_path, caplog):
    """The system refuses files over 1,000 bytes, as it refuses any on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        found = cached_windows(_questions(), bert, _OPTIONS, cache_dir=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    _assert_same(found, make_windows(_questions(), bert, _OPTIONS))
    assert [line for line in caplog.messages if "not cached" in line]
    assert [path for path in tmp_path.iterdir() if path.stat().st_size] == []


def test_cache_is_in_the_users_cache_folder(monkeypatch, tmp_path, bert, n_made):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert default_cache_dir() == tmp_path / "caches" / "whet"
    cached_windows(_questions(), bert, _OPTIONS)
    assert len(_files(tmp_path / "caches" / "whet")) == 1
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_cache_dir() == tmp_path / "home" / ".cache" / "whet"
