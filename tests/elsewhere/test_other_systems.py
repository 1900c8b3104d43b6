"""A machine without what POSIX and Linux alone have trains the same model, and says what it cannot do.

No Windows and no Mac runs this: `hidden.py` says what stands in for them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hidden import SYSTEMS

from text_tasks import save_encoder, topic_rows, write_csv

pytestmark = [pytest.mark.true_start, pytest.mark.slow]
_HERE = Path(__file__).resolve().parent
_STORY = str(_HERE / "story.py")
_RESULTS = ("trained", "checkpoints", "weights", "accuracy", "predicted", "answers", "trainer", "own_loop", "doctor")
_FORBIDDEN = set('<>:"|?*\\')
_RESERVED = {"con", "prn", "aux", "nul", *(f"{name}{n}" for name in ("com", "lpt") for n in range(1, 10))}


def test_other_systems_train_the_same_model_and_refuse_what_they_lack(tmp_path: Path) -> None:
    """By the command line, stopped by Ctrl-C and resumed, by whet.Trainer and in a loop of one's own."""
    save_encoder(tmp_path / "model")
    data = write_csv(tmp_path / "rows.csv", topic_rows())
    runs = {name: _started(name, tmp_path, data) for name in ("plain", *SYSTEMS)}
    try:
        said = {name: run.communicate(timeout=400)[0] for name, run in runs.items()}
    finally:
        for run in runs.values():
            run.kill()
    assert {name: run.returncode for name, run in runs.items()} == dict.fromkeys(runs, 0), said
    plain, *others = (json.loads((tmp_path / name / "story.json").read_text("utf-8")) for name in runs)
    assert (plain["locks"], plain["runs"]) == ([True, False, False, None], [True, False])
    for name, found in zip(SYSTEMS, others, strict=True):
        assert {one: found[one] for one in _RESULTS} == {one: plain[one] for one in _RESULTS}, name
        assert (found["interrupted"], found["saved"]) == (75, ["checkpoint-2", "checkpoint-3"])
        assert found["unimportable"] == [], name
        assert found.get("planned") == (None if name == "darwin" else "memory cannot be forecast here")
        _check_machine(name, found, said[name])
        _check_names(tmp_path / name)
    ends = {name: (tmp_path / name / "out" / "training_args.json").read_bytes().count(b"\r\n") > 0 for name in runs}
    assert ends == {name: name == "win32" for name in runs}


def _check_machine(name: str, found: dict[str, Any], said: str) -> None:
    machine = found["machine"]
    assert machine["usable_cores"] >= 1
    assert machine["lacking"] == []  # it does not know, and does not say that there is none
    if name == "nowhere":
        assert machine["memory_bytes"] is None
        assert "cannot be locked" in said
        assert found["runs"] == [None, None]
        return
    assert found["refused"] == ["whet launch runs on Linux", "whet run needs Linux", "auto chooses on Linux"]
    assert (found["locks"], found["runs"]) == ([True, False, False, None], [True, False])
    assert found["leftover"] == []
    assert machine["memory_available_bytes"] < machine["memory_bytes"]
    assert "cannot be removed" not in said


def _check_names(folder: Path) -> None:
    """Windows has no files of these names."""
    for path in folder.rglob("*"):
        stem = path.name.partition(".")[0].lower()
        assert not _FORBIDDEN & set(path.name), path
        assert stem not in _RESERVED, path
        assert not path.name.endswith((".", " ")), path


def _started(name: str, folder: Path, data: Path) -> subprocess.Popen[str]:
    own = folder / name
    own.mkdir()
    hides = [] if name == "plain" else [str(_HERE / "hidden.py"), name]
    interrupted = [] if name == "plain" else ["interrupted"]
    return subprocess.Popen(
        [sys.executable, *hides, _STORY, str(own), str(folder / "model"), str(data), *interrupted],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | {"WHET_KERNELS": "reference"},
    )  # fmt: skip
