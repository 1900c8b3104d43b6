"""Data sets without a length: they train by max_steps, and a resumed run goes on with the next row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from override_runs import Smoothed, class_rows, losses, ours
from tiny_runs import Recorder, assert_same_weights, entries, read_json, span_rows, tiny_bert
from torch.utils.data import IterableDataset

import engine
from whet.errors import ConfigError, DataError


class Torch(IterableDataset):
    """An iterable data set as torch describes it."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


class WithState(Torch):
    """One that knows where it is: rows that were read are not read again."""

    def __init__(self, rows: list[Any]) -> None:
        super().__init__(rows)
        self.place, self.n_read = 0, 0

    def __iter__(self) -> Iterator[Any]:
        for row in self.rows[self.place :]:
            self.place += 1
            self.n_read += 1
            yield row
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def streaming(rows: list[dict[str, Any]], *, shuffled: bool = False) -> datasets.IterableDataset:
    plain = {name: [torch.as_tensor(row[name]).tolist() for row in rows] for name in rows[0]}
    stream = datasets.Dataset.from_dict(plain).to_iterable_dataset(num_shards=3)
    return stream.shuffle(seed=3, buffer_size=5) if shuffled else stream


SOURCES: dict[str, Callable[[list[Any]], Any]] = {
    "torch": Torch,
    "with a state": WithState,
    "datasets": streaming,
    "datasets, shuffled": lambda rows: streaming(rows, shuffled=True),
}


