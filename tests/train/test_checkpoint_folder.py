"""A checkpoint on the disk: what is in it, how damage is found, and what is used instead."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash
from safetensors.torch import load_file
from tiny_runs import assert_same_weights, checkpoints, read_json, span_rows, tiny_bert, toy_trainer, weights_of
from transformers import BertForQuestionAnswering, TrainerState

import engine
from whet.errors import EXIT_IO, StorageError
from whet.store import find, write

_MANIFEST = "MANIFEST.json"
_TWO, _FOUR = "checkpoint-2", "checkpoint-4"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The folder of a run of 4 steps with checkpoints after 2 and 4."""
    toy_trainer(tmp_path, max_steps=4, save_strategy="steps", save_steps=2).train()
    assert checkpoints(tmp_path) == [_TWO, _FOUR]
    return tmp_path


def _digest(path: Path) -> str:
    return xxhash.xxh3_128(path.read_bytes()).hexdigest()


def test_what_is_in_it(saved: Path) -> None:
    folder = saved / _FOUR
    names = {path.name for path in folder.iterdir()}
    assert {
        "model.safetensors",
        "optimizer.safetensors",
        "trainer_state.json",
        "training_args.json",
        _MANIFEST,
    } <= names
    assert {path.suffix for path in folder.iterdir()} == {".safetensors", ".json"}  # no pickle
    for path in folder.glob("*.json"):
        read_json(path)
    assert load_file(folder / "optimizer.safetensors")
    state = TrainerState.load_from_json(str(folder / "trainer_state.json"))
    assert (state.global_step, state.max_steps) == (4, 4)


def test_the_manifest_names_size_and_checksum_of_every_file(saved: Path) -> None:
    folder = saved / _FOUR
    manifest = read_json(folder / _MANIFEST)
    wanted = {
        path.name: {"bytes": path.stat().st_size, "xxh3_128": _digest(path)}
        for path in folder.iterdir()
        if path.name != _MANIFEST
    }
    assert manifest["files"] == wanted
    assert (manifest["format_version"], manifest["step"], manifest["n_ranks"]) == (2, 4, 1)
    assert len(manifest["checksum"]) == 32


def test_nothing_else_is_left_in_the_folder(saved: Path) -> None:
    assert sorted(path.name for path in saved.iterdir()) == [_TWO, _FOUR, "run.log"]


def test_a_checkpoint_of_a_model_of_transformers_loads_as_a_model(tmp_path: Path) -> None:
    trainer = engine.Trainer(
        model=tiny_bert(),
        args=engine.TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, save_strategy="epoch", num_train_epochs=1
        ),
        train_dataset=span_rows(),
    )
    trainer.train()
    (folder,) = tmp_path.glob("checkpoint-*")
    assert_same_weights(BertForQuestionAnswering.from_pretrained(folder), trainer.model)


def _flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _other_digest(path: Path) -> None:
    """A manifest that fits a changed file, but not its own checksum."""
    weights = path.with_name("model.safetensors")
    _flipped(weights)
    manifest = json.loads(path.read_text("utf-8"))
    manifest["files"][weights.name]["xxh3_128"] = _digest(weights)
    path.write_text(json.dumps(manifest), "utf-8")


