"""How the benchmark judges what it measured, and which steps and questions it takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from figures import FIGURES, Measured, summary, table
from protocol import environment
from questions import VARIANTS, write_questions
from sampling import spread


@pytest.mark.parametrize(
    ("figure", "values", "verdict"),
    [
        ("best", [1.0, 1.89, 9.0], "NO"),
        ("best", [1.0, 1.9, 9.0], "yes"),
        ("best", [2.5], "aim"),
        ("memory", [0.51], "NO"),
        ("memory", [0.5], "yes"),
        ("memory", [0.35], "aim"),
        ("limit_base", [0.849], "NO"),
        ("limit_base", [0.85, 0.95], "yes"),
    ],
)
def test_the_median_is_judged(figure: str, values: list[float], verdict: str) -> None:
    assert Measured(figure, "a model", "a variant", values).verdict == verdict


def test_every_aim_is_beyond_its_must() -> None:
    assert [key for key, figure in FIGURES.items() if not figure.reaches(figure.aim, figure.must)] == []


def test_a_line_comes_back_from_the_results_file() -> None:
    line = Measured("threads", "MiniLM", "2 threads against 1", [0.9, 0.97, 1.1], counts=False)
    assert Measured.of(json.loads(json.dumps(line.record()))) == line


def test_the_table_shows_what_was_measured_and_what_it_must_be() -> None:
    lines = [
        Measured("memory", "MiniLM", "whet / guides", [0.4]),
        Measured("limit", "MiniLM", "whet", [0.5, 0.6, 0.7]),
        Measured("best", "MiniLM", "not decisive", [1.0], counts=False),
    ]
    rows = table(lines).splitlines()
    assert [row.split()[0] for row in rows] == ["figure", "steps/s", "not", "part", "whet", "peak", "whet"]
    assert rows[2].endswith("(NO)")
    assert rows[4].split()[2:] == ["60", "%", "50", "%", "to", "70", "%", "3", "78", "%", "90", "%", "NO"]
    assert rows[6].split()[-4:] == ["1", "0.50x", "0.35x", "yes"]
    assert summary(lines) == "1 of 2 lines are met; not yet: part of the matrix-product limit"


def test_measured_steps_are_spread_from_short_to_long() -> None:
    """Length grouping sorts an epoch's batches; the first of them, all long, would speak for none of the others."""
    n_tokens = list(range(100, 0, -1))
    batches = [list(range(i, i + 10)) for i in range(0, 100, 10)]
    picked = spread(batches, n_tokens, n_steps=6)
    assert picked[0] == batches[0]  # the longest warms up
    assert picked[1:6] == [batches[i] for i in (8, 6, 4, 2, 0)]
    assert len(picked) == 8  # two more, for a Trainer that makes batches ahead


@pytest.mark.parametrize("variant", VARIANTS)
def test_questions_are_distinct_and_answers_stay_in_place(variant: str, tmp_path: Path) -> None:
    for split in ("train", "dev"):
        (tmp_path / f"{split}.json").write_text(json.dumps(squad(split)))
    made = write_questions(tmp_path, tmp_path / "out.jsonl", 20, variant)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len({row["question"] for row in rows}) == len({row["id"] for row in rows}) == len(rows) == 20
    assert {variant: len({row["context"] for row in rows})} == {variant: made["contexts"]}
    assert made["contexts"] == {"repeated": 2, "copied": 10, "distinct": 20}[variant]
    for row in rows:
        (start,), (text,) = row["answers"]["answer_start"], row["answers"]["text"]
        assert row["context"][start : start + len(text)] == text


def squad(split: str) -> dict[str, Any]:
    """Return a data set of one context and two questions."""
    context = f"The {split} context says that honey never spoils."
    asked = [
        {"id": f"{split}{n}", "question": f"What lasts in {split}? {n}", "answers": [answer(context)]} for n in range(2)
    ]
    return {"data": [{"title": split, "paragraphs": [{"context": context, "qas": asked}]}]}


def answer(context: str) -> dict[str, Any]:
    return {"text": "honey", "answer_start": context.index("honey")}


def test_workers_get_nothing_that_steers_threads_or_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "LD_PRELOAD", "MALLOC_TOP_PAD_", "PYTHONPATH"):
        monkeypatch.setenv(name, "x")
    ours, peers = environment(3, with_whet=True), environment(3, with_whet=False)
    assert ours["OMP_NUM_THREADS"] == peers["OMP_NUM_THREADS"] == "3"
    assert not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "LD_PRELOAD", "MALLOC_TOP_PAD_"} & (ours.keys() | peers.keys())
    assert "PYTHONPATH" in ours
    assert "PYTHONPATH" not in peers
