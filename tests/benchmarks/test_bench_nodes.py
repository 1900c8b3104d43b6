"""The curve to more nodes: what the model of cost assumes, and that the page shows what it gives."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import shared_memory
from cost import Network, Work, step_s
from curve import efficiency, lines, shortest_step_s
from scaling import RESULTS

_PAGE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"
_LINK = Network(bytes_per_s=1e8, cpu_s_per_byte=1e-9, latency_s=0.0)
_WORK = Work(step_s=3.0, dense_bytes=40_000_000, row_bytes=0, table_bytes=0, bucket_bytes=4_000_000)


def test_the_page_shows_what_the_command_computes() -> None:
    page = " ".join(_PAGE.read_text("utf-8").partition("### More nodes")[2].split())
    stored = json.loads(RESULTS.read_text("utf-8"))
    large, small, theirs = (stored[name] for name in ("distilbert whet fp32", "minilm whet fp32", "minilm torch fp32"))
    at_4 = [f"{efficiency(large, link, 4):.1%}" for link in ("1 Gbit/s", "10 Gbit/s")]
    at_16, at_64 = ([f"{efficiency(one, '1 Gbit/s', n):.0%}" for one in (large, small, theirs)] for n in (16, 64))
    assert f"{at_4[0]} of linear scaling at 1 Gbit/s and {at_4[1]} at 10 Gbit/s" in page
    assert f"{at_16[0]} and {at_64[0]}, for MiniLM {at_16[1]} and {at_64[1]}" in page
    assert f"{at_16[2]} and {at_64[2]}." in page
    assert any("1.5 to 5.7 points too high" in line for line in lines(stored))
    assert "1.5 to 5.7 points too high" in page


def test_the_decision_on_shared_memory_shows_what_was_measured() -> None:
    record = (_PAGE.parent / "decisions" / "0023-ranks-of-one-machine-sum-by-gloo.md").read_text("utf-8").splitlines()
    step_s = statistics.median(json.loads(RESULTS.read_text("utf-8"))["minilm whet fp32"]["step_s"]["one"])
    printed = shared_memory.lines(json.loads(shared_memory.RESULTS.read_text("utf-8")), step_s)
    (gain,) = [line for line in printed if line.startswith("MiniLM's step")]
    assert gain in record


def test_a_rank_alone_sends_nothing() -> None:
    assert step_s(_WORK, _LINK, 1) == _WORK.step_s


def test_a_sum_behind_the_backward_pass_costs_its_last_bucket() -> None:
    """The link needs 0.4 s for 40 MB, the backward pass 2.04 s: all but the last bucket is hidden."""
    busy_s = 40_000_000 * 1e-9
    assert step_s(_WORK, _LINK, 2) == pytest.approx(3.0 + busy_s + 4_000_000 / 1e8)


def test_a_slow_link_is_not_hidden() -> None:
    slow = replace(_LINK, bytes_per_s=1e7)
    assert step_s(_WORK, slow, 2) > 1.0 + 4.0


def test_tables_travel_by_rows_until_these_are_longer() -> None:
    """With 12 ranks of 10 MB of rows, a table of 100 MB is summed itself; with 9 it is not."""
    tables = replace(_WORK, dense_bytes=4_000_000, row_bytes=10_000_000, table_bytes=100_000_000)
    without = replace(tables, row_bytes=0, table_bytes=0)
    of_tables = {n: step_s(tables, _LINK, n) - step_s(without, _LINK, n) for n in (9, 12, 64)}
    per_byte = 1e-8 + 1e-9
    assert of_tables[9] == pytest.approx(8 * 10_000_000 * per_byte)
    assert of_tables[12] == pytest.approx(2 * 11 / 12 * 100_000_000 * per_byte)
    assert of_tables[64] == pytest.approx(2 * 63 / 64 * 100_000_000 * per_byte)


def test_the_shortest_step_reaches_the_wanted_efficiency() -> None:
    least_s = shortest_step_s(_WORK, _LINK, 4, 0.9)
    assert least_s / step_s(replace(_WORK, step_s=least_s), _LINK, 4) == pytest.approx(0.9)
    assert shortest_step_s(_WORK, _LINK, 4, 0.95) > least_s
