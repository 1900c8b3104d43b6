"""`whet doctor --rates` reports how fast the parts of a training run, in the form that a plan reads back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from known_rates import known_rates

from whet.cli.main import run
from whet.plan import rates


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> rates.Rates:
    """Rates of this machine that the cache holds already."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = known_rates(key=rates.key_here())
    rates.keep(found)
    return found


def test_the_report_has_the_rates_that_a_plan_reads(
    measured: rates.Rates, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["doctor", "--rates", "--json", "--no_measure"]) == 0
    path = tmp_path / "report.json"
    path.write_text(capsys.readouterr().out)
    assert rates.of_report(path) == measured


def test_rates_are_shown_as_times_of_blocks(measured: rates.Rates, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--rates", "--no_measure"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    seconds = sum(measured.block_s("encoder", "fp32", part, 7_077_888, 512) for part in ("forward", "backward"))
    assert f"{1e3 * seconds:,.0f} ms in fp32" in shown


@pytest.mark.usefixtures("measured")
def test_rates_are_not_in_the_report_unless_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--json", "--no_measure"]) == 0
    assert "training_rates" not in json.loads(capsys.readouterr().out)


def test_a_report_on_a_model_has_no_rates() -> None:
    assert run(["doctor", "--rates", "--kernels"]) == 78
