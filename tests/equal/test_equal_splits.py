"""With dropout on, how a step's rows are cut up, laid out and computed does not change the training curve."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import engine
from tiny import (
    FAMILIES,
    arguments,
    assert_same_weights,
    losses,
    padded,
    plain_torch,
    tiny_model,
    tiny_rows,
    weights_of,
)
from whet.engine import step
from whet.objectives.base import Objective
from whet.precision.policy import Float32

N_STEPS = 12
# Sums of float32 in another order: each loss is rounded at 6e-8, and what the weights have drifted apart by until then
# is smaller than that; seen: 3e-7. One wrong element of one mask moves the loss by more than 1e-4.
LOSS_TOLERANCE = 1e-6
WEIGHT_TOLERANCE = 1e-6  # weights of size 0.1, rounded N_STEPS times; seen: 1.5e-7; one AdamW step is up to 5e-4


@dataclass
class Run:
    """What a run leaves behind."""

    losses: list[float]
    weights: dict[str, Tensor]


def run(folder: Path, family: str = "bert", *, rows: Any = None, **changes: Any) -> Run:
    """Train with dropout on shuffled rows, over the end of an epoch whose last step is short."""
    usual = {"per_device_train_batch_size": 12, "max_steps": N_STEPS, "weight_decay": 0.01, "seed": 5}
    trainer = engine.Trainer(
        model=tiny_model(family, dropout=0.1),
        args=arguments(folder, **(usual | changes)),
        train_dataset=tiny_rows(75, family) if rows is None else rows,
    )
    assert trainer.objective.packed
    trainer.train()
    return Run(losses(trainer), weights_of(trainer.model))


def assert_same_run(found: Run, wanted: Run) -> None:
    """One curve and one result, to rounding."""
    assert len(found.losses) == N_STEPS
    assert found.losses == pytest.approx(wanted.losses, rel=LOSS_TOLERANCE)
    assert_same_weights(found.weights, wanted.weights, WEIGHT_TOLERANCE)


def assert_identical(found: Run, wanted: Run) -> None:
    """Equal in every bit."""
    assert found.losses == wanted.losses
    assert [name for name in wanted.weights if not torch.equal(found.weights[name], wanted.weights[name])] == []


@pytest.fixture
def threads() -> Iterator[None]:
    """Leave the number of threads as it was."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class WholeSteps(dict[str, Run]):
    """The run of each family that a test asks for, with 12 rows in one batch."""

    def __init__(self, make_folder: Callable[[str], Path]) -> None:
        super().__init__()
        self._make_folder = make_folder

    def __missing__(self, family: str) -> Run:
        self[family] = run(self._make_folder(family), family)
        return self[family]


@pytest.fixture(scope="module")
def whole_steps(tmp_path_factory: pytest.TempPathFactory) -> WholeSteps:
    """The runs that the others are compared with, by the native operators."""
    return WholeSteps(tmp_path_factory.mktemp)


@pytest.mark.each_value
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("n_rows", "n_batches"), [(6, 2), (4, 3), (1, 12)])
def test_accumulation_does_not_change_the_curve(
    tmp_path: Path, whole_steps: dict[str, Run], family: str, n_rows: int, n_batches: int
) -> None:
    split = {"per_device_train_batch_size": n_rows, "gradient_accumulation_steps": n_batches}
    assert_same_run(run(tmp_path, family, **split), whole_steps[family])


@pytest.mark.each_value
@pytest.mark.parametrize("family", FAMILIES)
def test_native_operators_do_not_change_the_curve(tmp_path: Path, whole_steps: dict[str, Run], family: str) -> None:
    """The masks of the native operators are those of plain torch, and the rest agrees to rounding."""
    wanted = whole_steps[family]
    with plain_torch():
        assert_same_run(run(tmp_path, family), wanted)


@pytest.mark.each_value
@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("family", ["bert", "albert"])
def test_twice_the_same_run_is_the_same_in_every_bit(tmp_path: Path, family: str) -> None:
    assert_identical(run(tmp_path, family), run(tmp_path, family))


@pytest.mark.usefixtures("threads", "operators")
def test_threads_do_not_change_the_curve(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    one = run(tmp_path)
    torch.set_num_threads(2)
    assert_same_run(run(tmp_path), one)


@pytest.mark.parametrize("length", [None, 64], ids=["to-the-longest", "to-64"])
@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_padding_in_the_data_set_does_not_change_a_bit(
    tmp_path: Path, whole_steps: dict[str, Run], family: str, length: int | None
) -> None:
    """Rows that somebody has padded already, as a list of features with an attention_mask, train as bare rows do."""
    rows = list(tiny_rows(75, family))
    columns = padded(rows, 1 if family == "roberta" else 0, length)
    features = [{name: column[row].tolist() for name, column in columns.items()} for row in range(len(rows))]
    assert len({len(feature["input_ids"]) for feature in features}) == 1
    assert_identical(run(tmp_path, family, rows=features), whole_steps[family])


def test_another_seed_is_another_curve(tmp_path: Path, whole_steps: dict[str, Run]) -> None:
    """What the equalities above are worth: masks alone, in the same rows, move every loss."""
    assert_identical(run(tmp_path, data_seed=5), whole_steps["bert"])
    other = run(tmp_path, seed=6, data_seed=5)
    gaps = [abs(a - b) / b for a, b in zip(other.losses, whole_steps["bert"].losses, strict=True)]
    assert min(gaps) > 100 * LOSS_TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_uneven_packings_give_one_gradient(tmp_path: Path, family: str) -> None:
    """Twelve rows of a step as 12, as 5 + 7, as 1 + 10 + 1: the order is kept, the cuts are anywhere."""
    trainer = engine.Trainer(
        model=tiny_model(family, dropout=0.1), args=arguments(tmp_path), train_dataset=tiny_rows(12, family)
    )
    trainer.model.train()
    whole, *others = [_gradient(trainer, cuts) for cuts in ([0, 12], [0, 5, 12], [0, 1, 11, 12])]
    for gradient in others:
        for name, wanted in whole.items():
            # A sum is as wrong as its terms are, however much of them cancels: the terms are of size 0.1 and more.
            # Some thousand float32 terms in another order; seen: 6e-7.
            scale = max(float(wanted.abs().max()), 0.1)
            assert float((gradient[name] - wanted).abs().max()) < 2e-6 * scale, name


def _gradient(trainer: engine.Trainer, cuts: list[int]) -> dict[str, Tensor]:
    """Return the gradient of the step over all rows, cut into micro-batches at these places."""
    objective: Objective = trainer.objective
    pieces = [range(first, end) for first, end in pairwise(cuts)]
    batches = [objective.batch(trainer.train_dataset, list(piece), piece.start) for piece in pieces]
    step.ObjectiveGradients(objective=objective, precision=Float32(), seed=5)(batches, 3)
    found = {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}
    trainer.model.zero_grad(set_to_none=True)
    return found
