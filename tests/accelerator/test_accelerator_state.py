"""States of `whet.Accelerator`: complete, exact, without code, refused where they are not those of the loop."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import ProjectConfiguration
from own_loops import Loop, fresh, made

import whet

DROPOUT = 0.1


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    with fresh():
        yield


def complete() -> Loop:
    """Return a loop that has trained two epochs in one go, with dropout."""
    with fresh():
        loop = Loop(made("whet", gradient_accumulation_steps=2), dropout=DROPOUT)
        for number in range(2):
            loop.epoch(number)
    return loop


@pytest.mark.parametrize("stop", [None, 4])
def test_resumed_loop_is_bitwise_the_one_that_was_never_stopped(tmp_path: Path, stop: int | None) -> None:
    """With dropout and shuffled rows, between epochs and within one."""
    straight = complete()
    with fresh():
        before = Loop(made("whet", gradient_accumulation_steps=2), dropout=DROPOUT)
        before.epoch(0, last=stop)
        before.accelerator.save_state(tmp_path / "state")
    torch.manual_seed(99)  # what the process did before does not matter
    after = Loop(made("whet", gradient_accumulation_steps=2), dropout=DROPOUT)
    after.accelerator.load_state(tmp_path / "state")
    if stop is not None:
        after.epoch(0, first=stop)
    after.epoch(1)
    assert before.losses + after.losses == straight.losses
    wanted = straight.model.state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in after.model.state_dict().items())


def test_state_holds_no_pickle_and_names_every_file(tmp_path: Path) -> None:
    loop = Loop(made("whet"))
    loop.epoch(0, last=2)
    place = Path(loop.accelerator.save_state(tmp_path / "state"))
    assert {path.suffix for path in place.iterdir()} == {".safetensors", ".json"}
    listed = json.loads((place / "MANIFEST.json").read_text("utf-8"))["files"]
    assert listed.keys() == {path.name for path in place.iterdir()} - {"MANIFEST.json"}
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


class Counter:
    """Something of a user's own that is saved with the state."""

    def __init__(self) -> None:
        self.n, self.mean = 0, torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        """Return what is saved."""
        return {"n": self.n, "mean": self.mean}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore it."""
        self.n, self.mean = saved["n"], saved["mean"]


def test_registered_objects_are_saved_and_restored(tmp_path: Path) -> None:
    accelerator, counter = Loop(made("whet")).accelerator, Counter()
    accelerator.register_for_checkpointing(counter)
    counter.n, counter.mean = 7, torch.ones(2)
    accelerator.save_state(tmp_path / "state")
    counter.n, counter.mean = 0, torch.zeros(2)
    accelerator.load_state(tmp_path / "state")
    assert (counter.n, counter.mean.tolist()) == (7, [1.0, 1.0])
    with pytest.raises(ValueError, match="state_dict"):
        accelerator.register_for_checkpointing(object())


def test_registered_object_whose_names_would_change_is_refused(tmp_path: Path) -> None:
    accelerator = Loop(made("whet")).accelerator
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW([weight])
    accelerator.register_for_checkpointing(optimizer)
    weight.grad = torch.ones(1)
    optimizer.step()
    with pytest.raises(whet.ConfigError, match="names that are no texts"):
        accelerator.save_state(tmp_path / "state")


class Failing(Counter):
    """Something whose state cannot be read."""

    def state_dict(self) -> dict[str, Any]:
        """Fail as a user's code does."""
        raise LookupError("no state today")


def test_error_of_a_registered_object_leaves_the_state_before_it(tmp_path: Path) -> None:
    accelerator = Loop(made("whet")).accelerator
    accelerator.save_state(tmp_path / "state")
    before = (tmp_path / "state" / "MANIFEST.json").read_bytes()
    accelerator.register_for_checkpointing(Failing())
    with pytest.raises(LookupError, match="no state today"):
        accelerator.save_state(tmp_path / "state")
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    assert (tmp_path / "state" / "MANIFEST.json").read_bytes() == before


