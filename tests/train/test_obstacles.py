"""What stands at the name of a checkpoint to come: the run is refused before its first step, and names it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_runs import checkpoints, toy_trainer
from transformers import TrainerCallback

from whet.errors import EXIT_CANNOT_CREATE, OutputError, StorageError

_SAVES = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}


def _plant(place: Path, kind: str, outside: Path) -> None:
    outside.mkdir(exist_ok=True)
    if kind == "file":
        place.write_text("mine", "utf-8")
    else:
        place.symlink_to(outside if kind == "link to a folder" else outside / "nothing")


@pytest.mark.parametrize("kind", ["file", "link to a folder", "link to nothing"])
@pytest.mark.parametrize("name", ["checkpoint-4", ".checkpoint-4.partial", ".checkpoint-2.replaced"])
def test_an_obstacle_is_named_before_the_first_step(tmp_path: Path, name: str, kind: str) -> None:
    out, outside = tmp_path / "an out", tmp_path / "outside"
    out.mkdir()
    _plant(out / name, kind, outside)
    trainer = toy_trainer(out, **_SAVES)
    with pytest.raises(
        OutputError, match=rf"(?s)a future checkpoint cannot get its name.*{name} is a.*fix: .*mv '"
    ) as caught:
        trainer.train()
    assert caught.value.exit_code == EXIT_CANNOT_CREATE
    assert trainer.state.global_step == 0
    assert list(outside.iterdir()) == []
    (out / name).unlink()
    assert trainer.train().global_step == 4


def test_an_obstacle_that_no_save_meets_is_left_alone(tmp_path: Path) -> None:
    _plant(tmp_path / "checkpoint-99", "file", tmp_path / "outside")
    assert toy_trainer(tmp_path, **_SAVES).train().global_step == 4
    (tmp_path / "checkpoint-2").rename(tmp_path / "elsewhere")
    (tmp_path / "checkpoint-2").symlink_to(tmp_path / "elsewhere")
    resumed = toy_trainer(tmp_path, **(_SAVES | {"max_steps": 6}))
    assert resumed.train(resume_from_checkpoint=True).global_step == 6
    assert (tmp_path / "checkpoint-99").read_text("utf-8") == "mine"
    unsaved = toy_trainer(tmp_path, save_strategy="no", max_steps=100, num_train_epochs=50)
    assert unsaved.train().global_step == 100


@pytest.mark.parametrize("kind", ["file", "link to a folder"])
def test_an_obstacle_that_appears_during_the_run_is_named_with_the_newest_checkpoint(tmp_path: Path, kind: str) -> None:
    class Plants(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 3:
                _plant(tmp_path / "checkpoint-4", kind, tmp_path / "outside")

    with pytest.raises(StorageError, match="step 4 cannot be written") as caught:
        toy_trainer(tmp_path, callbacks=[Plants()], **_SAVES).train()
    (problem,) = caught.value.problems
    assert f"newest complete checkpoint is {tmp_path / 'checkpoint-2'}" in problem.why
    assert f"move away what is at {tmp_path / 'checkpoint-4'}" in problem.fix
    assert "resume with --resume_from_checkpoint" in problem.fix
    assert list((tmp_path / "outside").iterdir()) == []
    (tmp_path / "checkpoint-4").unlink()
    assert toy_trainer(tmp_path, **_SAVES).train(resume_from_checkpoint=True).global_step == 4
    assert checkpoints(tmp_path) == ["checkpoint-2", "checkpoint-4"]
