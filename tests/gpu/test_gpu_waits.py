"""A training step launches kernels and reads nothing back: the program never waits for the GPU."""

from __future__ import annotations

import logging
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import whet
from tiny import Pad, tiny_model, tiny_rows
from whet.errors import NonFiniteError
from whet.log import logger
from whet.on_host import on_host, sent_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
GPU = torch.device("cuda", 0)
WARM, WATCHED = 8, 4


class Watching(transformers.TrainerCallback):
    """Collects what waits for the GPU, from one step to the next, after graphs and kernels are there."""

    def __init__(self) -> None:
        self.waits: list[str] = []
        self._caught: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == WARM:
            self._caught = warnings.catch_warnings(record=True)
            self._found = self._caught.__enter__()
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
        if state.global_step == WARM + WATCHED:
            torch.cuda.set_sync_debug_mode("default")
            self._caught.__exit__(None, None, None)
            waits = [f"{one.filename}:{one.lineno}" for one in self._found if "synchronizing" in str(one.message)]
            # torch warns of the mode itself when it is set
            self.waits = [one for one in waits if Path(torch.cuda.__file__).name not in one or "/cuda/" not in one]


def trainer_of(folder: Path, *callbacks: Any, model: Any = None, **changes: Any) -> Any:
    usual: dict[str, Any] = {
        "max_steps": WARM + WATCHED + 2, "logging_steps": 1000, "save_strategy": "no", "report_to": "none",
        "disable_tqdm": True, "bf16": True, "logging_nan_inf_filter": False, "per_device_train_batch_size": 8,
        "train_sampling_strategy": "sequential",
    }  # fmt: skip
    args = whet.TrainingArguments(output_dir=str(folder), **(usual | changes))
    made = tiny_model("bert", dropout=0.1) if model is None else model
    rows = [
        dict(row, attention_mask=[1] * len(row["input_ids"])) for row in tiny_rows(8)
    ] * 400  # each batch has the sizes of the first, so that graphs are there
    return whet.Trainer(model=made, args=args, train_dataset=rows, data_collator=Pad(), callbacks=list(callbacks))


@pytest.mark.parametrize(
    "settings",
    [{}, {"gradient_accumulation_steps": 2}, {"cuda_graphs": False}, {"dataloader_num_workers": 2}],
    ids=["one pass", "accumulation", "without graphs", "workers"],
)
def test_a_step_reads_nothing_back(tmp_path: Path, settings: dict[str, Any]) -> None:
    watching = Watching()
    trainer_of(tmp_path, watching, **settings).train()
    assert watching.waits == []


class Bursting(nn.Module):
    """Makes the loss of some steps infinite."""

    def __init__(self, inner: nn.Module, steps: tuple[int, ...]) -> None:
        super().__init__()
        self.inner, self.steps, self.calls = inner, steps, 0
        self.config = inner.config

    def forward(self, input_ids: Any, attention_mask: Any, start_positions: Any, end_positions: Any) -> Any:
        self.calls += 1
        found = self.inner(
            input_ids=input_ids, attention_mask=attention_mask,
            start_positions=start_positions, end_positions=end_positions,
        )  # fmt: skip
        return {"loss": found.loss * (math.inf if self.calls in self.steps else 1.0)}


class Keeping(transformers.TrainerCallback):
    def __init__(self) -> None:
        self.sums: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **given: Any) -> None:
        self.sums.append(float(sum(one.detach().double().sum() for one in model.parameters())))


def test_a_step_that_is_not_finite_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keeping = Keeping()
    model = Bursting(tiny_model("bert"), (3, 5))
    trainer = trainer_of(tmp_path, keeping, model=model, max_steps=6, bf16=False, lr_scheduler_type="constant")
    with caplog.at_level(logging.WARNING, logger.name):
        trainer.train()
    assert trainer.optimizer.optimizer.defaults["fused"]
    assert [f"step {n} was not applied" in caplog.text for n in range(1, 7)] == [n in (3, 5) for n in range(1, 7)]
    unchanged = [one == before for before, one in zip(keeping.sums, keeping.sums[1:], strict=False)]
    assert unchanged == [False, True, False, True, False]
    steps = {int(state["step"]) for state in trainer.optimizer.state.values()}
    assert steps == {4}
    assert not hasattr(trainer.optimizer.optimizer, "found_inf")


@pytest.mark.parametrize("logging_steps", [1, 1000])
def test_several_in_a_row_end_the_training_with_good_weights(tmp_path: Path, logging_steps: int) -> None:
    model = Bursting(tiny_model("bert"), (3, 4, 5))
    trainer = trainer_of(tmp_path, model=model, max_steps=9, bf16=False, logging_steps=logging_steps)
    with pytest.raises(NonFiniteError, match=r"(?s)3 steps in a row.*step 5"):
        trainer.train()
    assert all(bool(one.isfinite().all()) for one in model.parameters())
    assert {int(state["step"]) for state in trainer.optimizer.state.values()} == {2}
    assert not hasattr(trainer.optimizer.optimizer, "found_inf")


def test_the_last_step_is_looked_at_too(tmp_path: Path) -> None:
    model = Bursting(tiny_model("bert"), (2, 3, 4))
    with pytest.raises(NonFiniteError, match="3 steps in a row"):
        trainer_of(tmp_path, model=model, max_steps=4, bf16=False).train()


def test_another_optimizer_waits_for_the_norm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Bursting(tiny_model("bert"), (2,))
    with caplog.at_level(logging.WARNING, logger.name):
        trainer_of(tmp_path, model=model, max_steps=3, bf16=False, optim="adafactor").train()
    assert "step 2 was not applied" in caplog.text
    assert all(bool(one.isfinite().all()) for one in model.parameters())


def test_the_host_knows_a_batch_until_it_is_written_into() -> None:
    batch = sent_batch({"ids": torch.arange(12).view(3, 4), "x": torch.ones(2), "name": "a"}, GPU)
    assert (batch["ids"].device, batch["x"].device.type, batch["name"]) == (GPU, "cpu", "a")
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert torch.equal(on_host(batch["ids"]), torch.arange(12).view(3, 4))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    batch["ids"][0, 0] = 7
    assert int(on_host(batch["ids"])[0, 0]) == 7
    batch["ids"].data = torch.zeros(3, 4, dtype=torch.int64, device=GPU)
    assert not on_host(batch["ids"]).any()


def test_a_batch_may_be_written_into_once_it_is_sent() -> None:
    torch.cuda._sleep(100_000_000)  # the GPU reads the batch later
    ids = torch.ones(1000, dtype=torch.int64).pin_memory()
    batch = sent_batch({"ids": ids}, GPU)
    ids.zero_()
    assert int(on_host(batch["ids"]).sum()) == 1000
    assert int(batch["ids"].sum()) == 1000
    assert not on_host(ids).any()
