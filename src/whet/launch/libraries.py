"""Libraries to preload: an allocator that is fast with threads, and Intel's OpenMP, where distributions put them."""

from __future__ import annotations

import os
import platform
import re
import site
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from whet.errors import ConfigError

Allocator = Literal["auto", "default", "tcmalloc", "jemalloc"]
OpenMP = Literal["auto", "default", "intel"]

_NAMES = {
    "tcmalloc": ("libtcmalloc.so", "libtcmalloc_minimal.so"),
    "jemalloc": ("libjemalloc.so",),
    "intel": ("libiomp5.so",),
}
"""Library -> the beginnings of its file names, the better one first; a version may follow."""
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

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files for LD_PRELOAD, in order."""
        return tuple(path for path in (self.allocator, self.openmp) if path is not None)


def choose(allocator: Allocator, openmp: OpenMP, environment: Mapping[str, str] = os.environ) -> Preload:
    """Return what to preload; raises ConfigError if a library that was asked for is not there."""
    places = list(dict.fromkeys(_places(environment)))
    cached = _linker_cache()
    found_allocator = (
        next((path for name in ("tcmalloc", "jemalloc") if (path := find(name, places, cached))), None)
        if allocator == "auto"
        else None if allocator == "default" else _required(allocator, places, cached)
    )  # fmt: skip
    found_openmp = None if openmp == "default" else find("intel", places, cached)
    if openmp == "intel" and found_openmp is None:
        raise _missing("intel", places)
    return Preload(found_allocator, found_openmp)


def find(name: str, places: Sequence[Path], cached: Sequence[Path] = ()) -> Path | None:
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
    path = find(name, places, cached)
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
