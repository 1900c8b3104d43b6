"""The time left counts the tokens of the steps to come, and the evaluations and saves between them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import toy_rows, toy_trainer
from transformers import TrainerCallback

import engine
from tiny import arguments, tiny_model, tiny_rows
from whet.engine.run import Interval
from whet.watch.meter import Ahead, Clock


def clock_after(*steps: tuple[float, int], **ahead: Any) -> Clock:
    """A clock that has counted steps of these seconds and tokens, with this left."""
    clock = Clock(lambda: Ahead(**ahead))
    for seconds, n_tokens in steps:
        clock.add_step(seconds, n_tokens)
    return clock


def test_short_rows_after_long_ones_take_less_time_than_the_mean_step() -> None:
    clock = clock_after(*[(1.0, 1000)] * 3, n_steps=10, n_tokens=1000)  # ten steps of a hundred tokens each
    assert clock.left_s == pytest.approx(1.0)


def test_rows_of_unknown_length_count_by_steps() -> None:
    assert clock_after(*[(1.0, 0)] * 3, n_steps=10).left_s == pytest.approx(10.0)


def test_the_first_step_which_is_slow_does_not_count_once_there_is_a_second() -> None:
    assert clock_after((60.0, 100), (1.0, 100), n_steps=1, n_tokens=100).left_s == pytest.approx(1.0)


def test_steps_next_to_something_slow_do_not_count_once_there_are_others() -> None:
    clock = clock_after((60.0, 100), *[(9.0, 100)] * 5, n_steps=1, n_tokens=100)
    clock.forget_pace()
    assert clock.left_s == pytest.approx(9.0), "nothing else is known yet"
    for seconds in (3.0, 1.0):
        clock.add_step(seconds, 100)
        assert clock.left_s == pytest.approx(seconds)
    clock.add_step(1.0, 100)
    assert clock.left_s == pytest.approx(1.0)


def test_evaluations_to_come_count_as_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("whet.watch.meter.time.perf_counter", lambda: now[0])
    clock = clock_after((1.0, 10), n_steps=4, n_tokens=40, pauses={"evaluation": 3, "saving": 1})
    assert clock.left_s == pytest.approx(4.0)
    with clock.of("evaluation"):
        now[0] += 5.0
    assert clock.left_s == pytest.approx(4.0 + 2 * 5.0)  # one of the three is done
    with clock.of("saving", n_times=0):
        now[0] += 1.0
    with clock.of("saving"):
        now[0] += 2.0
    assert clock.left_s == pytest.approx(4.0 + 2 * 5.0), "the only save is done"
    assert clock.seconds == {"evaluation": 5.0, "saving": 3.0}


def test_evaluations_that_have_not_come_yet_count_by_their_tokens() -> None:
    ahead = {"n_steps": 1, "n_tokens": 100, "pauses": {"evaluation": 2}, "forward_tokens": {"evaluation": 3000}}
    assert clock_after((1.0, 100), **ahead).left_s == pytest.approx(1.0 + 2 * 10.0)


def test_nothing_is_left_before_the_first_step() -> None:
    assert clock_after(n_steps=9, pauses={"saving": 3}).left_s == 0.0


def test_an_evaluation_that_is_due_is_left_until_it_is_done(tmp_path: Path) -> None:
    """Four evaluations, one after every second step: those left at the end of a step, and when the next one begins."""
    evaluation_s, ends, begins = 0.4, [], []

    class Looks(TrainerCallback):
        def on_step_end(self, *_: Any, meter: Any, **__: Any) -> None:
            ends.append(round(meter.clock.left_s / evaluation_s))

        def on_step_begin(self, *_: Any, meter: Any, **__: Any) -> None:
            begins.append(round(meter.clock.left_s / evaluation_s))

    def evaluate(_: Any) -> dict[str, float]:
        time.sleep(evaluation_s)
        return {"found": 1.0}

    rows = tiny_rows(16, lengths=(5, 5))
    args = arguments(tmp_path, max_steps=8, eval_strategy="steps", eval_steps=2, save_strategy="no")
    engine.Trainer(
        tiny_model("bert"), args, train_dataset=rows, eval_dataset=rows, evaluation=evaluate, callbacks=[Looks()]
    ).train()
    assert ends[2:] == [3, 3, 2, 2, 1, 1]
    assert begins[2:] == [3, 3, 2, 2, 1, 1]


@pytest.mark.parametrize(
    ("strategy", "every", "begins", "left"),
    [
        ("epoch", 4, 0.0, [3, 3, 3, 3, 3, 2, 2, 2, 2, 1, 1]),
        ("steps", 5, 0.0, [2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1]),
        ("steps", 4, 0.0, [3, 3, 3, 3, 3, 2, 2, 2, 2, 1, 1]),  # the last step counts as well
        ("steps", 4, 6.0, [2, 2, 2, 2, 2, 2, 2, 2, 2, 1, 1]),
        ("steps", 4, 11.0, [0] * 11),
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
