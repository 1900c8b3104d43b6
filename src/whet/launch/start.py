"""What each rank is started with: its program, libraries to preload, and its threads; secrets stay out of words."""

from __future__ import annotations

import os
import platform
import re
import shutil
import site
import subprocess
import sys
import sysconfig
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from whet import system
from whet.config import secrets
from whet.config.ranks import require_output_for_restarts
from whet.errors import ConfigError
from whet.hardware.openmp import LIMIT_THREADS
from whet.hardware.rank_plan import RankPlan
from whet.launch.words import is_python

_NO = {"false", "no", "n", "f", "0"}


def command_line(words: Sequence[str], commands: Collection[str]) -> list[str]:
    """Return the words of the process to start; `commands` are the names of whet's own. Raises ConfigError."""
    require_words(words)
    first = words[0]
    if first in commands:
        return system.python("-m", "whet", *words)
    if first == "-m":
        return [sys.executable, *words]
    if Path(first).suffix == ".py" and Path(first).is_file():
        return [sys.executable, *words]
    if shutil.which(first) is not None:
        _require_no_secrets(words)
        return list(words)
    raise ConfigError(
        what="what is to be launched does not exist",
        got=first,
        why="it is no command of whet, no Python script here, and no program on PATH",
        fix=f"name one of {', '.join(commands)}, the path of a script that ends with .py, -m MODULE, or a program",
    )


def _require_no_secrets(words: Sequence[str]) -> None:
    """Refuse secrets in the command line of a program that is not Python, which whet cannot keep out of it."""
    if not is_python(words) and (found := secrets.in_command(words)):
        raise ConfigError(
            what="the command line of each rank would show a secret",
            got=", ".join(found),
            why="every user of a machine can read the command lines of its processes; whet keeps secrets out of those "
            "of Python scripts and modules alone",
            fix="let the program read it from a variable, which ranks inherit (with several hosts: --env NAME), or "
            "name the Python script itself: whet launch -- train.py ...",
        )


def require_words(words: Sequence[str]) -> None:
    """Raise ConfigError if there is no command, or no module after -m."""
    if not words:
        raise ConfigError(
            what="there is nothing to launch",
            got="no words after --",
            why="the launcher starts a command once for each rank",
            fix="end the line with the command: whet launch -- qa --do_train ..., or whet launch -- train.py",
        )
    if tuple(words) == ("-m",):
        raise ConfigError(
            what="-m has no name of a module after it",
            got="-m as the last word",
            why="python -m runs the module that is named after it",
            fix="name it: whet launch -- -m package.train",
        )


def runs_alone(name: str, ranked: Collection[str]) -> ConfigError:
    """Return the error of a command of whet that several ranks cannot run together."""
    return ConfigError(
        what=f"whet {name} runs in one process",
        got=f"several ranks of whet {name}",
        why="each rank would do the complete work again, over the same output folder",
        fix="leave --nproc_per_node and the hosts out: one process then uses all cores of this machine; several ranks "
        f"can run {', '.join(sorted(ranked))}, and scripts that use torch.distributed or whet.Trainer",
    )


def require_restartable(words: Sequence[str], commands: Collection[str], max_restarts: int) -> None:
    """Raise ConfigError for a command of whet that would overwrite the folder which a restart continues from."""
    if not words or words[0] not in commands:
        return
    for number, word in enumerate(words):
        name, _, value = word.replace("-", "_").partition("=")
        if name == "__overwrite_output_dir":
            follows = value or (words[number + 1] if number + 1 < len(words) else "")
            require_output_for_restarts(overwrites=follows.lower() not in _NO, n_restarts=max_restarts)


Allocator = Literal["auto", "default", "tcmalloc", "jemalloc"]
OpenMP = Literal["auto", "default", "intel"]

