"""Which candidates take steps, and which wins, where the trial of the number format ends as it may: by scripted times.

The processes are those of `test_auto_runs.py`; what they would answer is written here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from test_auto_runs import asked

from whet.cli.commands import command
from whet.config.command_line import load as load_settings
from whet.jobs import auto
from whet.jobs.trial_processes import NO_TIME, Lost, drafted
from whet.plan import choose
from whet.plan.choose import Candidate, Forecast

FREE = 1000
BASE = Candidate(rows=2, batches=3)
LARGE, MIDDLE = (replace(BASE, rows=rows, batches=6 // rows) for rows in (6, 3))
PEAKS = {"fp32": {LARGE: 1200, MIDDLE: 700, BASE: 500}, "bf16": {LARGE: 800, MIDDLE: 500, BASE: 400}}
"""Bytes by format: six rows at once fit in bf16 alone."""


class Script:
    """Processes that answer as written: the format that `auto` chooses, and how long a candidate takes for a step.

    Without `seconds`, times fall with the rows.
    """

    def __init__(self, precision: str, seconds: Callable[[Candidate, int], float] | None = None) -> None:
        self.precision = precision
        self.seconds = seconds or (lambda candidate, _: 1.0 / candidate.rows)
        self.begun: list[tuple[Candidate, Mapping[str, Any]]] = []
        self.stepped: set[Candidate] = set()

    def start(self, until_s: float, candidate: Candidate, **order: Any) -> Any:
        self.begun.append((candidate, order["settings"]))
        return Answers(self, candidate, order["settings"].get("precision", self.precision))


class Answers:
    """One of them."""

    has_ended = False

    def __init__(self, script: Script, candidate: Candidate, precision: str) -> None:
        self.script, self.candidate, self.precision = script, candidate, precision

    def ask(self, until_s: float, **asked: Any) -> list[Mapping[str, Any]]:
        if not asked:
            return [{"precision": self.precision, "threads": 1, "trial_s": 0.0}]
        self.script.stepped.add(self.candidate)
        took_s = asked["n"] * self.script.seconds(self.candidate, asked["first"])
        return [{"seconds": took_s, "peak": PEAKS[self.precision][self.candidate]}]

    def end(self, *, at_once: bool = False) -> None:
        self.has_ended = True


BY_ROWS = {one: 1.0 / one.rows for one in PEAKS["fp32"]}
NEARLY_ALIKE = {one: 1.0 - one.rows / 100 for one in PEAKS["fp32"]}


def contest(
    script: Script, tmp_path: Path, seeds: int = 1, forecast_s: Mapping[Candidate, float] = BY_ROWS, **options: Any
) -> auto._Contest:
    job, args = load_settings(
        command("classify"),
        asked("classify", tmp_path, tmp_path / "out", precision="auto", auto="true", auto_ranks=1, **options)[1:],
    ).settings
    both = {one: max(peaks[one] for peaks in PEAKS.values()) for one in PEAKS["fp32"]}
    known = {
        form: [
            asdict(Forecast(candidate=one, step_s=forecast_s[one], fits=peak <= 0.9 * FREE, peak_bytes=peak))
            for one, peak in peaks.items()
        ]
        for form, peaks in {"auto": both, **PEAKS}.items()
    }
    plan = {"known": known, "without": dict.fromkeys(known, ()), "precision": "bf16", "free": FREE,
            "split_is_fixed": "", "prices": {}, "train_s": 3600.0}  # fmt: skip
    return auto._Contest(script, plan, None, drafted(job, seeds=seeds), args)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _one_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(auto, "allocators", list)


@pytest.mark.parametrize(("chosen", "winner"), [("bf16", LARGE), ("fp32", MIDDLE)])
def test_what_fits_is_that_of_the_format_which_the_first_trial_chose(
    chosen: str, winner: Candidate, tmp_path: Path
) -> None:
    script = Script(chosen)
    found = contest(script, tmp_path)
    best = found.run()
    assert best is not None
    assert best.candidate == winner
    assert best.precision == chosen
    assert script.begun[0] == (LARGE, {}), "the fastest that fits in the format that auto should choose"
    assert (LARGE in script.stepped) == (chosen == "bf16"), "what does not fit takes no step"
    assert all(settings == {"precision": chosen} for _, settings in script.begun[1:]), "the format is chosen once"
    if chosen == "fp32":
        assert (LARGE, None, None, "takes 120% of what is free in fp32") in found.results


@pytest.mark.parametrize(
    ("times_s", "rows", "winner", "said"),
    [
        ((1.0, 1.01, 2.0), 2, MIDDLE, "6 x 1 is as fast, and holds 1 kB more"),
        ((1.01, 1.0, 1.01), 2, BASE, "3 x 2 is as fast, and holds 1 kB more"),
        ((1.0, 1.2, 2.0), 2, LARGE, "3 x 2 lost by 0.200 s a step, and holds 1 kB less"),
        ((1.0, 1.014, 1.028), 1, MIDDLE, "6 x 1 is as fast, and holds 1 kB more"),
    ],
)
def test_of_splits_that_are_as_fast_the_users_own_stays_or_the_smaller_one_is_taken(
    times_s: tuple[float, ...], rows: int, winner: Candidate, said: str, tmp_path: Path
) -> None:
    """The user's own has these rows. The last of three that are each as fast as the one before is slower than all."""
    step_s = dict(zip((LARGE, MIDDLE, BASE), times_s, strict=True))
    own = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": 6 // rows}
    found = contest(Script("bf16", lambda candidate, _: step_s[candidate]), tmp_path, forecast_s=NEARLY_ALIKE, **own)
    best = found.run()
    assert best is not None
    assert best.candidate == winner
    results = found.all_results(best)
    assert choose.why_the_next_lost(results, winner) == said
    lines = choose.table(results, winner, 1.0, 6)
    assert [line for line in lines if "taken" in line or "as fast" in line or "slower" in line] == lines[2:5]


