"""What `whet.Trainer` uploads: no pickle, no token, and of checkpoints those that hub_strategy names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_runs import arguments, classifier, pad, rows

import hub_server
import whet

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of httpx, about the hub's client


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[hub_server.Hub]:
    """A hub on this machine, which the client of this process takes for the hub."""
    with hub_server.taken_for_the_hub(monkeypatch) as hub:
        yield hub


def _trainer(folder: Path, **changes: Any) -> whet.Trainer:
    return whet.Trainer(classifier(), arguments(folder, **changes), pad, rows())


def _used_folder(folder: Path) -> None:
    """Leave what earlier trainings leave: checkpoints, abandoned ones, and the pickle of transformers' Trainer."""
    _trainer(folder, max_steps=4, save_steps=1).train()
    _trainer(folder, max_steps=3, save_steps=1).train(resume_from_checkpoint=str(folder / "checkpoint-1"))
    assert [*folder.glob("abandoned-*/checkpoint-*")]
    usual = transformers.TrainingArguments(str(folder), hub_token=hub_server.TOKEN, report_to="none", use_cpu=True)
    torch.save(usual, folder / "training_args.bin")
    assert hub_server.TOKEN.encode() in (folder / "training_args.bin").read_bytes()


@pytest.mark.parametrize("strategy", ["end", "every_save", "checkpoint", "all_checkpoints"])
def test_upload_holds_the_model_and_the_checkpoints_that_are_asked_for(
    strategy: str, hub: hub_server.Hub, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    _used_folder(out)
    changes = {"push_to_hub": True, "hub_token": hub_server.TOKEN, "hub_strategy": strategy, "hub_always_push": True}
    trainer = _trainer(out, max_steps=4, save_steps=2, save_total_limit=2, **changes)
    pickle = (out / "training_args.bin").stat().st_mtime_ns
    trainer.train()
    (out / ".checkpoint-9.partial").mkdir()  # as another save leaves it for a while
    (out / ".checkpoint-9.partial" / "model.safetensors").write_bytes(b"half")
    if strategy == "end":
        assert not hub.repositories["me/out"]
    trainer.push_to_hub("All of it", tags="tiny")
    files = hub.repositories["me/out"]
    inside = {name.partition("/")[0] for name in files if "/" in name}
    wanted = {"checkpoint": {"last-checkpoint"}, "all_checkpoints": {"checkpoint-2", "checkpoint-4"}}
    assert inside == wanted.get(strategy, set())
    outside = {name for name in files if "/" not in name}
    assert outside == {"config.json", "model.safetensors", "training_args.json", "README.md"}
    for name in outside:
        assert files[name] == (out / name).read_bytes(), name
    assert not [name for name, content in files.items() if hub_server.TOKEN.encode() in content]
    assert not [name for name in files if name.endswith((".bin", ".pt", ".pth"))]
    assert json.loads(files["training_args.json"])["hub_strategy"] == strategy
    assert (out / "training_args.bin").stat().st_mtime_ns == pickle
    assert "tiny" in files["README.md"].decode()
    n_saves = sum("Training in progress, step" in one for one in hub.messages)
    assert n_saves == {"end": 0, "every_save": 2}.get(strategy, 4)
    assert hub.messages[-1] == "All of it"


def test_model_that_cannot_be_prepared_for_its_upload_ends_no_training(
    hub: hub_server.Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The checkpoint is complete; once there is room for the model, the next save is uploaded."""
    out = tmp_path / "out"
    (out / "config.json").mkdir(parents=True)

    class MakesRoom(transformers.TrainerCallback):
        def on_save(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
            if state.global_step == 2:
                (out / "config.json").rmdir()

    trainer = _trainer(out, max_steps=4, save_steps=2, push_to_hub=True, hub_always_push=True)
    trainer.add_callback(MakesRoom())
    assert trainer.train().global_step == 4
    assert "checkpoint-2 is not on the hub" in caplog.text
    assert (out / "checkpoint-2").is_dir()
    assert hub.repositories["me/out"]["model.safetensors"] == (out / "checkpoint-4/model.safetensors").read_bytes()


def test_pushed_model_is_that_of_the_newest_checkpoint(hub: hub_server.Hub, tmp_path: Path) -> None:
    out = tmp_path / "out"
    trainer = _trainer(out, max_steps=4, save_steps=2, push_to_hub=True, hub_always_push=True)
    trainer.train()
    newest = (out / "checkpoint-4" / "model.safetensors").read_bytes()
    assert hub.repositories["me/out"]["model.safetensors"] == (out / "model.safetensors").read_bytes() == newest
    assert not (out / "training_args.bin").exists()