_NAMES = {
    "tcmalloc": ("libtcmalloc.so", "libtcmalloc_minimal.so"),
    "jemalloc": ("libjemalloc.so",),
    "intel": ("libiomp5.so",),
}
"""Library -> the beginnings of its file names, the better one first; a version may follow."""
_IS_ALLOCATOR, _IS_OPENMP = re.compile("malloc"), re.compile(r"lib(iomp5|omp|gomp)\b")
"""How to tell allocators and OpenMP libraries by the names of their files."""
_PACKAGES = {
    "tcmalloc": "apt-get install libtcmalloc-minimal4, dnf install gperftools-libs, or conda install gperftools",
    "jemalloc": "apt-get install libjemalloc2, dnf install jemalloc, or conda install jemalloc",
    "intel": "pip install intel-openmp",
}
_MACHINES = {"x86_64": 62, "aarch64": 183}
"""What ELF files say of the processor they are for."""
_IN_CACHE = re.compile(r"=> (/\S+)$")


@dataclass(frozen=True)
class Preload:
    """The libraries that a rank is started with."""

    allocator: Path | None = None
    openmp: Path | None = None
    inherited: tuple[str, ...] = ()
    """What stays of the user's LD_PRELOAD, which is loaded first."""
    notes: tuple[str, ...] = ()
    """A sentence for each library of the user's LD_PRELOAD that is left out."""

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that are added to LD_PRELOAD, in order."""
        return tuple(path for path in (self.allocator, self.openmp) if path is not None)

    @property
    def every(self) -> tuple[str, ...]:
        """All that is preloaded, in order."""
        return (*self.inherited, *map(str, self.paths))


def choose_libraries(allocator: Allocator, openmp: OpenMP, environment: Mapping[str, str] = os.environ) -> Preload:
    """Return what to preload; raises ConfigError if a library that was asked for is not there.

    Of two allocators, or OpenMP libraries, the first one in LD_PRELOAD serves the process. So what the user preloads
    keeps `auto` from adding another one, and gives way to one that an option names, or to `default`.
    """
    places = list(dict.fromkeys(_places(environment)))
    cached = _linker_cache()
    given = environment.get("LD_PRELOAD", "").replace(":", " ").split()
    kept, notes = list(given), list[str]()
    found: dict[str, Path | None] = {}
    for option, asked, names, ours in (
        ("memory_allocator", allocator, ("tcmalloc", "jemalloc"), _IS_ALLOCATOR),
        ("openmp", openmp, ("intel",), _IS_OPENMP),
    ):
        theirs = [entry for entry in given if ours.search(Path(entry).name)]
        found[option] = None
        if asked == "auto" and not theirs:
            found[option] = next((path for name in names if (path := find_library(name, places, cached))), None)
        elif asked != "auto":
            found[option] = path = None if asked == "default" else _required(asked, places, cached)
            kept = [entry for entry in kept if entry not in theirs]
            others = [entry for entry in theirs if path is None or os.path.realpath(entry) != os.path.realpath(path)]
            notes += [f"LD_PRELOAD: {entry} gives way to --{option} {asked}" for entry in others]
    return Preload(found["memory_allocator"], found["openmp"], tuple(kept), tuple(notes))


def as_preloaded(environment: Mapping[str, str] = os.environ) -> tuple[Allocator, OpenMP]:
    """Return the options with which ranks are started with what LD_PRELOAD has, and with nothing more."""
    given = [Path(entry).name for entry in environment.get("LD_PRELOAD", "").replace(":", " ").split()]
    return (
        "auto" if any(map(_IS_ALLOCATOR.search, given)) else "default",
        "auto" if any(map(_IS_OPENMP.search, given)) else "default",
    )


def find_library(name: str, places: Sequence[Path], cached: Sequence[Path] = ()) -> Path | None:
    """Return the file of a library for this processor: in these folders, or among the linker's own; None if none."""
    for begin in _NAMES[name]:
        pattern = re.compile(re.escape(begin) + r"(\.\d+)*")
        inside = (path for place in places for path in sorted(_listed(place)) if pattern.fullmatch(path.name))
        known = (path for path in cached if pattern.fullmatch(path.name))
        for path in (*inside, *known):
            if _is_for_this_processor(path):
                return path
    return None


def _required(name: str, places: Sequence[Path], cached: Sequence[Path]) -> Path:
    path = find_library(name, places, cached)
    if path is None:
        raise _missing(name, places)
    return path


