"""R1: a run that is killed with SIGKILL, anywhere, and resumed ends with the very bytes of one that was not."""

from __future__ import annotations

import json
import random
from itertools import count as numbers
from pathlib import Path

import pytest
from harness import SEED, Server, at_once, count, same_folder, trials_of
from trials import CONFIGS, N_STEPS, OUT, SAVE_STEPS

pytestmark = pytest.mark.reliability

_SEED = 20260
_KILLED = -9
_LAST = f"checkpoint-{N_STEPS}"


@pytest.fixture(scope="module")
def whole(server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The uninterrupted runs by configuration."""
    folders = {name: tmp_path_factory.mktemp(f"whole-{name.replace(' ', '-')}") for name in CONFIGS}
    at_once(lambda name: server.run("whole", folder=str(folders[name]), config=name) == 0, CONFIGS)
    return folders


class Kills:
    """Runs that are killed at given moments and then end."""

    def __init__(self, server: Server, whole: dict[str, Path], place: Path) -> None:
        self.server, self.whole, self.place = server, whole, place
        self.names = numbers()

    def folder(self) -> str:
        """Return a new folder."""
        made = self.place / f"{next(self.names)}"
        made.mkdir()
        return str(made)

    def ends_alike(self, folder: str, config: str) -> bool:
        """Let the run in the folder go on to its end; return whether its last checkpoint is the whole run's."""
        code = self.server.run("train", folder=folder, config=config, asked="auto")
        different = same_folder(Path(folder) / OUT / _LAST, self.whole[config] / OUT / _LAST)
        if code or different:
            print(f"{config} in {folder}: exit {code}, differs in {different}")
        return code == 0 and not different

    def at(self, moment: tuple[str, float]) -> bool:
        """Kill once it has had so much processor time, resume, compare."""
        config, cpu_s = moment
        code = 0
        while code == 0:  # it was faster this time, and ended before the moment came
            folder = self.folder()
            code = self.server.run_until(cpu_s, "train", folder=folder, config=config)
            cpu_s *= 0.7
        return code == _KILLED and self.ends_alike(folder, config)

    def inside(self, moment: tuple[str, int]) -> bool:
        """Kill at this event inside a save, resume, compare."""
        config, event = moment
        folder = self.folder()
        code = self.server.run("train", folder=folder, config=config, die=event)
        return code == _KILLED and self.ends_alike(folder, config)


@pytest.fixture
def kills(server: Server, whole: dict[str, Path], tmp_path: Path) -> Kills:
    return Kills(server, whole, tmp_path)


def test_killed_at_random_moments(kills: Kills, whole: dict[str, Path]) -> None:
    n, chance = trials_of(40), random.Random(_SEED + SEED)
    busy_s = {name: json.loads((whole[name] / "facts.json").read_text())["busy_s"] for name in CONFIGS}
    configs = [list(CONFIGS)[index % len(CONFIGS)] for index in range(n)]
    # A run that takes less time than the one that was measured ends before the last moments come.
    moments = [(config, chance.uniform(0.0, 0.7) * busy_s[config]) for config in configs]
    count("killed at random moments, bitwise the same", at_once(kills.at, moments), n)


def test_killed_inside_a_save(kills: Kills, whole: dict[str, Path]) -> None:
    n, chance = trials_of(20), random.Random(_SEED + 1 + SEED)
    configs = [list(CONFIGS)[index % len(CONFIGS)] for index in range(n)]
    events = {name: json.loads((whole[name] / "facts.json").read_text())["events"] for name in CONFIGS}
    moments = [(config, chance.randint(1, events[config])) for config in configs]
    count("killed inside a save, bitwise the same", at_once(kills.inside, moments), n)


def test_killed_ten_times_in_a_row(kills: Kills, whole: dict[str, Path]) -> None:
    """Each time at a random event inside the next save, or while the one before is cleared away."""
    chance = random.Random(_SEED + 2 + SEED)
    per_save = json.loads((whole["plain"] / "facts.json").read_text())["events"] // (N_STEPS // SAVE_STEPS)
    codes = []
    for _ in range(trials_of(1)):
        folder = kills.folder()
        events = [chance.randint(1, per_save) for _ in range(10)]
        codes += [kills.server.run("train", folder=folder, asked="auto", die=event) for event in events]
        assert kills.ends_alike(folder, "plain")
    count("killed ten times in a row", [code == _KILLED for code in codes], 10 * trials_of(1))
