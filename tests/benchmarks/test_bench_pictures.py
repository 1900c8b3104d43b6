"""The pictures of the docs are drawn from recorded results: few bars, and a title that states the finding."""

from __future__ import annotations

import importlib
import json
import runpy
from pathlib import Path
from types import ModuleType

import pytest

CPU = Path(__file__).resolve().parents[2] / "benchmarks" / "cpu"


@pytest.fixture
def plot(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(CPU))
    return importlib.import_module("plot")


def test_speed_picture_shows_at_most_six_bars_of_whets_own_choice(plot: ModuleType) -> None:
    shown = plot.chosen(json.loads((CPU / "results.json").read_text("utf-8")))
    assert 0 < len(shown) <= 6
    assert len({(line.figure, line.model) for line in shown}) == len(shown)


def test_speed_picture_states_the_measured_finding_in_its_title(plot: ModuleType) -> None:
    def line(figure: str, model: str, value: float) -> object:
        return plot.Measured(figure=figure, model=model, variant="whet / the peer", values=[value])

    lines = [line("guides", "MiniLM", 9.8), line("guides", "BERT-base size", 7.2), line("best", "MiniLM", 2.66)]
    assert "7 to 10 times as fast as the usual run_qa.py command" in plot.headline(lines)
    assert "2.7 times as fast as transformers' fastest options" in plot.headline(lines)


def test_int8_picture_states_the_measured_finding_in_its_title() -> None:
    pytest.importorskip("matplotlib")
    chart = runpy.run_path(str(CPU.parent / "xquad" / "plot.py"))["chart"]
    f1 = {"whet": {"1": 40.0, "2": 42.0, "3": 41.0}, "whet int8": {"1": 40.5, "2": 42.0}}
    made = chart({run: {seed: {"eval_f1": value} for seed, value in found.items()} for run, found in f1.items()})
    assert "at most 0.5 points apart, +0.2 on average" in made.headline.replace("\n", " ")
    assert made.groups == ["seed 1", "seed 2"]


def test_speed_picture_is_drawn_for_light_and_dark_pages(
    plot: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["plot.py", str(CPU / "results.json"), str(tmp_path)])
    plot.main()
    assert {path.name for path in tmp_path.iterdir()} == {"speed-light.png", "speed-dark.png"}
    readme = (CPU.parents[1] / "README.md").read_text("utf-8")
    assert all(f"benchmarks/cpu/{path.name}" in readme for path in tmp_path.iterdir())