def test_schedule_with_milestones_goes_on_decaying(tmp_path: Path) -> None:
    def prepared() -> tuple[Any, Any, Any]:
        accelerator, model = made("whet"), torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 4])
        return accelerator, *accelerator.prepare(optimizer, schedule)

    accelerator, optimizer, schedule = prepared()
    for _ in range(3):
        optimizer.step()
        schedule.step()
    accelerator.save_state(tmp_path / "state")
    with fresh():
        accelerator, optimizer, schedule = prepared()
        accelerator.load_state(tmp_path / "state")
        optimizer.step()
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def test_order_of_rows_is_that_of_the_state_whatever_the_seed(tmp_path: Path) -> None:
    loop = Loop(made("whet"))
    loop.accelerator.save_state(tmp_path / "state")
    wanted = [batch["labels"].tolist() for batch in loop.loader]
    with fresh():
        other = Loop(made("whet"), seed=99)
        other.accelerator.load_state(tmp_path / "state")
        assert [batch["labels"].tolist() for batch in other.loader] == wanted


def test_state_is_replaced_by_a_later_one_and_other_files_never(tmp_path: Path) -> None:
    loop = Loop(made("whet"))
    loop.accelerator.save_state(tmp_path / "state")
    first = (tmp_path / "state" / "model.safetensors").read_bytes()
    loop.epoch(0, last=2)
    loop.accelerator.save_state(tmp_path / "state")
    assert (tmp_path / "state" / "model.safetensors").read_bytes() != first
    for folder in (tmp_path / "mine", tmp_path / "state"):
        folder.mkdir(exist_ok=True)
        (folder / "notes.txt").write_text("mine")
        with pytest.raises(whet.ConfigError, match="other files"):
            loop.accelerator.save_state(folder)
        assert (folder / "notes.txt").read_text() == "mine"


