"""The forecast that a training makes of itself: real runs, what becomes of the process, and what it leaves alone."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_qa import command, squad, write_json

from whet.cli.main import run
from whet.engine import forked_forecast
from whet.hardware import memory
from whet.watch import record
from whet.watch.meter import Ahead, Clock

_PATIENCE_S = 120.0
_NEVER_ANSWERS = "it._forecast = lambda *_: time.sleep(600)"


def words_of(encoder: Path, folder: Path, **options: Any) -> list[str]:
    data = write_json(folder.parent / "data.json", squad())
    usual = {"train_file": data, "max_steps": 6000, "logging_steps": 100, "precision": "fp32"}
    return command(encoder, folder, "--do_train", **(usual | options))


def start(words: list[str], change: str = "", **variables: str) -> subprocess.Popen[str]:
    """Start the command, which forecasts however short it is, after this change of the module."""
    code = (
        "import os, sys, time\nfrom whet.engine import forked_forecast as it\nit.LEAST_S = 0.0\n"
        f"{change}\nfrom whet.cli.main import main\nmain(sys.argv[1:])\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, *words], env=os.environ | variables, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def until(holds: Any, what: str) -> Any:
    """Wait until this returns something."""
    end_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < end_s:
        if found := holds():
            return found
        time.sleep(0.02)
    raise AssertionError(f"{what}: not within {_PATIENCE_S} s")


def children_of(pid: int) -> list[int]:
    try:
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split()]
    except OSError:
        return []


def is_there(pid: int) -> bool:
    """Whether the process exists, a zombie too."""
    return Path(f"/proc/{pid}").exists()


def forecast_of(folder: Path) -> Any:
    follower = record.Follower(folder)
    follower.update()
    return follower.record.last.forecast


@pytest.mark.slow
@pytest.mark.parametrize("by", ["rates", "pace"])
def test_a_training_says_what_it_will_take(encoder: Path, tmp_path: Path, by: str) -> None:
    """With a pool of two threads, which has run before the fork; by rates under a limit on addresses."""
    folder = tmp_path / "out"
    asked = {"validation_file": folder.parent / "data.json", "do_eval": "true"}  # whose rows have no labels
    words = words_of(encoder, folder, dataloader_num_workers=1, **asked)
    known = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    unknown = {"OMP_NUM_THREADS": "2", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    limit = 16 << 30
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({limit}, resource.RLIM_INFINITY))"
    process = start(words, limited, **known) if by == "rates" else start(words, **unknown)
    found = until(lambda: forecast_of(folder) or process.poll(), "a forecast")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=_PATIENCE_S)
    assert process.returncode == 75, err
    assert found["time_by"] == by
    assert 0 < found["low"] < found["train_s"] < found["high"]
    assert sum(found["parts"].values()) == found["peak_bytes"]
    assert by == "pace" or found["peak_bytes"] < found["free_bytes"] < limit
    assert ("time" in found) == (by == "rates")
    assert sum(found.get("time", {"steps": found["train_s"]}).values()) == pytest.approx(found["train_s"])
    (line,) = (line for line in out.splitlines() if line.startswith("forecast: "))
    assert re.fullmatch(r"forecast: [\d.]+ [MG]B at the peak, [\d.]+ (s|min|h) \([\d.]+ to [\d.]+\)", line)
    (attempt,) = record.read(folder).attempts
    assert attempt.end is not None
    ratio = attempt.end["peak_bytes"] / found["peak_bytes"]
    # the model is tiny: what the end of a run imports counts, and the run ends before its evaluation
    assert 0.85 < ratio < 1.25
    assert run(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text("utf-8")
    assert "Forecast and outcome" in page
    assert ("Memory at the peak" in page, "Time of the training" in page) == (True, by == "rates")


@pytest.mark.slow
def test_a_training_is_the_same_with_a_forecast(
    encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forked_forecast, "_LOWEST_PRIORITY", 0)  # on a busy machine too there is an answer in time
    history = {}
    for name, least_s in (("with", 0.0), ("without", math.inf)):
        monkeypatch.setattr(forked_forecast, "LEAST_S", least_s)
        assert run(words_of(encoder, tmp_path / name, max_steps=600)) == 0
        said = capsys.readouterr()
        assert said.err == ""
        assert said.out.count("forecast: ") == (name == "with")
        state = json.loads((tmp_path / name / "trainer_state.json").read_text("utf-8"))
        history[name] = [(one["step"], one["loss"]) for one in state["log_history"] if "loss" in one]
    assert forecast_of(tmp_path / "with")["peak_bytes"] > 1e6
    assert not forecast_of(tmp_path / "without")
    assert history["with"] == history["without"]
    left, right = ((tmp_path / name / "model.safetensors").read_bytes() for name in history)
    assert left == right


@pytest.mark.parametrize(("n_steps", "least", "most"), [(2, 1.1, 1.3), (100, 1.8, 2.0)])
def test_the_pace_of_a_training_corrects_the_rates_the_more_steps_there_are(
    n_steps: int, least: float, most: float
) -> None:
    """Steps take twice as long as the rates say: a busy machine. Saves wait for the disk, not for other programs."""
    found = forked_forecast.ForkedForecast(None, lambda _: None)  # type: ignore[arg-type]
    found._n_paced, found._began_s = n_steps, time.perf_counter()
    clock = Clock(lambda: Ahead(n_steps=1000 - n_steps))
    for _ in range(n_steps):
        clock.add("forward_backward", 2.0)
        clock.add_step(2.0, 10)
    parts = {"forward": 400.0, "backward": 600.0, "evaluation": 100.0, "saving": 10.0}
    answer = found._complete({"time": parts, "error_frac": 0.2}, clock)
    steps_s = answer["time"]["forward"] + answer["time"]["backward"]
    assert least * 1000 < steps_s < most * 1000
    assert answer["time"]["evaluation"] == pytest.approx(steps_s / 10)
    assert answer["time"]["saving"] == 10.0
    assert answer["train_s"] == pytest.approx(sum(answer["time"].values()))
    assert answer["low"] < answer["train_s"] < answer["high"]


def test_a_training_that_will_not_fit_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    times = {"train_s": 100.0, "low": 90.0, "high": 110.0}
    forked_forecast._show({"peak_bytes": 2e9, "free_bytes": 3e9} | times)
    assert not caplog.records
    forked_forecast._show({"peak_bytes": 2e9, "free_bytes": 1e9} | times)
    assert "forecast to need 2.0 GB, and 1.0 GB are free" in caplog.text


def _grows() -> dict[str, Any]:
    forked_forecast._limit_memory()
    return {"n": len(bytearray(4 << 30))}


@pytest.mark.parametrize(
    "compute",
    [lambda: 1 / 0, os.abort, lambda: os._exit(3), lambda: sys.exit(3), _grows, lambda: {"odd": {1, 2}}],
    ids=["raises", "aborts", "ends", "exits", "grows", "odd"],
)
def test_a_process_that_fails_has_no_answer_and_leaves_nothing(
    compute: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    child = forked_forecast._Child(lambda: print("x" * 100_000, flush=True) or compute(), [])
    assert until(lambda: (answer := child.answer()) is not None and [answer], "an end") == [{}]
    assert not is_there(child._pid)
    assert capfd.readouterr() == ("", "")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_forecast_without_memory_has_the_time(
    encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forked_forecast, "LEAST_S", 0.0)
    monkeypatch.setattr(forked_forecast, "_LOWEST_PRIORITY", 0)  # on a busy machine too there is an answer in time
    monkeypatch.setattr(forked_forecast, "_forecast", lambda *_: 1 / 0)
    assert run(words_of(encoder, tmp_path / "out", max_steps=1000)) == 0
    found = forecast_of(tmp_path / "out")
    assert (found["peak_bytes"], found["time_by"]) == (None, "pace")
    assert re.search(r"^forecast: [\d.]+ (s|min) \([\d.]+ to [\d.]+\)$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.slow
def test_a_training_does_not_wait_for_its_forecast_and_ends_it(encoder: Path, tmp_path: Path) -> None:
    process = start(words_of(encoder, tmp_path / "out", max_steps=300), _NEVER_ANSWERS)
    (child,) = until(lambda: children_of(process.pid), "a child")
    niceness = until(lambda: os.getpriority(os.PRIO_PROCESS, child), "a low priority")
    assert niceness == 19
    _, err = process.communicate(timeout=_PATIENCE_S)
    assert (process.returncode, err) == (0, "")
    assert not is_there(child)
    assert not forecast_of(tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_process_ends_with_the_training_however_that_ends(
    encoder: Path, tmp_path: Path, number: signal.Signals
) -> None:
    process = start(words_of(encoder, tmp_path / "out", save_strategy="steps", save_steps=1000), _NEVER_ANSWERS)
    (child,) = until(lambda: children_of(process.pid), "a child")
    until(lambda: os.getpriority(os.PRIO_PROCESS, child), "a low priority")
    os.kill(child, signal.SIGTERM)  # as a terminal and launchers signal a group
    os.kill(child, signal.SIGINT)
    process.send_signal(number)
    process.communicate(timeout=_PATIENCE_S)
    assert process.returncode == (-signal.SIGKILL if number == signal.SIGKILL else 75)
    until(lambda: not is_there(child), "the end of the child")


def test_a_process_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked_forecast, "_PATIENCE_S", 0.5)
    child = forked_forecast._Child(lambda: time.sleep(600) or {}, [])
    assert child.answer() is None
    time.sleep(0.6)
    assert child.answer() == {}
    assert not is_there(child._pid)


def test_a_short_training_forks_nothing(encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forked: list[int] = []
    monkeypatch.setattr(forked_forecast, "_fork", lambda: forked.append(1) or 1 / 0)
    assert run(words_of(encoder, tmp_path / "out", max_steps=6)) == 0
    assert not forked
    assert not forecast_of(tmp_path / "out")


def test_a_system_without_room_for_a_process_trains_without_a_forecast(
    encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(forked_forecast, "LEAST_S", 0.0)
    monkeypatch.setattr(forked_forecast, "_fork", none)
    handles = len(list(Path("/proc/self/fd").iterdir()))
    assert run(words_of(encoder, tmp_path / "out", max_steps=6)) == 0
    assert len(list(Path("/proc/self/fd").iterdir())) == handles
    said = capsys.readouterr()
    assert said.err == ""
    assert "forecast" not in said.out


@pytest.mark.parametrize(("left_mib", "forks"), [(500, 0), (8000, 1)])
def test_a_training_near_its_limit_forks_nothing(
    encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_mib: int, forks: int
) -> None:
    """The memory of the process counts in the same cgroup, and the training would stop for it."""
    forked: list[int] = []

    def none() -> int:
        forked.append(1)
        raise BlockingIOError(11, "Resource temporarily unavailable")

    def limits(*_: Any) -> list[memory.MemoryLimit]:
        holds = memory.resident_bytes() or 0
        return [memory.MemoryLimit(holds, holds + (left_mib << 20), "a test")]

    monkeypatch.setattr(forked_forecast, "LEAST_S", 0.0)
    monkeypatch.setattr(forked_forecast, "_fork", none)
    monkeypatch.setattr(memory, "memory_limits", limits)
    assert run(words_of(encoder, tmp_path / "out", max_steps=6)) == 0
    assert len(forked) == forks


def test_what_is_given_back_is_not_held_twice() -> None:
    """After the child has given back the pages of a tensor, writes of its parent copy none."""
    size = 200 << 20
    held = torch.ones(size // 4)

    def measured() -> dict[str, int]:
        return {"anonymous": memory.anonymous_bytes() or 0}

    before = memory.anonymous_bytes() or 0
    child = forked_forecast._Child(measured, [held])
    found = until(child.answer, "an answer")
    assert found["anonymous"] < before - size + (16 << 20)
    assert float(held[-1]) == 1.0, "the parent's own is as it was"
    assert json.dumps(found)
