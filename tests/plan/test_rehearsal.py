"""A rehearsed pass keeps what a real one keeps, computes nothing and changes nothing."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine import Trainer, TrainingArguments
from tiny import FAMILIES, tiny_model, tiny_rows
from whet.data.batch import filled_length
from whet.data.store import RowStore
from whet.engine.forecast import Forecast, of_run
from whet.engine.trials.precision import Passes, preserving_state
from whet.kernels import matrix
from whet.kernels.library import library
from whet.models.families import deberta
from whet.plan.rehearsal import Memory, Rehearsal, Trace
from whet.precision import policy

_HELD_BYTES = 500_000_000


class Alive(TorchDispatchMode):
    """Counts the bytes that operators of torch allocate in a real pass, and the most that were there at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.most = 0, 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() == matrix.WIDENED:  # one operator to torch, whose inside no mode would see
            x, weight, bias, n_rows = args
            with self:
                result = x.new_empty(x.shape[0], weight.shape[0], dtype=torch.bfloat16)
                return matrix.widened_product_into(result, x, weight, bias, n_rows=n_rows)
        if func._can_decompose():
            with self:
                return func.decompose(*args, **(kwargs or {}))
        before = {_address(one) for one in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for one in _tensors(result):
            storage = one.untyped_storage()
            if storage._cdata not in self._known | before:
                self._known.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        self.most = max(self.most, self.now)
        return result

    def _free(self, key: int, n_bytes: int) -> None:
        self._known.discard(key)
        self.now -= n_bytes


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


def _trainer(folder: Path, family: str = "bert", rows: RowStore | None = None, **settings: Any) -> Trainer:
    usual = {
        "use_cpu": True,
        "precision": "fp32",
        "per_device_train_batch_size": 8,
        "max_steps": 2,
        "report_to": "none",
    }
    args = TrainingArguments(output_dir=str(folder), **(usual | settings))
    rows = tiny_rows(16, family) if rows is None else rows
    return Trainer(tiny_model(family, dropout=0.1), args, train_dataset=rows)


@pytest.mark.parametrize("settings", [{}, {"gradient_checkpointing": True}, {"precision": "bf16"}], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_rehearsed_pass_allocates_what_a_real_one_does(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, family, **settings)
    run, precision = trainer.planned(), trainer.args.precision
    batch = run.objective.batch(run.train_dataset, range(8), 0)
    real = Alive()
    with preserving_state(run.model):
        passes = Passes(run, [batch])
        passes.run(policy.make(precision, run.device))  # what is made once is there now
        gc.collect()
        with real:
            passes.run(policy.make(precision, run.device))
    rehearsal = Rehearsal()
    with rehearsal, preserving_state(run.model):
        passes = Passes(run, [batch])
        rehearsal.restart()
        passes.run(policy.make(precision, run.device))
    assert rehearsal.trace.peak()[0] == pytest.approx(real.most, rel=0.03)


def test_a_forecast_changes_neither_weights_nor_generators_nor_gradients(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path)
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    torch.manual_seed(3)
    drawn = torch.rand(4)
    torch.manual_seed(3)
    found = _forecast(trainer)
    assert torch.equal(torch.rand(4), drawn)
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.model.state_dict().items())
    assert all(one.grad is None for one in trainer.model.parameters())
    assert found.memory.parts["activations"] > 0
    trainer.train()  # the model still trains
    assert trainer.state.global_step == 2


def test_a_run_after_a_forecast_trains_bitwise_as_one_without(tmp_path: Path) -> None:
    alone, forecast = _trainer(tmp_path / "a"), _trainer(tmp_path / "b")
    _forecast(forecast)
    alone.train()
    forecast.train()
    other = forecast.model.state_dict()
    assert all(torch.equal(tensor, other[name]) for name, tensor in alone.model.state_dict().items())


def _forecast(trainer: Trainer, precision: str = "fp32") -> Forecast:
    return of_run(trainer.planned(), precision, trainer.new_loop().optimizer, _HELD_BYTES, Rehearsal())


def test_checkpointing_and_in_backward_shrink_their_parts(tmp_path: Path) -> None:
    plain = _forecast(_trainer(tmp_path)).memory.parts
    blocks = _forecast(_trainer(tmp_path, gradient_checkpointing=True)).memory.parts
    inside = _forecast(_trainer(tmp_path, optimizer_in_backward=True, max_grad_norm=0.0)).memory.parts
    assert blocks["activations"] < 0.7 * plain["activations"]
    if library() is not None:  # in plain torch, gradients do not outlive the peak of so small a model
        assert inside.get("gradients", 0) < plain["gradients"]
    assert plain["optimizer"] == inside["optimizer"]


def test_the_heaviest_micro_batch_of_all_steps_is_forecast(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, max_steps=6)
    run, found = trainer.planned(), _forecast(trainer)
    tokens = [int(run.train_dataset.lengths[run.plan.order.rows(step)].sum()) for step in range(6)]
    heaviest = max(tokens)
    assert sum(batch.n_tokens for batch in found.workload.heaviest) == heaviest
    assert found.workload.n_steps == 6


def test_a_budget_of_tokens_leaves_its_micro_batches_to_be_forecast(tmp_path: Path) -> None:
    """The tokens of a cut step are not taken for those of one micro-batch, which the allocator would have to hold."""
    large: dict[str, Any] = {"rows": tiny_rows(128), "per_device_train_batch_size": 64}
    once, cut = (_forecast(_trainer(tmp_path, **large, **more)).memory for more in ({}, {"max_tokens_per_batch": 60}))
    assert cut.micro_batch_tokens <= 64
    assert cut.parts["activations"] < 0.2 * once.parts["activations"]
    assert cut.parts.get("allocator", 0) < 0.2 * once.parts["activations"]


def test_a_row_above_the_budget_is_the_heaviest_micro_batch_wherever_it_stands(tmp_path: Path) -> None:
    found = tiny_rows(40, lengths=(6, 70))
    by_length = np.argsort(found.lengths)
    heavy, light = by_length[-6:-2], np.append(by_length[:3], by_length[-1])  # steps of four rows
    rows = found.take(np.concatenate([heavy, light]))
    assert rows.lengths[:4].sum() > rows.lengths[4:].sum()
    budgeted = {"per_device_train_batch_size": 4, "train_sampling_strategy": "sequential", "max_tokens_per_batch": 50}
    longest = int(rows.lengths.max())
    assert _forecast(_trainer(tmp_path, rows=rows, **budgeted)).memory.micro_batch_tokens == filled_length(longest)


def test_accumulated_gradients_count_next_to_activations(tmp_path: Path) -> None:
    once = _forecast(_trainer(tmp_path, per_device_train_batch_size=4)).memory
    twice = _forecast(_trainer(tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=2)).memory
    assert twice.peak_bytes > once.peak_bytes
    assert twice.parts["gradients"] > once.parts["gradients"]


def test_a_trace_knows_what_was_alive_at_its_peak_and_all_that_it_allocated() -> None:
    memories = [Memory(size, (size,), in_backward=False) for size in (1000, 1000, 3000)]
    trace = Trace(memories, [0, 1, ~0, 2, ~1, ~2])
    assert trace.peak() == (4000, {1, 2})
    assert trace.turnover_bytes == 5000


def test_tables_that_are_kept_have_their_numbers_after_a_rehearsal() -> None:
    """DeBERTa's places by distance pass through a logarithm: the next training reads what is kept here."""
    here = torch.device("cpu")
    with Rehearsal():
        found = deberta._places_on(8, 16, 77, here)  # a size that no other test has
    wanted = deberta.places_by_distance(8, 16, 77)
    assert (found[0], found[1]) == (int(wanted.min()), int(wanted.max()) + 1)
    assert torch.equal(deberta._places_on(8, 16, 77, here)[2], (wanted - found[0]).int())
