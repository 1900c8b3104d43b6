"""The rates of a machine: what lies between measured sizes, and what is kept of them for the next time."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from known_rates import KEY, known_rates

from whet.errors import ConfigError, WhetError
from whet.hardware import memory
from whet.kernels import native_file
from whet.plan import rates
from whet.plan.rates import Curve, Surface

_POINTS = {64.0: 0.004, 512.0: 0.02, 2048.0: 0.07}
_GRID = {1e5: {64.0: 0.001, 512.0: 0.004}, 1e6: {64.0: 0.005, 512.0: 0.03}, 1e7: {64.0: 0.04, 512.0: 0.28}}


@pytest.mark.parametrize(("size", "seconds"), _POINTS.items())
def test_a_curve_is_exact_where_it_was_measured(size: float, seconds: float) -> None:
    assert Curve.of(_POINTS).at(size) == pytest.approx(seconds)


def test_a_surface_is_exact_where_it_was_measured() -> None:
    surface = Surface.of(_GRID)
    for first, points in _GRID.items():
        for second, seconds in points.items():
            assert surface.at(first, second) == pytest.approx(seconds)


def test_more_work_never_takes_less_time() -> None:
    sizes = np.geomspace(1, 1e5, 400)
    assert (np.diff(Curve.of(_POINTS).at(sizes)) >= 0).all()
    noisy = Curve.of({64.0: 0.02, 512.0: 0.01, 2048.0: 0.07})  # a busy machine measured the smallest
    assert (np.diff(noisy.at(sizes)) >= 0).all()
    surface = Surface.of(_GRID)
    for weights in np.geomspace(1e4, 1e8, 30):
        assert (np.diff(surface.at(weights, sizes)) >= 0).all()
    of_weights = [surface.at(weights, 300.0) for weights in np.geomspace(1e4, 1e9, 100)]
    assert (np.diff(of_weights) >= 0).all()


def test_beyond_the_largest_size_the_rate_stays() -> None:
    curve = Curve.of(_POINTS)
    assert curve.at(20480.0) == pytest.approx(10 * 0.07)
    assert Surface.of(_GRID).at(1e8, 512.0) == pytest.approx(10 * 0.28)


def test_below_the_smallest_size_time_falls_no_faster_than_the_size() -> None:
    steep = Curve.of({64.0: 0.001, 512.0: 0.1})  # more than eight times as long for eight times the size
    assert steep.at(32.0) == pytest.approx(0.0005)
    assert steep.at(0.0) == 0.0


def test_rates_are_found_again(tmp_path: Path) -> None:
    measured = known_rates()
    rates.keep(measured, tmp_path)
    assert rates.cached(KEY, tmp_path) == measured


@pytest.mark.parametrize(
    "change",
    [
        {"processor": "another"},
        {"cores": 4},
        {"threads": 1},
        {"torch": "2.14.0"},
        {"whet": "1"},
        {"operators": "torch"},
        {"native": "of another build"},
    ],
)
def test_rates_of_another_machine_or_version_do_not_count(tmp_path: Path, change: dict[str, Any]) -> None:
    rates.keep(known_rates(), tmp_path)
    assert rates.cached(replace(KEY, **change), tmp_path) is None


def _damaged(text: str) -> list[str]:
    found = json.loads(text)
    lacks = {name: surface for name, surface in found["surfaces"].items() if name != "block encoder fp32 forward"}
    nan = text.replace("0.1", "NaN", 1)
    zero = found["numbers"] | {"norm": 0.0}
    named = found["numbers"] | {"norm": "fast"}
    older = found["key"] | {"form": 0}
    changed = [{"surfaces": lacks}, {"numbers": zero}, {"numbers": named}, {"key": older}, {"surfaces": []}]
    return ["", "{", "[]", text[: len(text) // 2], nan, *(json.dumps(found | one) for one in changed)]


def test_a_damaged_file_is_no_rates(tmp_path: Path) -> None:
    rates.keep(known_rates(), tmp_path)
    (file,) = tmp_path.iterdir()
    for text in _damaged(file.read_text()):
        file.write_text(text)
        assert rates.cached(KEY, tmp_path) is None, text[:80]
    file.write_bytes(b"\xff\xfe")
    assert rates.cached(KEY, tmp_path) is None


def test_a_library_is_named_by_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, found = tmp_path / "library", []
    monkeypatch.setattr(native_file, "find", lambda: file)
    for content in (b"one", b"two", b"one"):
        file.write_bytes(content)
        native_file.digest.cache_clear()
        found.append(native_file.digest())
    native_file.digest.cache_clear()
    assert found[0] == found[2] != found[1]


def test_the_newest_rates_stay_in_the_cache(tmp_path: Path) -> None:
    keys = [replace(KEY, threads=n) for n in range(1, 12)]
    (tmp_path / "auto-0.json").write_text("another kind")
    for n, key in enumerate(keys):
        rates.keep(known_rates(key=key), tmp_path)
        os.utime(tmp_path / f"rates-{key.digest}.json", (n, n))  # some file systems have seconds alone
    assert [rates.cached(key, tmp_path) is not None for key in keys] == [False] * 3 + [True] * 8
    assert (tmp_path / "auto-0.json").exists()


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot be written" in (rates.keep(known_rates(), tmp_path / "file" / "folder") or "")
    assert rates.cached(KEY, tmp_path / "file" / "folder") is None


class Machine:
    """A machine that can be measured, and counts how often it was."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.n_measured, self.load, self.said = 0, 0.1, list[str]()
        monkeypatch.setattr(rates, "key_here", lambda: KEY)
        monkeypatch.setattr(rates, "_measured_apart", self._measure)
        monkeypatch.setattr(rates.cpu, "load", lambda: self.load)
        monkeypatch.setattr(rates.os, "cpu_count", lambda: 2)

    def _measure(self, _: float) -> rates.Rates:
        self.n_measured += 1
        return known_rates(load=self.load)

    def rates(self, folder: Path) -> rates.Rates:
        """Return its rates as a plan gets them."""
        return rates.of_this_machine(self.said.append, folder)


