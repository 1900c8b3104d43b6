"""R3: after a power cut, by the model of crash_model.py, the checkpoint of the old step or of the new one loads."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from crash_model import Event, Log, crash_state, recorded
from harness import SEED, count, same_folder, trials_of
from trials import OUT, trainer

from whet.store import find, write

pytestmark = pytest.mark.reliability

ONE, TWO = "checkpoint-1", "checkpoint-2"
_STAGED, _REPLACED = f".{TWO}.partial", f".{TWO}.replaced"
_SAME_STEP = "step replaced"


@pytest.fixture(scope="module", params=["all kept", "one kept", _SAME_STEP])
def save(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Log]:
    """What was there before a save, what is there after it with nothing rotated, and the log of the save."""
    folder = tmp_path_factory.mktemp("power")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        keep = 1 if request.param == "one kept" else None
        loop = trainer(max_steps=3, save_steps=1, save_total_limit=keep).new_loop()
        loop.start(None)
        for _ in range(2 if request.param == _SAME_STEP else 1):
            loop.take_step()
        shutil.copytree(OUT, "before")
        loop.saver.due = lambda *_, **__: False
        loop.take_step()
        with recorded(folder / OUT) as log:
            loop.saver.save(2, better=False)
        shutil.copytree(f"{OUT}/{TWO}", "new")
    return folder / "before", folder / "new", log


def test_every_file_is_synced_before_its_folder_gets_its_name(save: tuple[Path, Path, Log]) -> None:
    before, new, log = save
    renamed = log.events.index(Event("rename", _STAGED, TWO))
    touched = [event for event in log.events[:renamed] if event.path.split("/")[0] == ONE]
    assert touched == [], "an old checkpoint goes before the new one has its name"
    if (before / TWO).exists():
        assert log.events[renamed - 1] == Event("rename", TWO, _REPLACED), (
            "it keeps its name until the new one is whole"
        )
    staged = {f"{_STAGED}/{path.name}" for path in new.iterdir()}
    last_data = {event.path: index for index, event in enumerate(log.events[:renamed]) if event.kind == "data"}
    last_sync = {event.path: index for index, event in enumerate(log.events[:renamed]) if event.kind == "sync"}
    assert staged <= last_data.keys()
    assert [path for path in staged if last_sync.get(path, -1) < last_data[path]] == []
    assert last_sync[_STAGED] > max(last_sync[path] for path in staged)
    after = log.events[renamed + 1 :]
    parent_synced = after.index(Event("sync", "."))
    removals = [index for index, event in enumerate(after) if event.kind in ("remove", "rmdir", "rename")]
    assert all(index > parent_synced for index in removals), "an old checkpoint goes before the new one is safe"


def test_old_or_new_and_never_a_mix(save: tuple[Path, Path, Log], tmp_path: Path) -> None:
    before, new, log = save
    n, chance = trials_of(250), random.Random(3 + SEED)  # for each of three ways to save
    states = {"old": before / (TWO if (before / TWO).exists() else ONE), "new": new}
    loaded = {"old": 0, "new": 0}

    def whole(index: int) -> bool:
        place = tmp_path / f"{index}"
        said = crash_state(log, lambda to: shutil.copytree(before, to), place, chance)
        if (before / TWO).exists():
            write.clean_up(place)  # as every run does before it looks for a checkpoint
        found = find.newest(place)
        is_state = next((name for name, state in states.items() if found and not same_folder(found, state)), None)
        if is_state is None:
            print(f"state {index}: {said}: {found}")
        else:
            loaded[is_state] += 1
        shutil.rmtree(place)
        return is_state is not None

    results = [whole(index) for index in range(n)]
    print(f"after a power cut: the old one loads {loaded['old']} times, the new one {loaded['new']} times")
    assert min(loaded.values()) > 0
    count("crash states that load the old step or the new one", results, n)