@pytest.mark.parametrize("source", ["torch", "with a state", "datasets"])
def test_a_stream_trains_as_the_list_of_its_rows(tmp_path: Path, source: str) -> None:
    rows, args = class_rows(14), {"max_steps": 6, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    plain = engine.Trainer(Smoothed(), ours(tmp_path / "a", **args), train_dataset=rows)
    trainer = engine.Trainer(Smoothed(), ours(tmp_path / "b", **args), train_dataset=SOURCES[source](rows))
    plain.train()
    trainer.train()
    assert losses(trainer) == losses(plain)
    assert_same_weights(trainer.model, plain.model)


def test_a_stream_of_questions_runs_without_padding(tmp_path: Path) -> None:
    rows = span_rows()
    plain = engine.Trainer(tiny_bert(), ours(tmp_path / "a", max_steps=5), train_dataset=rows)
    trainer = engine.Trainer(tiny_bert(), ours(tmp_path / "b", max_steps=5), train_dataset=Torch(rows))
    plain.train()
    trainer.train()
    assert trainer.objective.packed
    assert_same_weights(trainer.model, plain.model)


@pytest.mark.parametrize("step", [1, 4, 5])
@pytest.mark.parametrize("source", SOURCES)
def test_a_stopped_run_over_a_stream_goes_on_with_the_next_row(tmp_path: Path, source: str, step: int) -> None:
    """14 rows, 4 a step: step 4 ends the first epoch, step 5 is in the second. Bitwise, with dropout."""
    made: list[Any] = []

    def run(folder: Path, resume: Path | None = None) -> Any:
        made.append(SOURCES[source](span_rows(14)))
        args = ours(folder, max_steps=7, save_strategy="steps", save_steps=1)
        trainer = engine.Trainer(tiny_bert(), args, train_dataset=made[-1])
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        return trainer

    whole = run(tmp_path / "a")
    again = run(tmp_path / "b", tmp_path / "a" / f"checkpoint-{step}")
    assert_same_weights(again.model, whole.model)
    assert losses(again) == losses(whole)
    if source == "with a state":
        assert made[1].n_read == 2 * 14 - {1: 4, 4: 14, 5: 14 + 4}[step]


def test_a_stream_that_gives_other_rows_after_a_stop_is_refused(tmp_path: Path) -> None:
    args = ours(tmp_path, max_steps=6, save_strategy="steps", save_steps=2)
    engine.Trainer(Smoothed(), args, train_dataset=Torch(class_rows(14))).train()
    other = engine.Trainer(Smoothed(), args, train_dataset=Torch(class_rows(14)[::-1]))
    with pytest.raises(DataError, match=r"(?s)gives other rows than those.*fix: "):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_ignore_data_skip_takes_what_a_live_source_gives_next(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Such a source, a queue for example, never gives its earlier rows again."""
    args = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 2,
            "lr_scheduler_type": "constant"}  # fmt: skip
    rows = class_rows(14)
    first = engine.Trainer(Smoothed(), ours(tmp_path, **(args | {"max_steps": 2})), train_dataset=Torch(rows[:6]))
    first.train()
    live = Torch(rows[6:])
    resumed = engine.Trainer(Smoothed(), ours(tmp_path, ignore_data_skip=True, **args), train_dataset=live)
    caplog.clear()
    resumed.train("auto")
    assert "are not read again" in caplog.text
    assert resumed.state.global_step == 4
    through = engine.Trainer(Smoothed(), ours(tmp_path / "b", **args), train_dataset=Torch(rows[:4] + rows[6:10]))
    through.train()
    assert_same_weights(resumed.model, through.model)


def test_ignore_data_skip_still_restores_a_source_that_knows_its_place(tmp_path: Path) -> None:
    args = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 2,
            "lr_scheduler_type": "constant"}  # fmt: skip
    rows = class_rows(14)
    engine.Trainer(Smoothed(), ours(tmp_path, **(args | {"max_steps": 2})), train_dataset=WithState(rows)).train()
    resumed = engine.Trainer(Smoothed(), ours(tmp_path, ignore_data_skip=True, **args), train_dataset=WithState(rows))
    resumed.train("auto")
    through = engine.Trainer(Smoothed(), ours(tmp_path / "b", **args), train_dataset=WithState(rows))
    through.train()
    assert_same_weights(resumed.model, through.model)


def test_the_place_in_a_stream_is_in_the_checkpoint(tmp_path: Path) -> None:
    args = ours(tmp_path, max_steps=2, save_strategy="steps", save_steps=2)
    engine.Trainer(Smoothed(), args, train_dataset=streaming(class_rows(14))).train()
    kept = read_json(tmp_path / "checkpoint-2" / "state.json")["loader"]
    assert (kept["epoch"], kept["step"]) == (0, 2)
    assert kept["rows"] is not None


def test_a_stream_without_max_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)max_steps is not set.*fix: set --max_steps"):
        engine.Trainer(Smoothed(), ours(tmp_path), train_dataset=Torch(class_rows())).train()


@pytest.mark.parametrize("setting", [{"dataloader_num_workers": 2}, {"auto_find_batch_size": True}])
def test_settings_that_need_numbered_rows_are_refused(tmp_path: Path, setting: dict[str, Any]) -> None:
    (name,) = setting
    with pytest.raises(ConfigError, match=name):
        engine.Trainer(Smoothed(), ours(tmp_path, max_steps=2, **setting), train_dataset=Torch(class_rows())).train()


def test_epochs_of_a_stream_end_with_its_rows(tmp_path: Path) -> None:
    seen = Recorder()
    args = ours(tmp_path, max_steps=7, eval_strategy="epoch", save_strategy="epoch")
    trainer = engine.Trainer(
        Smoothed(), args, train_dataset=Torch(class_rows(12)), eval_dataset=Torch(class_rows(5)), callbacks=[seen]
    )
    trainer.train()
    assert seen.steps("epoch_begin") == [0, 3, 6]
    assert seen.steps("epoch_end") == [3, 6, 7]
    assert [step for step, _ in entries(trainer, "eval_loss")] == [3, 6, 7]


def test_a_stream_is_evaluated_and_predicted_as_a_list(tmp_path: Path) -> None:
    rows = class_rows(11)
    trainer = engine.Trainer(Smoothed(), ours(tmp_path), eval_dataset=Torch(rows))
    plain = engine.Trainer(Smoothed(), ours(tmp_path), eval_dataset=rows)
    assert trainer.evaluate()["eval_loss"] == plain.evaluate()["eval_loss"]
    assert (trainer.predict(streaming(rows)).predictions == plain.predict(rows).predictions).all()


def test_an_iterator_that_is_used_up_ends_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As in transformers: a generator gives its rows once."""
    trainer = engine.Trainer(Smoothed(), ours(tmp_path, max_steps=9), train_dataset=iter(class_rows(14)))
    trainer.train()
    assert trainer.state.global_step == 4
    assert "no more rows after step 4 of 9" in caplog.text


def test_an_empty_stream_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="training set is empty"):
        engine.Trainer(Smoothed(), ours(tmp_path, max_steps=9, precision="auto"), train_dataset=Torch([])).train()


def test_a_stream_may_be_trained_on_twice(tmp_path: Path) -> None:
    stream = streaming(class_rows(14))
    trainer = engine.Trainer(Smoothed(), ours(tmp_path, max_steps=2), train_dataset=stream)
    trainer.train()
    first = losses(trainer)
    again = engine.Trainer(Smoothed(), ours(tmp_path, max_steps=2), train_dataset=stream)
    again.train()
    assert losses(again) == first
