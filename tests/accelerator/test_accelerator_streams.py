"""Loops over rows that draw random numbers themselves resume bitwise within an epoch, or are refused."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import DataLoaderConfiguration
from own_loops import N_ROWS, Loop, collate, fresh, made
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

import whet

DROPOUT = 0.1


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    with fresh():
        yield


class Shuffled(IterableDataset):
    """A stream that shuffles its rows by the generators that everybody shares, and by one of its own."""

    def __init__(self) -> None:
        self.numbers = np.random.default_rng(5)

    def __iter__(self) -> Iterator[int]:
        for n in torch.randperm(N_ROWS).tolist():
            yield (n + random.randrange(3) + int(self.numbers.integers(3))) % N_ROWS


class OnlyOnce(IterableDataset):
    """A stream that continues with its next rows whenever it is read."""

    def __init__(self, first: int) -> None:
        self.rows = iter(range(first, 1000))

    def __iter__(self) -> Iterator[int]:
        for _ in range(N_ROWS):
            yield next(self.rows)


class Ordered(IterableDataset):
    """A stream without random numbers."""

    def __iter__(self) -> Iterator[int]:
        yield from range(N_ROWS)


def masking(rows: Sequence[int]) -> dict[str, Tensor]:
    """Return the rows with some of their tokens replaced, as a masking collator does."""
    batch = collate(rows)
    drawn = torch.rand(batch["input_ids"].shape) < 0.2
    return batch | {"input_ids": batch["input_ids"].masked_fill(drawn, 4)}


KINDS: dict[str, dict[str, Any]] = {
    "a stream that shuffles itself": {"rows": Shuffled},
    "a stream read by a worker": {"rows": Shuffled, "num_workers": 1},
    "a stream and a collator that masks": {"rows": Ordered, "collate_fn": masking},
    "rows with an index and a collator that masks": {"rows": lambda: range(N_ROWS), "collate_fn": masking},
}


def loop_over(rows: Any, **options: Any) -> Loop:
    """Return a loop over these rows."""
    return Loop(made("whet", gradient_accumulation_steps=2), dropout=DROPOUT, rows=rows, **options)


@pytest.mark.each_value
@pytest.mark.parametrize("with_epochs", [True, False], ids=["set_epoch", "without set_epoch"])
@pytest.mark.parametrize("kind", KINDS)
def test_resumed_loop_draws_what_the_one_without_a_stop_drew(kind: str, with_epochs: bool, tmp_path: Path) -> None:
    given = {name: value for name, value in KINDS[kind].items() if name != "rows"} | {"sets_epoch": with_epochs}
    rows = KINDS[kind]["rows"]
    straight = loop_over(rows(), **given)
    for number in range(2):
        straight.epoch(number)
    with fresh():
        before = loop_over(rows(), **given)
        before.epoch(0, last=4)
        before.accelerator.save_state(tmp_path / "state")
    torch.manual_seed(99)
    random.seed(99)
    with fresh():
        after = loop_over(rows(), **given)
        after.accelerator.load_state(tmp_path / "state")
        after.epoch(0, first=4)
        after.epoch(1)
    assert before.losses + after.losses == straight.losses
    epochs = straight.losses[:10], straight.losses[10:]
    assert epochs[0] != epochs[1]


def test_stream_without_random_numbers_has_the_losses_of_accelerates_own_loop() -> None:
    losses = []
    for kind in ("accelerate", "whet"):
        with fresh():
            loop = Loop(made(kind), rows=Ordered())
            loop.epoch(0)
            losses.append(loop.losses)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize("rows", [range(N_ROWS), Ordered()], ids=["rows", "stream"])
def test_collator_that_returns_none_does_not_end_the_epoch(rows: Any) -> None:
    """As in accelerate's loop, which leaves it to its user to continue with the next batch."""

    def some(numbers: Sequence[int]) -> Any:
        return None if numbers[0] in (0, 12) else [*numbers]

    accelerator = made("whet", dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    batches = [*accelerator.prepare(DataLoader(rows, 4, collate_fn=some))]
    assert [n for n, batch in enumerate(batches) if batch is None] == [0, 3]
    assert [n for batch in batches if batch for n in batch] == [n for n in range(N_ROWS) if n // 4 not in (0, 3)]


def test_stream_that_gives_other_rows_when_it_is_read_again_is_refused(tmp_path: Path) -> None:
    before = loop_over(OnlyOnce(0))
    before.epoch(0, last=4)
    before.accelerator.save_state(tmp_path / "state")
    with fresh():
        after = loop_over(OnlyOnce(17))
        after.accelerator.load_state(tmp_path / "state")
        with pytest.raises(whet.WhetError, match="gives other rows than when this state was saved"):
            after.epoch(0, first=4)
