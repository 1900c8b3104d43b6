"""The time left counts the tokens of the steps to come, and the evaluations and saves between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_runs import toy_rows, toy_trainer

import engine
from tiny import arguments, tiny_model, tiny_rows
from whet.engine.run import Interval
from whet.watch.meter import Ahead, Pace


def test_short_rows_after_long_ones_take_less_time_than_the_mean_step() -> None:
    pace = Pace()
    for _ in range(3):
        pace.add(1.0, 1000, Ahead(n_steps=10, n_tokens=1000))  # ten steps of a hundred tokens each
    assert pace.left_s == pytest.approx(1.0)


def test_rows_of_unknown_length_count_by_steps() -> None:
    pace = Pace()
    for _ in range(3):
        pace.add(1.0, 0, Ahead(n_steps=10))
    assert pace.left_s == pytest.approx(10.0)


def test_the_first_step_which_is_slow_does_not_count_once_there_is_a_second() -> None:
    pace = Pace()
    pace.add(60.0, 100, Ahead(n_steps=2, n_tokens=200))
    pace.add(1.0, 100, Ahead(n_steps=1, n_tokens=100))
    assert pace.left_s == pytest.approx(1.0)


def test_evaluations_to_come_count_as_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("whet.watch.meter.time.perf_counter", lambda: now[0])
    pace = Pace()
    pace.add(1.0, 10, Ahead(n_steps=4, n_tokens=40, pauses={"evaluation": 3, "saving": 1}))
    assert pace.left_s == pytest.approx(4.0)
    with pace.pause("evaluation"):
        now[0] += 5.0
    assert pace.left_s == pytest.approx(4.0 + 2 * 5.0)  # one of the three is done


def test_evaluations_that_have_not_come_yet_count_by_their_tokens() -> None:
    pace = Pace()
    ahead = Ahead(n_steps=1, n_tokens=100, pauses={"evaluation": 2}, forward_tokens={"evaluation": 3000})
    pace.add(1.0, 100, ahead)
    assert pace.left_s == pytest.approx(1.0 + 2 * 10.0)


def test_nothing_is_left_before_the_first_step() -> None:
    assert Pace().left_s == 0.0


@pytest.mark.parametrize(
    ("strategy", "every", "begins", "left"),
    [
        ("epoch", 4, 0.0, [3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 0]),
        ("steps", 5, 0.0, [2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 0]),
        ("steps", 4, 0.0, [3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 0]),  # the last step counts as well
        ("steps", 4, 6.0, [2, 2, 2, 2, 2, 2, 2, 2, 1, 1, 0]),
        ("no", 0, 0.0, [0] * 11),
    ],
)
def test_how_often_an_interval_is_due_in_the_rest_of_a_run(
    strategy: str, every: int, begins: float, left: list[int]
) -> None:
    assert [Interval(strategy, every, begins).times_left(done, 10) for done in range(11)] == left


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"train_sampling_strategy": "group_by_length"},
        {"gradient_accumulation_steps": 2},
        {"dataloader_drop_last": True},
        {"num_train_epochs": 1.0},
    ],
)
def test_the_tokens_ahead_are_those_of_the_batches_to_come(tmp_path: Path, settings: dict[str, Any]) -> None:
    rows = tiny_rows(22)
    given = {"num_train_epochs": 2.0, **settings}
    trainer = engine.Trainer(model=tiny_model("bert"), args=arguments(tmp_path, **given), train_dataset=rows)
    loop = trainer.new_loop()
    n_steps = loop.run.plan.n_steps
    of_steps = [sum(batch.n_tokens for batch in loop.loader.take(step)) for step in range(n_steps)]
    found = [loop.loader.tokens_ahead(step) for step in range(n_steps + 1)]
    whole = "dataloader_drop_last" not in settings  # another row is dropped in each epoch
    wanted = [sum(of_steps[step:]) for step in range(n_steps + 1)]
    per_epoch = loop.run.plan.order.steps_per_epoch
    if whole:
        assert found == wanted
    assert found[-per_epoch - 1 :] == wanted[-per_epoch - 1 :]
    loop.loader.close()


def test_rows_that_have_to_be_read_for_their_length_are_not_read(tmp_path: Path) -> None:
    loop = toy_trainer(tmp_path, train_dataset=toy_rows(8)).new_loop()
    assert loop.loader.tokens_ahead(0) is None
