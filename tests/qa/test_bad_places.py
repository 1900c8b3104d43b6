"""Files, folders, models and checkpoints that are not there are told together, with what is wrong with the options."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tiny_qa import command, squad, write_json

from whet.cli.main import run
from whet.errors import StorageError
from whet.store import find

_MISSING = ("train_file", "validation_file", "model", "config")


def _words(folder: Path, *words: str, **options: Any) -> list[str]:
    """A command in which nothing is where it should be."""
    (folder / "file").write_text("mine", "utf-8")
    gone = {name: folder / f"no-{name}" for name in _MISSING}
    places = {
        "train_file": gone["train_file"], "validation_file": gone["validation_file"], "config_name": gone["config"],
        "output_dir": folder / "file" / "out",
    }  # fmt: skip
    return command(gone["model"], folder / "out", "--do_train", "--do_eval", *words, **(places | options))


def _told(words: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> str:
    assert run(words) == code
    return "".join(capsys.readouterr())


def test_missing_files_are_reported_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = _told(_words(tmp_path), 78, capsys)
    assert told.count("error: ") == 5
    assert all(f"no-{name}" in told for name in _MISSING)
    assert "output_dir cannot be written" in told


def test_missing_files_are_reported_with_wrong_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = _told(_words(tmp_path, doc_stride=5000, learning_rate=-3), 78, capsys)
    assert told.count("error: ") == 7
    assert all(name in told for name in ("doc_stride", "learning_rate", "output_dir", *_MISSING))


def test_exit_code_is_that_of_the_first_problem(
    tmp_path: Path, encoder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Output before data, as either alone would end the run."""
    words = _words(tmp_path, model_name_or_path=encoder, config_name=encoder)
    assert _told(words, 73, capsys).count("error: ") == 3
    words = _words(tmp_path, model_name_or_path=encoder, config_name=encoder, output_dir=tmp_path / "out")
    assert _told(words, 65, capsys).count("error: ") == 2


def test_file_named_twice_is_reported_once(tmp_path: Path, encoder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gone = tmp_path / "none.json"
    words = command(encoder, tmp_path / "out", "--do_train", "--do_eval", train_file=gone, validation_file=gone,
                    test_file=gone)  # fmt: skip
    assert _told(words, 65, capsys).count("error: ") == 1


def _trained(tmp_path: Path, encoder: Path) -> list[str]:
    data = write_json(tmp_path / "data.json", squad())
    options = {"train_file": data, "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    words = command(encoder, tmp_path / "out", "--do_train", **options)
    assert run(words) == 0
    return words


def test_missing_checkpoint_is_reported(
    tmp_path: Path, encoder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told before any data is read."""
    monkeypatch.setattr("whet.tasks.qa.splits.read_split", lambda *_: pytest.fail("the data was read"))
    data = write_json(tmp_path / "data.json", squad())
    words = command(encoder, tmp_path / "out", "--do_train", "--resume_from_checkpoint", "nowhere", train_file=data)
    told = _told(words, 74, capsys)
    assert "nowhere is not a complete checkpoint" in told
    assert "there is no such folder" in told


@pytest.mark.parametrize("asked", [[], ["true"], ["auto"]])
def test_resume_true_and_bare_flag_mean_auto(
    tmp_path: Path, encoder: Path, capsys: pytest.CaptureFixture[str], asked: list[str]
) -> None:
    words = [*_trained(tmp_path, encoder), "--max_steps", "3", "--resume_from_checkpoint", *asked]
    assert "resumes    after step 2 of" in _told(words, 0, capsys)


def test_changed_settings_are_reported_before_loading_the_model(
    tmp_path: Path, encoder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*_trained(tmp_path, encoder), "--resume_from_checkpoint", "--learning_rate", "1e-5"]
    monkeypatch.setattr("whet.tasks.qa.job.load_tokenizer", lambda *_: pytest.fail("the tokenizer was loaded"))
    told = _told(words, 78, capsys)
    assert "learning_rate: 0.002 in the checkpoint -> 1e-05 now" in told
    assert "--resume_allow_changes learning_rate" in told


def test_allowing_the_named_changes_lets_the_run_start(
    tmp_path: Path, encoder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Settings are compared before the data: the second refusal repeats what the first one asked to allow."""
    words = [*_trained(tmp_path, encoder), "--max_steps", "3", "--resume_from_checkpoint", "--learning_rate", "1e-5"]
    other = squad()
    del other["data"][0]["paragraphs"][-1]
    words += ["--train_file", str(write_json(tmp_path / "other.json", other))]
    allow = re.compile(r"--resume_allow_changes ([\w,]+)")
    first = allow.search(_told(words, 78, capsys))
    assert first
    assert first[1] == "learning_rate"
    second = allow.search(_told([*words, "--resume_allow_changes", first[1]], 78, capsys))
    assert second
    assert second[1].startswith("learning_rate,data")
    told = _told([*words, "--resume_allow_changes", second[1]], 0, capsys)
    assert "resumes    after step 2 of" in told


def test_message_counts_the_damaged_checkpoints(tmp_path: Path) -> None:
    for step in range(1, 6):
        (tmp_path / find.folder_name(step)).mkdir()
    with pytest.raises(StorageError, match=r"(?s)none of the 5 .*the newest 3: checkpoint-5"):
        find.newest(tmp_path)
