"""A disk that refuses: what was saved before stays, what is half written goes, and the error says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from full_disk_runs import CASES
from tiny_runs import checkpoints, toy_trainer

from whet.errors import EXIT_IO, StorageError
from whet.store import find, write


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What became of some runs in a process of their own whose files may not grow."""
    folder = tmp_path_factory.mktemp("full")
    script = Path(__file__).with_name("full_disk_runs.py")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, str(script), str(folder)], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return {"folder": folder} | json.loads(done.stdout.splitlines()[-1])


@pytest.mark.reliability
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CASES))
def test_a_checkpoint_that_does_not_fit(refused: dict[str, Any], name: str) -> None:
    outcome, folder = refused[name], refused["folder"] / name
    assert outcome.get("exit") == EXIT_IO, outcome
    assert "checkpoint of step 2 cannot be written" in outcome["message"]
    assert "--output_dir" in outcome["message"]
    assert checkpoints(folder) == ["checkpoint-1"]
    assert find.problems_of(folder / "checkpoint-1") == []
    assert {path.name for path in folder.iterdir()} - {"run.log"} == {"checkpoint-1"}


@pytest.mark.reliability
@pytest.mark.slow
def test_a_model_that_does_not_fit(refused: dict[str, Any]) -> None:
    """The last save of a run, outside of any checkpoint, fails as a user's error too."""
    assert refused["final model"].get("exit") == EXIT_IO, refused["final model"]


def test_a_folder_that_may_not_be_written(tmp_path: Path) -> None:
    toy_trainer(tmp_path, max_steps=1, save_strategy="steps").train()
    tmp_path.chmod(0o500)
    try:
        if os.access(tmp_path, os.W_OK):
            pytest.skip("this user may write everywhere, as root may")
        with pytest.raises(StorageError, match="step 2 cannot be written"):
            toy_trainer(tmp_path, max_steps=2, save_strategy="steps").train(resume_from_checkpoint="auto")
    finally:
        tmp_path.chmod(0o700)
    assert find.newest(tmp_path) == tmp_path / "checkpoint-1"


def test_a_write_that_fails_for_another_reason_leaves_nothing_behind(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        (folder / "half.json").write_text("{", "utf-8")
        raise ValueError("cannot be told in JSON")

    with pytest.raises(ValueError, match="cannot be told"):
        write.save(tmp_path, 3, fill, {})
    assert list(tmp_path.iterdir()) == []
