"""How long a run is and what happens after which step: epochs, steps, shares of the run, strategies."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from tiny_runs import Recorder, Toy, checkpoints, entries, toy_rows, toy_trainer

from whet.errors import WhetError


def _trained(folder: Path, n_rows: int = 12, **changes: Any) -> Any:
    trainer = toy_trainer(folder, train_dataset=toy_rows(n_rows), **changes)
    trainer.train()
    return trainer


class Batches:
    """A collator that keeps which rows came together; each row is told by its place in the data."""

    def __init__(self, n_rows: int) -> None:
        self.rows = [row | {"place": i} for i, row in enumerate(toy_rows(n_rows))]
        self.seen: list[list[int]] = []

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        self.seen.append([row["place"] for row in rows])
        return {name: torch.stack([row[name] for row in rows]) for name in ("x", "labels")}


@pytest.mark.parametrize(
    ("n_rows", "changes", "n_steps", "epochs"),
    [
        (12, {"num_train_epochs": 2}, 6, 2.0),
        (12, {"num_train_epochs": 0.5}, 2, 2 / 3),  # half of 3 steps, rounded up
        (12, {"num_train_epochs": 1.5}, 5, 5 / 3),
        (13, {"num_train_epochs": 1}, 4, 1.0),
        (13, {"num_train_epochs": 1, "dataloader_drop_last": True}, 3, 1.0),
        (13, {"num_train_epochs": 3, "max_steps": 5}, 5, 5 / 4),
        (12, {"num_train_epochs": 1, "max_steps": 7}, 7, 7 / 3),
        (13, {"num_train_epochs": 1, "gradient_accumulation_steps": 2}, 2, 1.0),
        (2, {"num_train_epochs": 2}, 2, 2.0),
    ],
)
def test_how_many_steps(tmp_path: Path, n_rows: int, changes: dict[str, Any], n_steps: int, epochs: float) -> None:
    trainer = _trained(tmp_path, n_rows, **changes)
    assert trainer.state.global_step == trainer.state.max_steps == n_steps
    assert trainer.state.epoch == pytest.approx(epochs)


def test_an_epoch_visits_each_row_once_and_each_epoch_in_another_order(tmp_path: Path) -> None:
    batches = Batches(10)
    toy_trainer(
        tmp_path,
        train_dataset=batches.rows,
        data_collator=batches,
        num_train_epochs=2,
        train_sampling_strategy="random",
    ).train()
    assert [len(batch) for batch in batches.seen] == [4, 4, 2, 4, 4, 2]
    first, second = (list(chain.from_iterable(part)) for part in (batches.seen[:3], batches.seen[3:]))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert first != list(range(10))


@pytest.mark.parametrize(
    ("seeds", "same"),
    [(({}, {}), True), (({}, {"seed": 1}), False), (({"data_seed": 42}, {"data_seed": 42, "seed": 1}), True)],
)
def test_the_order_follows_from_the_seed(tmp_path: Path, seeds: tuple[dict[str, int], ...], same: bool) -> None:
    orders = []
    for seed in seeds:
        batches = Batches(10)
        toy_trainer(
            tmp_path, train_dataset=batches.rows, data_collator=batches, train_sampling_strategy="random", **seed
        ).train()
        orders.append(batches.seen)
    assert (orders[0] == orders[1]) is same


def test_drop_last_leaves_out_the_rows_that_fill_no_step(tmp_path: Path) -> None:
    batches = Batches(11)
    toy_trainer(
        tmp_path, train_dataset=batches.rows, data_collator=batches, num_train_epochs=2, dataloader_drop_last=True
    ).train()
    assert batches.seen == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2


def test_drop_last_with_too_few_rows_for_one_batch_is_refused(tmp_path: Path) -> None:
    """All rows would be left out; training on them all the same would not be as told."""
    with pytest.raises(WhetError):
        _trained(tmp_path, 3, dataloader_drop_last=True)
    with pytest.raises(WhetError):
        _trained(tmp_path, 3, dataloader_drop_last=True, train_sampling_strategy="batch_rebalance")


def test_drop_last_keeps_the_batches_of_a_short_last_step(tmp_path: Path) -> None:
    """As in transformers: 11 rows are 5 batches of 2 rows, and the last step of an epoch takes what is left of them."""
    batches = Batches(11)
    trainer = toy_trainer(
        tmp_path, train_dataset=batches.rows, data_collator=batches, per_device_train_batch_size=2,
        gradient_accumulation_steps=4, dataloader_drop_last=True,
    )  # fmt: skip
    trainer.train()
    assert batches.seen == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert trainer.state.global_step == 2


def test_lengths_of_a_column_decide_the_order(tmp_path: Path) -> None:
    """The longest row comes first, and every step holds rows of similar length."""
    lengths = [7, 3, 9, 1, 8, 2, 6, 4]
    table = datasets.Dataset.from_list([{"x": [0.5] * 4, "labels": 1.0, "size": n} for n in lengths])
    seen: list[list[int]] = []

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        seen.append([row["size"] for row in rows])
        return {name: torch.tensor([row[name] for row in rows]) for name in ("x", "labels")}

    toy_trainer(
        tmp_path, train_dataset=table, data_collator=collate, train_sampling_strategy="group_by_length",
        length_column_name="size",
    ).train()  # fmt: skip
    assert seen[0][0] == 9
    assert sorted(chain.from_iterable(seen)) == sorted(lengths)
    assert all(step == sorted(step, reverse=True) for step in seen[1:])


def test_rows_without_a_length_cannot_be_grouped(tmp_path: Path) -> None:
    with pytest.raises(WhetError, match="length_column_name"):
        _trained(tmp_path, train_sampling_strategy="group_by_length")


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({"logging_steps": 4}, [4, 8]),
        ({"logging_steps": 0.25}, [3, 6, 9]),  # a quarter of 10 steps, rounded up
        ({"logging_steps": 4, "logging_first_step": True}, [1, 4, 8]),
        ({"logging_strategy": "epoch"}, [4, 8, 10]),
        ({"logging_strategy": "no"}, []),
        ({"logging_strategy": "no", "logging_first_step": True}, [1]),
    ],
)
def test_when_the_loss_is_logged(tmp_path: Path, changes: dict[str, Any], steps: list[int]) -> None:
    """10 steps, 4 an epoch."""
    trainer = _trained(tmp_path, 16, max_steps=10, **changes)
    assert [step for step, _ in entries(trainer, "loss")] == steps


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({"eval_strategy": "steps", "eval_steps": 5}, [5, 10]),
        ({"eval_strategy": "steps", "eval_steps": 0.2}, [2, 4, 6, 8, 10]),
        ({"eval_strategy": "steps", "logging_steps": 5}, [5, 10]),  # eval_steps is logging_steps where it is not given
        ({"eval_strategy": "epoch"}, [4, 8, 10]),
        ({"eval_strategy": "epoch", "eval_on_start": True}, [0, 4, 8, 10]),
        ({"eval_strategy": "no"}, []),
    ],
)
def test_when_the_model_is_evaluated(tmp_path: Path, changes: dict[str, Any], steps: list[int]) -> None:
    trainer = _trained(tmp_path, 16, max_steps=10, **changes)
    assert [step for step, _ in entries(trainer, "eval_loss")] == steps


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({"save_strategy": "steps", "save_steps": 4}, [4, 8, 10]),  # the end is always saved
        ({"save_strategy": "steps", "save_steps": 0.5}, [5, 10]),
        ({"save_strategy": "steps"}, [10]),
        ({"save_strategy": "epoch"}, [4, 8, 10]),
        ({"save_strategy": "no"}, []),
    ],
)
def test_when_a_checkpoint_is_written(tmp_path: Path, changes: dict[str, Any], steps: list[int]) -> None:
    seen = Recorder()
    _trained(tmp_path, 16, max_steps=10, callbacks=[seen], **changes)
    assert seen.steps("save") == steps
    assert checkpoints(tmp_path) == [f"checkpoint-{step}" for step in steps]


def test_gradient_clipping(tmp_path: Path) -> None:
    """With plain SGD at rate 1 a step changes the weights by just the clipped gradient."""

    def change(max_grad_norm: float) -> tuple[float, float]:
        model = Toy()
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
        trainer = toy_trainer(
            tmp_path, model=model, optimizers=(sgd, None), max_steps=1, logging_steps=1, max_grad_norm=max_grad_norm
        )
        trainer.train()
        after = torch.cat([p.detach().flatten() for p in model.parameters()])
        return float((after - before).norm()), entries(trainer, "grad_norm")[0][1]

    free, norm = change(0.0)
    assert free == pytest.approx(norm, rel=1e-5)  # float32
    assert norm > 1.0
    assert change(0.25) == pytest.approx((0.25, norm), rel=1e-4)  # torch divides by the norm + 1e-6
    assert change(10 * norm) == (free, norm)
