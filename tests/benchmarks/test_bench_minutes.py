"""docs/cost.md holds what the result files of the benchmarks say."""

from __future__ import annotations

import minutes
import pytest


def test_the_page_is_made_from_the_results() -> None:
    assert minutes.PAGE.read_text("utf-8") == minutes.written(), "run: python benchmarks/minutes.py --write"


def test_minutes_follow_from_tokens_and_rate() -> None:
    """MiniLM's answers on Zen 5, from the file by hand: the best in bf16 and whet took the same five steps."""
    rounds = minutes._read("cpu", minutes.CPUS[0])["steps"]["raw"]["minilm"]["best_bf16"]
    per_s = sorted(one["best_bf16"]["n_tokens"] / one["whet_auto"]["seconds"] for one in rounds)
    rate = next(one for one in minutes.rates() if (one.job, one.machine) == ("answers, MiniLM", "Zen 5"))
    assert rate.whet == pytest.approx(per_s[len(per_s) // 2])
    took_min = 10_000 * 3 * rate.tokens_per_example / rate.whet / 60
    row = next(line for line in minutes.tables()["runs"].splitlines() if line.startswith("| answers, MiniLM | Zen 5 |"))
    assert f"| {took_min:.0f} |" in row