def test_damaged_state_is_refused_before_anything_changes(tmp_path: Path) -> None:
    loop = Loop(made("whet"))
    place = Path(loop.accelerator.save_state(tmp_path / "state"))
    data = bytearray((place / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (place / "model.safetensors").write_bytes(data)
    before = loop.model.state_dict()["classifier.bias"].clone()
    with pytest.raises(whet.WhetError, match="damaged"):
        loop.accelerator.load_state(place)
    assert torch.equal(loop.model.state_dict()["classifier.bias"], before)


def test_state_of_accelerate_is_refused_for_its_pickle(tmp_path: Path) -> None:
    theirs = Loop(made("accelerate"))
    theirs.accelerator.save_state(str(tmp_path / "theirs"))
    with fresh(), pytest.raises(whet.WhetError, match="pickle"):
        Loop(made("whet")).accelerator.load_state(tmp_path / "theirs")


def test_state_of_another_loop_is_refused(tmp_path: Path) -> None:
    loop = Loop(made("whet"))
    loop.accelerator.save_state(tmp_path / "state")
    accelerator = Loop(made("whet")).accelerator
    accelerator.register_for_checkpointing(Counter())
    with pytest.raises(whet.WhetError, match="does not fit"):
        accelerator.load_state(tmp_path / "state")


def test_state_within_a_step_is_refused_as_it_would_lose_gradients(tmp_path: Path) -> None:
    loop = Loop(made("whet", gradient_accumulation_steps=2))
    loop.epoch(0, last=1)
    with pytest.raises(whet.ConfigError, match="between two micro-batches"):
        loop.accelerator.save_state(tmp_path / "state")


def test_unsafe_form_is_refused(tmp_path: Path) -> None:
    with pytest.raises(whet.ConfigError, match="safe_serialization"):
        Loop(made("whet")).accelerator.save_state(tmp_path / "x", safe_serialization=False)


def save_settings(models: list[Any], weights: list[Any], folder: str) -> None:
    """Save the settings of the model next to its weights, as a hook does."""
    (model,) = models
    Path(folder, "settings").mkdir()
    model.config.to_json_file(Path(folder, "settings", "config.json"))


def save_by_itself(models: list[Any], weights: list[Any], folder: str) -> None:
    """Save the model in a form of its own, in the place of the weights."""
    models[0].save_pretrained(folder + "/own")
    weights.pop()


def load_by_itself(models: list[Any], folder: str) -> None:
    """Load what `save_by_itself` wrote."""
    model = models.pop()
    model.load_state_dict(type(model).from_pretrained(folder + "/own").state_dict())


def test_hooks_write_into_the_state_and_read_from_it(tmp_path: Path) -> None:
    loop = Loop(made("whet"))
    accelerator, wanted = loop.accelerator, loop.model.classifier.weight.detach().clone()
    added = accelerator.register_save_state_pre_hook(save_settings)
    accelerator.save_state(tmp_path / "first")
    assert (tmp_path / "first" / "settings" / "config.json").is_file()
    added.remove()
    accelerator.register_save_state_pre_hook(save_by_itself)
    accelerator.register_load_state_pre_hook(load_by_itself)
    accelerator.save_state(tmp_path / "second")
    assert not (tmp_path / "second" / "model.safetensors").exists()
    with torch.no_grad():
        loop.model.classifier.weight.zero_()
    accelerator.load_state(tmp_path / "second")
    assert torch.equal(loop.model.classifier.weight, wanted)
    (tmp_path / "second" / "own" / "config.json").write_text("{}")
    with pytest.raises(whet.WhetError, match="damaged"):
        accelerator.load_state(tmp_path / "second")


def test_hook_that_fails_leaves_the_state_before_it(tmp_path: Path) -> None:
    accelerator = Loop(made("whet")).accelerator
    accelerator.save_state(tmp_path / "state")
    before = (tmp_path / "state" / "MANIFEST.json").read_bytes()

    def fail(_: Any, __: Any, folder: str) -> None:
        Path(folder, "half").write_text("half")
        raise LookupError("no settings today")

    accelerator.register_save_state_pre_hook(fail)
    with pytest.raises(LookupError, match="no settings today"):
        accelerator.save_state(tmp_path / "state")
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    assert (tmp_path / "state" / "MANIFEST.json").read_bytes() == before


def test_states_are_numbered_and_the_oldest_removed(tmp_path: Path) -> None:
    project = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    loop = Loop(made("whet", project_config=project))
    accelerator = loop.accelerator
    with pytest.raises(whet.ConfigError, match="no numbered state"):
        accelerator.load_state()
    (tmp_path / "checkpoints" / "checkpoint_notes").mkdir(parents=True)
    saved = [accelerator.save_state() for _ in range(11)]
    assert saved[-1] == tmp_path / "checkpoints" / "checkpoint_10"
    assert accelerator.save_iteration == 11
    there = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert there == {"checkpoint_9", "checkpoint_10", "checkpoint_notes"}
    wanted = loop.model.classifier.weight.detach().clone()
    with torch.no_grad():
        loop.model.classifier.weight.zero_()
    accelerator.save_state()
    accelerator.load_state(tmp_path / "checkpoints" / "checkpoint_10")
    assert torch.equal(loop.model.classifier.weight, wanted)
    accelerator.load_state()
    assert not loop.model.classifier.weight.any()
    project.iteration = 3
    accelerator.save_state()
    there = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert there == {"checkpoint_3", "checkpoint_11", "checkpoint_notes"}  # the one just saved stays
    project.iteration = 11
    with pytest.raises(whet.ConfigError, match="iteration = 12"):
        accelerator.save_state()


def test_weights_may_be_missing_without_strict(tmp_path: Path) -> None:
    accelerator = made("whet")
    model = accelerator.prepare(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    accelerator.save_state(tmp_path / "state")
    wanted = model[0].weight.detach().clone()
    model.append(torch.nn.Linear(2, 1))
    with torch.no_grad():
        model[0].weight.zero_()
    with pytest.raises(whet.WhetError, match="does not fit"):
        accelerator.load_state(tmp_path / "state")
    accelerator.load_state(tmp_path / "state", strict=False)
    assert torch.equal(model[0].weight, wanted)


def test_interrupted_replacement_is_finished_when_the_state_is_loaded(tmp_path: Path) -> None:
    """A kill between the two renames leaves the earlier state under a hidden name."""
    accelerator = Loop(made("whet")).accelerator
    accelerator.save_state(tmp_path / "state")
    (tmp_path / "state").rename(tmp_path / ".state.replaced")
    accelerator.load_state(tmp_path / "state")
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
