"""Rows of a batch do not know of each other: a part of what `make test-leak` measures, and that it measures."""

from __future__ import annotations

import pytest
from leak_runs import EVERY, FORMATS, FORMS, WAYS, measure, measure_form, moved, takes
from peers import peers


@pytest.mark.parametrize("family", EVERY)
def test_a_changed_row_moves_no_other_by_a_single_bit(family: str) -> None:
    """Each number of a row comes from sums over that row alone; the changed row adds zeros to the gradients."""
    found = measure(family, "words", "packed", "fp32")
    assert found is not None
    assert found.own > 1e-3
    assert (found.logits, found.gradients) == (0.0, 0.0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("task", ["qa", "classify", "tag"])
def test_no_task_moves_other_rows(task: str, way: str) -> None:
    found = measure("bert", task, way, "bf16")
    assert found is not None
    assert found.own > 1e-3
    assert (found.logits, found.gradients) == (0.0, 0.0)


@pytest.mark.parametrize("number_format", FORMATS)
@pytest.mark.parametrize("form", [form for form in FORMS if takes("bert", form)])
@pytest.mark.parametrize("family", ["bert", "modernbert", "albert", "roberta", "distilbert"])
def test_a_changed_row_moves_no_other_that_a_caller_names(family: str, form: str, number_format: str) -> None:
    found = measure_form(family, form, number_format)
    assert found is not None
    assert found.own > 1e-3
    assert (found.logits, found.gradients) == (0.0, 0.0)


def test_the_measure_sees_the_leak_of_packed_position_ids() -> None:
    """BERT in transformers attends to all rows that lie end to end: a measure that finds none there would be blind."""
    model, run = peers()["transformers BERT, position_ids, sdpa"]
    found = moved(model, run, "tag")
    assert found.logits > 1e-3
    assert found.gradients > 1e-3