def test_rounds_that_end_with_the_best_one_still_decide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that do not fit next to each other: the first one ends after a few rounds, in one of which it is faster."""
    monkeypatch.setattr(auto.memory, "available_bytes", lambda: 0)

    def seconds(candidate: Candidate, step: int) -> float:
        return {LARGE: 2.0, MIDDLE: 2.02 if step == 2 else 1.92, BASE: 4.0}[candidate]

    found = contest(Script("bf16", seconds), tmp_path, forecast_s=NEARLY_ALIKE)
    best = found.run()
    assert best is not None
    assert best.candidate == MIDDLE
    lines = choose.table(found.all_results(best), MIDDLE, 1.0, 6)
    assert not [line for line in lines if "faster" in line], "what is not taken is faster than nothing"
    assert choose.why_the_next_lost(found.all_results(best), MIDDLE).startswith("6 x 1 lost by ")


@pytest.mark.parametrize(("share", "is_taken"), [(0.7, True), (0.95, False)])
def test_what_is_far_ahead_when_the_time_ends_is_taken(share: float, is_taken: bool, tmp_path: Path) -> None:
    stepped: list[Candidate] = []

    def seconds(candidate: Candidate, step: int) -> float:
        stepped.append(candidate)
        if stepped.count(MIDDLE) > 2:  # its start, and a round
            raise Lost(NO_TIME)
        return {LARGE: 1.0, MIDDLE: share, BASE: 4.0}[candidate]

    best = contest(Script("bf16", seconds), tmp_path, forecast_s=NEARLY_ALIKE).run()
    assert best is not None
    assert (best.candidate == MIDDLE) == is_taken


def test_several_seeds_which_choose_themselves_fit_in_any_format(tmp_path: Path) -> None:
    script = Script("bf16")
    best = contest(script, tmp_path, seeds=2).run()
    assert best is not None
    assert best.candidate == MIDDLE
    assert LARGE not in [candidate for candidate, _ in script.begun]


def test_a_run_without_trials_fits_in_any_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = contest(Script("bf16"), tmp_path, per_device_train_batch_size=6, gradient_accumulation_steps=1)
    choice = auto._by_forecast(found, "nothing is tried")
    assert choice is not None
    assert choice.candidate == MIDDLE
    assert "3 x 2 is taken by its forecast, as 6 x 1 does not fit" in " ".join(capsys.readouterr().out.split())