def _linked(path: Path) -> None:
    shutil.move(path, path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


_FILES = ["model.safetensors", "optimizer.safetensors", "state.json", "trainer_state.json", "training_args.json"]
_DAMAGE: dict[str, tuple[str, Callable[[Path], Any]]] = {
    **{f"a flipped bit in {name}": (name, _flipped) for name in [*_FILES, _MANIFEST]},
    **{f"no {name}": (name, Path.unlink) for name in [*_FILES, _MANIFEST]},
    **{f"{name} cut short": (name, _truncated) for name in ["model.safetensors", "trainer_state.json"]},
    "a file more": ("more.json", lambda path: path.write_text("{}", "utf-8")),
    "a folder more": ("more", Path.mkdir),
    "a link in place of a file": ("model.safetensors", _linked),
    "an empty manifest": (_MANIFEST, lambda path: path.write_text("", "utf-8")),
    "a manifest that is a list": (_MANIFEST, lambda path: path.write_text("[]", "utf-8")),
    "a manifest without files": (_MANIFEST, lambda path: path.write_text('{"checksum": "0"}', "utf-8")),
    "a manifest that is no text": (_MANIFEST, lambda path: path.write_bytes(b"\xff\xfe\x00")),
    "a manifest that was changed": (_MANIFEST, _other_digest),
}


@pytest.mark.parametrize("name", sorted(_DAMAGE))
def test_damage_is_found_and_the_checkpoint_before_is_used(
    saved: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    file, damage = _DAMAGE[name]
    kept = weights_of(toy_trainer(saved).model) | load_file(saved / _TWO / "model.safetensors")
    damage(saved / _FOUR / file)
    said = rf"(?s){_FOUR} is not a complete checkpoint.*got: .*why: .*fix: .*{_TWO}"
    with pytest.raises(StorageError, match=said) as caught:
        toy_trainer(saved, max_steps=4).train(resume_from_checkpoint=str(saved / _FOUR))
    assert caught.value.exit_code == EXIT_IO

    trainer = toy_trainer(saved, max_steps=2)
    with caplog.at_level(logging.INFO, logger="whet"):
        trainer.train(resume_from_checkpoint="auto")
    assert_same_weights(trainer.model, kept)
    passed_over, resumed = [m for m in caplog.messages if "checkpoint-" in m and "saved" not in m]
    assert _FOUR in passed_over
    assert "damaged" in passed_over
    assert _TWO in resumed


def test_a_checkpoint_under_another_steps_name_is_damaged(saved: Path) -> None:
    """The newest is told by the step in its name, so the name has to be true."""
    (saved / _TWO).rename(saved / "checkpoint-9")
    assert find.newest(saved) == saved / _FOUR


def test_the_newest_is_told_by_its_step_and_by_no_clock(saved: Path) -> None:
    for path in [saved / _TWO, *(saved / _TWO).iterdir()]:
        path.touch()
    (saved / "checkpoint-8").symlink_to(saved / _TWO)
    (saved / "checkpoint-99").mkdir()  # another program's
    (saved / ".checkpoint-10.partial").mkdir()
    assert find.newest(saved) == saved / _FOUR


def test_steps_sort_as_numbers(tmp_path: Path) -> None:
    for step in (9, 10, 123456789):
        write.save(tmp_path, step, lambda folder: (folder / "a.json").write_text("{}", "utf-8"), {})
    assert [find.step_of(folder) for folder in find.list_all(tmp_path)] == [9, 10, 123456789]
    assert find.newest(tmp_path) == tmp_path / "checkpoint-123456789"


def test_auto_with_damaged_checkpoints_alone_does_not_start_anew(saved: Path) -> None:
    for name in (_TWO, _FOUR):
        (saved / name / "state.json").unlink()
    trainer = toy_trainer(saved, max_steps=4)
    with pytest.raises(StorageError, match=rf"(?s)none of the 2 checkpoints.*{_FOUR}: state.json.*{_TWO}") as caught:
        trainer.train(resume_from_checkpoint=True)
    assert caught.value.exit_code == EXIT_IO
    assert trainer.state.log_history == []


def test_auto_without_any_checkpoint_says_that_it_starts_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="whet"):
        toy_trainer(tmp_path, max_steps=1).train(resume_from_checkpoint="auto")
    assert f"there is no checkpoint in {tmp_path}: the run starts at its first step" in caplog.messages


@pytest.mark.parametrize("path", ["nowhere", "checkpoint-3"])
def test_a_checkpoint_that_is_not_there_is_refused(saved: Path, path: str) -> None:
    with pytest.raises(StorageError, match=path):
        toy_trainer(saved).train(resume_from_checkpoint=str(saved / path))


def test_saving_again_replaces_the_whole_folder(saved: Path) -> None:
    (saved / _TWO / "old.json").write_text("{}", "utf-8")
    toy_trainer(saved, max_steps=2, save_strategy="steps", save_steps=2).train()
    assert find.problems_of(saved / _TWO) == []


def test_what_a_killed_run_left_half_written_goes_away(saved: Path) -> None:
    left = saved / ".checkpoint-6.partial"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    toy_trainer(saved, max_steps=6, save_strategy="steps", save_steps=2).train(resume_from_checkpoint="auto")
    assert sorted(path.name for path in saved.iterdir()) == [_TWO, _FOUR, "checkpoint-6", "run.log"]
    assert find.problems_of(saved / "checkpoint-6") == []


def test_the_checkpoint_before_goes_only_when_the_new_one_reads_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something cuts a file short just after the new folder got its name; one checkpoint was to be kept."""
    real = write.fsync

    def sync(path: Path) -> None:
        real(path)
        if (tmp_path / _TWO).is_dir():
            _truncated(tmp_path / _TWO / "model.safetensors")

    monkeypatch.setattr(write, "fsync", sync)
    trainer = toy_trainer(tmp_path, max_steps=2, save_strategy="steps", save_steps=1, save_total_limit=1)
    with pytest.raises(StorageError, match=r"(?s)step 2 cannot be written.*model.safetensors: \d+ bytes"):
        trainer.train()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1", "run.log"]
    assert find.problems_of(tmp_path / "checkpoint-1") == []


def test_a_save_killed_while_it_replaces_a_step_loses_nothing(saved: Path) -> None:
    """The folder of step 4 was moved aside, and the new one had not come yet."""
    (saved / _FOUR).rename(saved / f".{_FOUR}.replaced")
    (saved / f".{_FOUR}.partial").mkdir()
    (saved / f".{_TWO}.removed").mkdir()
    toy_trainer(saved, max_steps=4).train(resume_from_checkpoint="auto")
    assert sorted(path.name for path in saved.iterdir()) == [_TWO, _FOUR, "run.log"]
    assert find.newest(saved) == saved / _FOUR


def test_clearing_up_follows_no_link(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "mine").write_text("x", "utf-8")
    for name in (f".{_TWO}.partial", f".{_TWO}.removed", "checkpoint-1"):
        (saved / name).symlink_to(elsewhere)
    write.clean_up(saved)
    write.rotate([saved / "checkpoint-1", saved / _TWO, saved / _FOUR], 1, None)
    write.remove_all(saved)
    assert (elsewhere / "mine").exists()


class _LikeATokenizer:
    """Tells of a full disk as the tokenizers package does."""

    def save_pretrained(self, folder: Path) -> None:
        raise Exception("No space left on device (os error 28)")


def test_a_tokenizer_that_does_not_fit(tmp_path: Path) -> None:
    trainer = toy_trainer(tmp_path / "run", max_steps=1, save_strategy="steps", save_steps=1)
    trainer.processing_class = _LikeATokenizer()
    with pytest.raises(StorageError, match="No space left"):
        trainer.train()
    with pytest.raises(StorageError, match="No space left"):
        trainer.save_model(str(tmp_path / "model"))
