"""Batches of pairs whose texts repeat: no text twice in one, all rows in each epoch, as many batches in each."""

from __future__ import annotations

import random
import time
from collections import Counter

import pytest
import torch

from whet.tasks.embed.batches import DistinctTexts

N_ROWS, SIZE, N_EPOCHS = 120, 16, 12
QUESTIONS = [f"question {n}" for n in range(N_ROWS)]


def answers(n_answers: int) -> list[str]:
    return [f"answer {random.Random(n).randrange(n_answers)}" for n in range(N_ROWS)]


COLUMNS = {
    "no text twice": [QUESTIONS, answers(10**9)],
    "six answers": [QUESTIONS, [f"answer {n % 6}" for n in range(N_ROWS)]],
    "some answers again": [QUESTIONS, answers(60)],
    "questions and answers again": [[f"question {n % 70}" for n in range(N_ROWS)], answers(50)],
    "one answer for most": [QUESTIONS, [f"answer {max(0, n - 80)}" for n in range(N_ROWS)]],
}


def epochs(found: DistinctTexts) -> list[list[list[int]]]:
    every = []
    for epoch in range(N_EPOCHS):
        found.set_epoch(epoch)
        every.append([*found])
    return every


@pytest.mark.parametrize("case", COLUMNS)
def test_each_epoch_has_all_rows_and_as_many_batches_without_a_text_twice(case: str) -> None:
    columns = COLUMNS[case]
    found = DistinctTexts(columns, SIZE, drop_last=False, seed=3)
    every = epochs(found)
    for batches in every:
        assert len(batches) == len(found)
        assert sorted(n for batch in batches for n in batch) == [*range(N_ROWS)]
        for batch in batches:
            assert len(batch) <= SIZE
            texts = Counter(text for n in batch for text in {column[n] for column in columns})
            assert set(texts.values()) == {1}
    assert len({str(batches) for batches in every}) == N_EPOCHS  # each in an order of its own
    found.set_epoch(0)
    assert [*found] == every[0]
    assert [*DistinctTexts(columns, SIZE, drop_last=False, seed=4)] != every[0]


@pytest.mark.parametrize("case", COLUMNS)
def test_without_the_last_rows_all_batches_are_full(case: str) -> None:
    found = DistinctTexts(COLUMNS[case], SIZE, drop_last=True, seed=3)
    for batches in epochs(found):
        assert [len(batch) for batch in batches] == [SIZE] * len(found)
        assert len({n for batch in batches for n in batch}) == SIZE * len(found)
    assert bool(len(found)) == (case != "six answers")


@pytest.mark.parametrize("size", [2, 5, SIZE])
@pytest.mark.parametrize("case", COLUMNS)
def test_a_batch_takes_the_first_rows_that_share_no_text(case: str, size: int) -> None:
    columns = COLUMNS[case]
    found = DistinctTexts(columns, size, drop_last=False, seed=3)
    left = torch.randperm(N_ROWS, generator=torch.Generator().manual_seed(3), dtype=torch.int32).tolist()
    for batch in found:
        wanted: list[int] = []
        for n in left:
            held = {column[row] for row in wanted for column in columns}
            if len(wanted) < size and held.isdisjoint(column[n] for column in columns):
                wanted.append(n)
        assert batch == wanted
        left = [n for n in left if n not in wanted]
    assert not left


@pytest.mark.parametrize("n_positives", [2, 10**9])
def test_texts_that_repeat_often_take_no_longer_than_others(n_positives: int) -> None:
    n_rows = 20_000
    drawn = random.Random(0)
    columns = [[f"text {n}" for n in range(n_rows)], [f"class {drawn.randrange(n_positives)}" for _ in range(n_rows)]]
    began_s = time.process_time()
    found = DistinctTexts(columns, 32, drop_last=False, seed=3)
    assert sum(map(len, found)) == n_rows
    assert time.process_time() - began_s < 5  # 0.2 s; the rows left over, looked at again for each batch, took 20 s


def test_people_hear_of_small_batches_and_of_rows_left_out() -> None:
    def said(case: str, *, drop_last: bool = False, needs_others: bool = True) -> str:
        found = DistinctTexts(COLUMNS[case], SIZE, drop_last=drop_last, seed=3)
        return "; ".join(found.notes(needs_others=needs_others))

    assert said("no text twice") == said("no text twice", drop_last=True) == said("some answers again") == ""
    assert "batches hold 6.0 rows on average, of 16" in said("six answers")
    assert "batches hold 1.5 rows on average, of 16" in said("one answer for most")
    assert "of 81 batches hold one row, which has no negatives there" in said("one answer for most")
    assert "one row" not in said("one answer for most", needs_others=False)
    assert said("one answer for most", drop_last=True).endswith(
        "rows are left out of each epoch (--dataloader_drop_last)"
    )