def _places(environment: Mapping[str, str]) -> Iterator[Path]:
    """Yield the folders where environments and distributions put libraries, the environment's own first."""
    for prefix in (sys.prefix, environment.get("CONDA_PREFIX"), environment.get("VIRTUAL_ENV"), sys.base_prefix):
        if prefix:
            yield Path(prefix) / "lib"
    yield Path(site.getuserbase()) / "lib"
    multiarch = sysconfig.get_config_var("MULTIARCH") or f"{platform.machine()}-linux-gnu"
    for folder in ("/usr/local/lib", "/usr/lib", "/lib"):
        yield Path(folder) / multiarch
        yield Path(f"{folder}64")
        yield Path(folder)


def _listed(place: Path) -> list[Path]:
    try:
        return list(place.iterdir())
    except OSError:
        return []


def _linker_cache() -> list[Path]:
    """Return the libraries that the dynamic linker knows; none if it cannot be asked."""
    for program in ("/sbin/ldconfig", "/usr/sbin/ldconfig"):
        try:
            done = subprocess.run([program, "-p"], capture_output=True, text=True, check=False, timeout=10)  # noqa: S603
        except (OSError, subprocess.TimeoutExpired):
            continue
        return [Path(match[1]) for line in done.stdout.splitlines() if (match := _IN_CACHE.search(line))]
    return []


def _is_for_this_processor(path: Path) -> bool:
    """Return whether the file is a shared library that a process of this machine can load."""
    try:
        with path.open("rb") as file:
            head = file.read(20)
    except OSError:
        return False
    wanted = _MACHINES.get(platform.machine())
    return head[:4] == b"\x7fELF" and (wanted is None or int.from_bytes(head[18:20], sys.byteorder) == wanted)


def _missing(name: str, places: Sequence[Path]) -> ConfigError:
    flag = "--openmp" if name == "intel" else "--memory_allocator"
    return ConfigError(
        what=f"{_NAMES[name][0]} is not on this machine",
        got=f"{flag} {name}; looked in {', '.join(str(place) for place in places if place.is_dir())}",
        why="a library that is not there cannot be preloaded, and the run would start without it",
        fix=f"install it ({_PACKAGES[name]}), or use {flag} default",
    )


_OURS = ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")
"""Variables that the user may have set, and that the launcher decides."""
_BINDS_THREADS = ("OMP_PLACES", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "KMP_HW_SUBSET")
"""Variables that bind threads one by one: they would bind all processes of a rank to the cores of its first."""


def changed_variables(
    inherited: Mapping[str, str], plan: RankPlan, preload: Preload, *, alone: bool, interface: str | None
) -> tuple[dict[str, str | None], list[str]]:
    """Return the variables of a rank that differ from what it inherits, and a note for each that had to give way.

    None: the variable is left out. `interface` is the network interface that leads to the other ranks, if it is known.
    """
    threads = {"OMP_NUM_THREADS": str(plan.n_threads)}
    found: dict[str, str | None] = {**threads, **of_libraries(inherited, preload)}
    if not alone:
        found |= {"GLOO_SOCKET_IFNAME": interface} if interface else {}
        found["PYTHONUNBUFFERED"] = inherited.get("PYTHONUNBUFFERED", "1")  # it may be killed, and lose its last lines
    left_out = [name for name in _BINDS_THREADS if name in inherited]
    limits = [name for name in LIMIT_THREADS if name in inherited]
    notes = [*preload.notes]
    notes += [f"{name}={inherited[name]} is left out: the launcher binds ranks, not threads" for name in left_out]
    notes += [
        f"{name}={inherited[name]} gives way to the launcher's OMP_NUM_THREADS={plan.n_threads}" for name in limits
    ]
    notes += [
        f"{name}={inherited[name]} gives way to the launcher's {found[name]}"
        for name in _OURS
        if name in found and inherited.get(name, found[name]) != found[name]
    ]
    return found | dict.fromkeys((*left_out, *limits)), notes


def of_libraries(inherited: Mapping[str, str], preload: Preload) -> dict[str, str | None]:
    """Return the variables of a rank that load its libraries."""
    found: dict[str, str | None] = {}
    if preload.every or "LD_PRELOAD" in inherited:
        found["LD_PRELOAD"] = ":".join(preload.every) or None
    if any("libiomp5" in Path(name).name for name in preload.every):
        found["KMP_BLOCKTIME"] = inherited.get("KMP_BLOCKTIME", "1")
    return found
