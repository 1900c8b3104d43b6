"""The picture of `whet bench-methods`: few bars, and a title that states the finding."""

from __future__ import annotations

from pathlib import Path

import pytest

from whet.bench import run as plot
from whet.bench.run import Line


def line(name: str, speed: float | None, peak: float | None, *, equal: bool | None = None) -> Line:
    return Line(name=name, claim="", speed_ratio=speed, peak_ratio=peak, equal=equal)


LINES = [
    line("plain", 1.0, 1.0),
    line("a", 1.6, 0.99),
    line("b", 1.2, 0.6),
    line("c", 1.3, None),
    line("d", 1.5, 0.9),
    line("e", 0.9, 0.7),
    line("f", 0.9, 0.8),
    line("wrong", 9.0, 0.1, equal=False),
    line("skipped", None, None),
]


def test_picture_of_methods_shows_the_best_three_of_each_kind() -> None:
    assert plot.fastest(LINES) == [("a", 1.6), ("d", 1.5), ("c", 1.3)]
    assert plot.smallest(LINES) == [("b", 0.6), ("e", 0.7), ("f", 0.8)]


def test_picture_of_methods_states_the_finding_in_its_title() -> None:
    title = plot.finding(plot.fastest(LINES), plot.smallest(LINES))
    assert title == "a trains 1.60 times as fast as the plain run,\nb takes 0.60 of its memory"
    assert plot.finding([], []).startswith("No technique")


@pytest.mark.slow
@pytest.mark.parametrize("lines", [LINES, LINES[:1]], ids=["some are better", "none is better"])
def test_picture_of_methods_is_a_png(lines: list[Line], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot.draw(lines, "minilm: 2 x 10 steps", tmp_path / "methods.png")
    assert (tmp_path / "methods.png").read_bytes().startswith(b"\x89PNG")
