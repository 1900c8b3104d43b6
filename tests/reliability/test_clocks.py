"""R13: clocks that jump and files with odd times: the newest checkpoint is found and kept, no duration is negative."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
from harness import SEED, count, trials_of
from transformers import TrainerCallback
from trials import OUT, trainer

from whet.store import find, save, write

pytestmark = pytest.mark.reliability

_TEN_YEARS_S = 10 * 365 * 86400.0


def _small(folder: Path, step: int) -> Path:
    def fill(staging: Path) -> None:
        (staging / "a.json").write_text(f"{step}", "utf-8")

    return write.save(folder, step, fill, {})


def test_the_newest_is_found_and_kept_whatever_the_times_say(tmp_path: Path) -> None:
    n, chance = trials_of(20), random.Random(13 + SEED)

    def right(index: int) -> bool:
        folder = tmp_path / f"{index}"
        steps = sorted(chance.sample(range(1, 10**6), 5))
        folders = [_small(folder, step) for step in chance.sample(steps, len(steps))]
        times_s = chance.sample([time.time() + years * _TEN_YEARS_S for years in (-1, -0.5, 0, 0.5, 1)], 5)
        for path, at_s in zip(folders, times_s, strict=True):
            for inner in [*path.iterdir(), path]:
                os.utime(inner, (at_s, at_s))
        newest = folder / find.folder_name(steps[-1])
        found = find.newest(folder) == newest
        write.rotate(folders, 1, None)
        return found and find.list_all(folder) == [newest]

    count("newest by its step, and kept", [right(index) for index in range(n)], n)


class _Jumps(TrainerCallback):
    """Sets the wall clock and the time zone to something else after every step."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch, self._real, self._n = patch, time.time, 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._n += 1
        jump_s = _TEN_YEARS_S * (-1) ** self._n
        self._patch.setattr(time, "time", lambda: self._real() + jump_s)
        self._patch.setenv("TZ", ("Pacific/Kiritimati", "America/Los_Angeles")[self._n % 2])
        time.tzset()


def test_a_clock_that_jumps_during_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = trainer(max_steps=6, save_steps=1, save_total_limit=2)
    run.events.callbacks.append(_Jumps(monkeypatch))
    try:
        run.train()
    finally:
        monkeypatch.undo()
        time.tzset()
    monkeypatch.chdir(tmp_path)
    assert [find.step_of(path) for path in find.list_all(Path(OUT))] == [5, 6]
    timed = ("runtime", "per_second")
    figures = [value for entry in run.state.log_history for name, value in entry.items() if name.endswith(timed)]
    assert figures
    assert all(value > 0 for value in figures)


class _Monotonic:
    """A monotonic clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


class _OneSecondAStep(TrainerCallback):
    def __init__(self, clock: _Monotonic) -> None:
        self._clock = clock

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._clock.now_s += 1.0


_EVERY_STEP = list(range(1, 9))


@pytest.mark.parametrize(
    ("interval_s", "steps"), [(3.0, [3, 6, 8]), (2.5, [3, 6, 8]), (0.5, _EVERY_STEP), (99.0, [8])], ids=str
)
def test_a_checkpoint_every_so_many_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interval_s: float, steps: list[int]
) -> None:
    """Steps take a second each on this clock; the last step is saved in any case."""
    monkeypatch.chdir(tmp_path)
    clock = _Monotonic()
    monkeypatch.setattr(save, "time", clock)
    run = trainer(max_steps=8, save_strategy="time", save_interval_s=interval_s)
    run.events.callbacks.append(_OneSecondAStep(clock))
    run.train()
    assert [find.step_of(path) for path in find.list_all(Path(OUT))] == steps


def test_time_needs_no_clock_of_the_wall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds pass, the wall clock goes back ten years at every other step: the checkpoints come all the same."""
    monkeypatch.chdir(tmp_path)
    run = trainer(max_steps=4, save_strategy="time", save_interval_s=1e-6)
    run.events.callbacks.append(_Jumps(monkeypatch))
    try:
        run.train()
        assert [find.step_of(path) for path in find.list_all(Path(OUT))] == [1, 2, 3, 4]
    finally:
        monkeypatch.undo()
        time.tzset()
