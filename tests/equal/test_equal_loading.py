"""Batches made ahead, and batches of the size that fits, do not change the curve."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

import engine
from tiny import Pad, arguments, losses, tiny_model, tiny_rows, weights_of
from whet.data.prefetch import NAME
from whet.engine.trials import batch_size
from whet.store import find

LOSS_TOLERANCE = 1e-6  # as for accumulation: sums of float32 in another order


class _EndsEpochs(TrainerCallback):
    """Ends each epoch after its second step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_epoch_stop = state.global_step % 2 == 0


def _run(folder: Path, *, padded: bool = False, callbacks: Any = None, **changes: Any) -> engine.Trainer:
    usual = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 2, "max_steps": 12}
    model = tiny_model("bert", dropout=0.1, **({"is_decoder": True} if padded else {}))
    trainer = engine.Trainer(
        model=model,
        args=arguments(folder, **(usual | changes)),
        train_dataset=tiny_rows(60),
        eval_dataset=tiny_rows(8, seed=2),
        data_collator=Pad() if padded else None,
        callbacks=callbacks,
    )
    assert trainer.objective.packed is not padded
    trainer.train()
    assert [thread for thread in threading.enumerate() if thread.name.startswith(NAME)] == []
    return trainer


def _assert_same(found: engine.Trainer, wanted: engine.Trainer) -> None:
    assert losses(found) == losses(wanted)
    after = weights_of(wanted.model)
    assert [name for name, value in weights_of(found.model).items() if not torch.equal(value, after[name])] == []


@pytest.mark.each_value
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dataloader_persistent_workers": True, "eval_strategy": "epoch"},
        {"dataloader_prefetch_factor": 1, "max_tokens_per_batch": 60},
        {"dataloader_prefetch_factor": 20, "dataloader_drop_last": True},
    ],
    ids=str,
)
@pytest.mark.usefixtures("operators")
def test_no_worker_and_two(tmp_path: Path, changes: dict[str, Any]) -> None:
    plain = {name: value for name, value in changes.items() if "persistent" not in name and "factor" not in name}
    _assert_same(_run(tmp_path, dataloader_num_workers=2, **changes), _run(tmp_path, **plain))


def test_no_worker_and_two_where_batches_are_padded(tmp_path: Path) -> None:
    _assert_same(_run(tmp_path, padded=True, dataloader_num_workers=2), _run(tmp_path, padded=True))


@pytest.mark.parametrize("persistent", [False, True])
def test_epochs_that_a_callback_ends_early(tmp_path: Path, persistent: bool) -> None:
    workers = {"dataloader_num_workers": 2, "dataloader_persistent_workers": persistent}
    found = _run(tmp_path, callbacks=[_EndsEpochs()], **workers)
    wanted = _run(tmp_path, callbacks=[_EndsEpochs()])
    assert len(losses(found)) < 12
    _assert_same(found, wanted)


def test_resumed_with_workers(tmp_path: Path) -> None:
    wanted = _run(tmp_path / "whole")
    _run(tmp_path / "cut", dataloader_num_workers=2, save_strategy="steps", save_steps=7)
    kept = tmp_path / "cut" / find.folder_name(7)
    found = _run(tmp_path / "cut", dataloader_num_workers=2, resume_from_checkpoint=str(kept))
    _assert_same(found, wanted)


@pytest.mark.each_value
@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("fits", [1, 5])
def test_fewer_rows_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fits: int) -> None:
    """The rows of a step stay, whatever was found; what finds it is tested elsewhere."""
    wanted = _run(tmp_path, per_device_train_batch_size=12, gradient_accumulation_steps=1)
    monkeypatch.setattr(batch_size, "largest_measured", lambda *_: fits)
    args = {"per_device_train_batch_size": 12, "gradient_accumulation_steps": 1, "auto_find_batch_size": True}
    found = _run(tmp_path, **args)
    assert found.state.train_batch_size == fits
    assert losses(found) == pytest.approx(losses(wanted), rel=LOSS_TOLERANCE)
    _assert_same(_run(tmp_path, **args, dataloader_num_workers=2), found)
