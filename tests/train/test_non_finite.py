"""A step whose loss or gradient is NaN or infinite is not taken; several in a row end the run."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import Recorder, Toy, assert_same_weights, checkpoints, entries, toy_rows, toy_trainer, weights_of
from torch import Tensor

from whet.errors import EXIT_NON_FINITE, NonFiniteError
from whet.store import find


class Spoilt(Toy):
    """A `Toy` whose loss, or whose gradient, is no number where a row holds a 99."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor, labels: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = super().forward(x, labels)["loss"]
        if not (x == 99).any():
            return {"loss": loss}
        if self.how == "gradient":  # the root of 0 is 0, its slope infinite
            return {"loss": loss + (0.0 * self.head.weight.sum()).sqrt()}
        return {"loss": loss * float(self.how)}


def _rows(*spoilt: int, n_steps: int = 6) -> list[dict[str, Tensor]]:
    """Rows of so many steps, those of the `spoilt` steps (counted from 1) with a 99 in them."""
    rows = toy_rows(4 * n_steps)
    for step in spoilt:
        rows[4 * step - 2]["x"] = torch.full((4,), 99.0)
    return rows


def _trainer(folder: Path, *spoilt: int, how: str = "nan", **changes: Any) -> Any:
    return toy_trainer(folder, model=Spoilt(how), train_dataset=_rows(*spoilt), logging_steps=1, **changes)


@pytest.mark.parametrize("how", ["nan", "inf", "gradient"])
def test_such_a_step_leaves_every_bit_as_it_was(tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    seen = Recorder(weights_of)
    trainer = _trainer(tmp_path, 3, how=how, callbacks=[seen])
    trainer.train()
    assert_same_weights(seen.kept[2], seen.kept[1])
    assert not torch.equal(seen.kept[3]["head.weight"], seen.kept[2]["head.weight"])
    assert trainer.state.global_step == 6
    (message,) = [text for text in caplog.messages if "not applied" in text]
    assert "step 3" in message
    assert ("inf" if how == "inf" else "nan" if how == "nan" else "gradient norm") in message


def test_the_optimizer_does_not_see_it(tmp_path: Path) -> None:
    """As if the rows of that step had not been there, but for the schedule, which goes on: here it is constant."""
    with_it = _trainer(tmp_path, 3, lr_scheduler_type="constant")
    with_it.train()
    rows = _rows(3)
    without = toy_trainer(
        tmp_path, model=Spoilt("nan"), train_dataset=rows[:8] + rows[12:], lr_scheduler_type="constant"
    )
    without.train()
    assert_same_weights(with_it.model, without.model)


def test_it_is_seen_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = _trainer(tmp_path, 3)
    with caplog.at_level(logging.WARNING, logger="whet"):
        result = trainer.train()
    losses = dict(entries(trainer, "loss"))
    assert losses[3] != losses[3]  # NaN
    assert all(torch.isfinite(torch.tensor(loss)) for step, loss in losses.items() if step != 3)
    assert torch.isfinite(torch.tensor(result.training_loss))


def test_what_is_printed_for_machines_stays_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """JSON has no NaN: a reader other than Python's would stop at one."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    _trainer(tmp_path, 3, log_format="json").train()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7
    for line in lines:
        json.loads(line, parse_constant=refuse)


def test_two_in_a_row_are_borne(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, 2, 3, 5, 6)
    assert trainer.train().global_step == 6


def test_three_in_a_row_end_the_run(tmp_path: Path) -> None:
    seen = Recorder(weights_of)
    trainer = _trainer(tmp_path, 1, 3, 4, 5, callbacks=[seen])
    with pytest.raises(
        NonFiniteError, match=r"(?s)3 steps in a row.*got: loss nan.*step 5.*why: .*fix: .*--learning_rate"
    ) as caught:
        trainer.train()
    assert caught.value.exit_code == EXIT_NON_FINITE
    assert_same_weights(trainer.model, seen.kept[1])
    assert seen.events[-1][0] == "train_end"


def test_the_checkpoints_before_stay_good(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError):
        _trainer(tmp_path, 3, 4, 5, save_strategy="steps", save_steps=2).train()
    names = checkpoints(tmp_path)
    assert names[0] == "checkpoint-2"
    assert all(find.problems_of(tmp_path / name) == [] for name in names)


def test_a_resumed_run_remembers_how_many_there_were_in_a_row(tmp_path: Path) -> None:
    """Saved after the second of three: an uninterrupted run stops at the third, and so does this one."""
    with pytest.raises(NonFiniteError):
        _trainer(tmp_path, 3, 4, 5, save_strategy="steps", save_steps=4).train()
    with pytest.raises(NonFiniteError):
        _trainer(tmp_path, 3, 4, 5).train(resume_from_checkpoint="auto")


def test_an_evaluation_that_is_not_finite_ends_nothing(tmp_path: Path) -> None:
    """It is told, and is never the best."""
    trainer = toy_trainer(
        tmp_path, model=Spoilt("nan"), eval_dataset=_rows(1, n_steps=1), eval_strategy="epoch", num_train_epochs=2,
        save_strategy="epoch", metric_for_best_model="loss",
    )  # fmt: skip
    trainer.train()
    assert [loss != loss for _, loss in entries(trainer, "eval_loss")] == [True, True]
    assert trainer.state.best_metric is None
