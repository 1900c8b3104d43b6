"""R11: a checkpoint that is written behind the run's back has the bytes of one that was waited for."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from harness import SEED, count, same_folder, trials_of
from transformers import TrainerCallback
from trials import OUT, trainer

from whet.errors import StorageError
from whet.store import find, manifest, write

pytestmark = pytest.mark.reliability

_OWN_WORDS = ("training_args.json", "MANIFEST.json")
"""Files that say whether the save was asynchronous, and the checksums of those."""


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Make each save take up to 30 ms more before the tensors are written; count how many run at once."""
    real, chance = write.Staged.put, random.Random(11 + SEED)
    seen = {"now": 0, "most": 0, "behind": 0}

    def put(self: Any, write: Any) -> None:
        if write.__name__ == "write_tensors":
            seen["now"] += 1
            seen["most"] = max(seen["most"], seen["now"])
            seen["behind"] += threading.current_thread() is not threading.main_thread()
            time.sleep(chance.uniform(0.0, 0.03))
        try:
            real(self, write)
        finally:
            seen["now"] -= write.__name__ == "write_tensors"

    monkeypatch.setattr(write.Staged, "put", put)
    return seen


def test_the_bytes_are_those_of_a_save_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow_disk: dict[str, int]
) -> None:
    """Checkpoints after every second step: the weights change while the files are written."""
    n = trials_of(50)
    for name, behind in (("sync", False), ("async", True)):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        slow_disk["behind"] = 0
        trainer(max_steps=2 * n, save_steps=2, save_async=behind).train()
        assert slow_disk["behind"] == (n if behind else 0)
    folders = [find.list_all(tmp_path / name / OUT) for name in ("sync", "async")]
    assert [path.name for path in folders[0]] == [path.name for path in folders[1]]
    results = [
        not same_folder(one, other, but=_OWN_WORDS) and not find.problems_of(other)
        for one, other in zip(*folders, strict=True)
    ]
    assert slow_disk["most"] == 1  # at most one on its way
    count("saved behind, the same bytes", results, n)


class _Steps(TrainerCallback):
    """Notes how far the run came."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.last = state.global_step
        time.sleep(0.2)  # long enough for the write behind to end


@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_an_error_behind_comes_up_at_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, policy: str
) -> None:
    monkeypatch.chdir(tmp_path)
    real = manifest.seal

    def seal(folder: Path, step: int, facts: Any) -> None:
        if step == 2:
            raise OSError(28, "No space left on device")
        real(folder, step, facts)

    monkeypatch.setattr(manifest, "seal", seal)
    run, steps = trainer(max_steps=5, save_steps=1, save_async=True, save_error_policy=policy), _Steps()
    run.events.callbacks.append(steps)
    if policy == "stop":
        with pytest.raises(StorageError, match="step 2 cannot be written"):
            run.train()
        assert steps.last in (2, 3)
        wanted = [1]
    else:
        run.train()
        assert "step 2 cannot be written" in caplog.text
        wanted = [1, 3, 4, 5]
    assert [find.step_of(path) for path in find.list_all(Path(OUT))] == wanted
    assert find.newest(Path(OUT)) == Path(OUT, find.folder_name(wanted[-1]))
    assert not list(Path(OUT).glob(".*"))


def test_the_end_of_a_run_waits_for_the_last_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow_disk: dict[str, int]
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer(max_steps=3, save_steps=1, save_async=True, save_total_limit=1).train()
    assert slow_disk["now"] == 0
    assert sorted(path.name for path in Path(OUT).iterdir()) == [find.folder_name(3), "run.log"]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("whet-save")]
    assert find.problems_of(Path(OUT, find.folder_name(3))) == []


def test_a_run_that_fails_waits_too_and_keeps_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow_disk: dict[str, int]
) -> None:
    monkeypatch.chdir(tmp_path)

    class Fails(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                raise KeyError("mine")

    run = trainer(max_steps=4, save_steps=2, save_async=True)
    run.events.callbacks.append(Fails())
    with pytest.raises(KeyError, match="mine"):
        run.train()
    assert find.newest(Path(OUT)) == Path(OUT, find.folder_name(2))