def test_a_machine_is_measured_once_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    assert machine.rates(tmp_path) == machine.rates(tmp_path)
    assert machine.n_measured == 1
    assert len(machine.said) == 1
    assert "about 10 seconds" in machine.said[0]


def test_a_damaged_cache_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    machine.rates(tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text("{}")
    machine.rates(tmp_path)
    assert machine.n_measured == 2
    assert rates.cached(KEY, tmp_path) is not None


def test_a_busy_machine_is_measured_again_once_it_is_quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    machine.load = 3.0
    assert machine.rates(tmp_path).is_busy
    assert any("load 3.0" in text for text in machine.said)
    machine.rates(tmp_path)  # still busy: a second measurement would be no better
    assert machine.n_measured == 1
    machine.load = 0.2
    assert not machine.rates(tmp_path).is_busy
    assert machine.n_measured == 2


def test_the_report_of_another_machine_is_read_back(tmp_path: Path) -> None:
    there = known_rates(key=replace(KEY, processor="a processor elsewhere", cores=64, threads=64))
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"native": {}, "training_rates": rates.as_json(there)}))
    assert rates.of_report(path) == there


def test_a_report_without_rates_has_none(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text('{"native": {}}')
    assert rates.of_report(path) is None


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"native": {}, "training_rates": {}}'])
def test_a_file_that_is_no_report_is_refused_with_the_command_that_makes_one(tmp_path: Path, text: str) -> None:
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="whet doctor --rates --json"):
        rates.of_report(path)


@pytest.mark.night
def test_this_machine_can_be_measured() -> None:
    """Every part that a forecast asks for is there, and is the same after it was kept."""
    measured = rates.measure(budget_s=0.0)
    assert rates.from_json(json.loads(json.dumps(rates.as_json(measured)))) == measured
    for form in rates.FORMATS:
        for part in ("forward", "backward"):
            assert measured.block_s("encoder", form, part, 1e6, 300) > 0
            assert measured.block_s("decoder", form, part, 1e7, 300) > 0
    assert {"optimizer auto", "optimizer sgd"} <= measured.numbers.keys()


@pytest.mark.night
def test_a_measurement_leaves_this_process_as_it_was(tmp_path: Path) -> None:
    """A forecast of memory follows it, and what it counts is the run's; under a limit nothing would fit."""
    torch.ones(1 << 16).add_(1)  # starts the threads
    before, mapped = memory.resident_bytes() or 0, memory.unheld_bytes()
    said: list[str] = []
    rates.of_this_machine(said.append, tmp_path, budget_s=0.0)
    assert rates.cached(rates.key_here(), tmp_path) is not None
    grown = (memory.resident_bytes() or 0) + memory.unheld_bytes() - before - mapped
    assert grown < 30e6  # measured in this process it grows by some 300 MB


def test_a_measurement_that_ends_early_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "_APART", "raise MemoryError('nothing is left')")
    with pytest.raises(WhetError, match="nothing is left"):
        rates.of_this_machine(print, tmp_path)
    assert rates.cached(rates.key_here(), tmp_path) is None
