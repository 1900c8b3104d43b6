"""Rows that no model can learn from end a run with an error that names them, not with numbers that are none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import engine
from tiny import arguments, losses, tiny_model, tiny_rows
from whet import DataError

BAD: dict[str, dict[str, Any]] = {
    "ends behind its row": {"end_positions": 9},
    "ends behind every row": {"end_positions": 500},
    "begins before its row": {"start_positions": -1},
    "holds no token": {"input_ids": [], "token_type_ids": [], "start_positions": 0, "end_positions": 0},
}


@pytest.mark.parametrize("name", BAD)
def test_a_row_without_an_answer_in_it_is_refused(tmp_path: Path, name: str) -> None:
    """Its loss would be infinite or NaN, and the whole step lost."""
    rows = [*tiny_rows(3, lengths=(20, 20)), *tiny_rows(1, lengths=(9, 9))]
    rows[3] |= BAD[name]
    trainer = engine.Trainer(model=tiny_model("bert"), args=arguments(tmp_path, max_steps=1), train_dataset=rows)
    with pytest.raises(DataError, match="row 3"):
        trainer.train()


def test_the_last_token_may_be_the_answer(tmp_path: Path) -> None:
    rows = [*tiny_rows(3, lengths=(20, 20)), *tiny_rows(1, lengths=(9, 9))]
    rows[3] |= {"start_positions": 8, "end_positions": 8}
    trainer = engine.Trainer(model=tiny_model("bert"), args=arguments(tmp_path, max_steps=1), train_dataset=rows)
    trainer.train()
    assert 0 < losses(trainer)[0] < 10
