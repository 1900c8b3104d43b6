"""The bars of a forecast: what they show of a plan and of a run, on a page and in a file."""

from __future__ import annotations

import json
import re
import struct
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from report_runs import FORECAST, record_run

from whet.report import bars, runs

GB = 1e9
PLAN: dict[str, Any] = {
    "memory": {"parts": {"program": 0.5 * GB, "weights": 1 * GB, "optimizer": 2 * GB, "data": 1e6, "logits": 2e6},
               "free_bytes": 4 * GB},
    "time": {"step": {"data": 0.01, "forward": 0.5, "backward": 1.0, "exchange": 0.0, "optimizer": 0.2}},
}  # fmt: skip
PARTS = {
    "parts": PLAN["memory"]["parts"],
    "free_bytes": 4 * GB,
    "time": {"start": 9.0, "trial": 2.0, "data": 1.0, "forward": 30.0, "backward": 60.0, "optimizer": 7.0},
}


def _smaller(plan: dict[str, Any]) -> dict[str, Any]:
    parts = plan["memory"]["parts"] | {"optimizer": 0.5 * GB}
    return plan | {"memory": plan["memory"] | {"parts": parts}}


def _texts(path: Path) -> list[str]:
    found = ET.parse(path)
    return ["".join(one.itertext()).strip() for one in found.iter("{http://www.w3.org/2000/svg}text")]


def test_small_parts_are_drawn_together_and_all_are_counted() -> None:
    memory, step = bars.of_plans({"these settings": PLAN})
    assert memory.bars[0].parts == {
        "Python, its libraries, the tokenizer": 0.5 * GB, "weights": 1 * GB, "optimizer state": 2 * GB,
        "other parts": 3e6,
    }  # fmt: skip
    assert memory.lines == {"free for this run": 4 * GB}
    assert step.bars[0].parts == {"batches": 0.01, "forward passes": 0.5, "backward passes": 1.0, "updates": 0.2}
    assert step.words.startswith("these settings: 1.71 s (")


def test_picture_names_each_part_with_its_size(tmp_path: Path) -> None:
    bars.write(tmp_path / "plan.svg", "whet qa with tiny: 9 rows", bars.of_plans({"these settings": PLAN}))
    texts = _texts(tmp_path / "plan.svg")
    assert {"weights: 1.0 GB", "optimizer state: 2.0 GB", "free for this run: 4.0 GB", "backward passes: 1.00 s",
            "these settings: 3.5 GB", "whet qa with tiny: 9 rows"} <= {*texts}  # fmt: skip


def test_ways_to_run_stand_one_below_the_other_in_the_same_colours(tmp_path: Path) -> None:
    path = tmp_path / "plan.svg"
    ways = {"these settings": PLAN, "--optim adamw_whet_8bit": _smaller(PLAN)}
    bars.write(path, "two ways", bars.of_plans(ways))
    assert {"these settings: 3.5 GB", "--optim adamw_whet_8bit: 2.0 GB"} <= {*_texts(path)}
    light, _ = bars.palettes()
    used = f'style="fill: {light["run-1"]}'
    assert path.read_text("utf-8").count(used) == 2 * 2 + 2 * 1  # two figures of two bars, and a key in each


def test_picture_has_dark_colours_for_dark_screens_and_fits_any_width(tmp_path: Path) -> None:
    path = tmp_path / "plan.svg"
    bars.write(path, "a <title> & more", bars.of_plans({"these settings": PLAN}))
    light, dark = bars.palettes()
    drawn = path.read_text("utf-8")
    for name in ("ink", "muted", "run-0", "run-1"):
        assert f'[style*="fill: {light[name]}"]{{fill:{dark[name]}!important}}' in drawn
    used = {*re.findall(r"(?:fill|stroke): (#\w{6})", drawn)}
    assert used <= {*light.values(), *dark.values()}
    root = ET.fromstring(drawn)
    assert root.get("width") == "100%"
    assert root.get("height") is None
    assert root.find("{http://www.w3.org/2000/svg}title").text == "a <title> & more"  # type: ignore[union-attr]


def test_picture_as_png_is_large_enough_to_read(tmp_path: Path) -> None:
    bars.write(tmp_path / "new" / "plan.png", "a plan", bars.of_plans({"these settings": PLAN}))
    content = (tmp_path / "new" / "plan.png").read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", content[16:24])
    assert (width, height) > (900, 900)


def test_a_plan_without_a_time_has_its_memory_alone() -> None:
    assert [one.title for one in bars.of_plans({"these settings": PLAN | {"time": None}})] == [
        "Memory of one rank at its peak"
    ]


def test_what_a_run_took_stands_next_to_its_forecast(tmp_path: Path) -> None:
    memory, time = bars.of_run(runs.read(record_run(tmp_path / "out", forecast=FORECAST | PARTS)))
    assert memory.lines == {"it took": 1_100_000_000, "was free": 4 * GB}
    forecast, taken = time.bars
    assert forecast.parts == {"trial of the number format": 2.0, "data": 1.0, "forward and backward": 90.0,
                              "update of the weights": 7.0}  # fmt: skip
    assert taken.parts == {"data": 12.0, "forward and backward": 72.0, "update of the weights": 36.0}


@pytest.mark.parametrize("ends", [True, False])
def test_forecast_is_drawn_on_the_page(ends: bool, tmp_path: Path) -> None:
    from whet import report

    page = report.write([record_run(tmp_path / "out", forecast=FORECAST | PARTS, ends=ends)]).read_text("utf-8")
    figures = re.findall(r'<svg class="chart".*?</svg>', page, re.DOTALL)
    memory, time = figures[:2]
    assert 'title id="bars-1-title">Memory at the peak<' in memory
    assert ("it took: 1.1 GB" in memory) == ends
    assert ">forecast: 1m40s</text>" in time
    assert (">it took: 2m00s</text>" in time) == ends
    assert "var(--run-2)" in memory


@pytest.mark.parametrize("value", ["NaN", -1, "text", None, [1], {"weights": "much"}, {"weights": float("inf")}])
def test_odd_forecasts_are_not_drawn(value: object, tmp_path: Path) -> None:
    folder = record_run(tmp_path / "odd", forecast=FORECAST | {"parts": value, "time": value, "free_bytes": value})
    assert bars.of_run(runs.read(folder)) == []
    assert json.loads((folder / "run.jsonl").read_text().splitlines()[0])["event"] == "begin"
