"""The memory that this process may use, the machine's or its cgroup's limit, and the memory that it uses."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from whet import system
from whet.errors import WhetError
from whet.hardware.cgroup import ROOT, folders, read_lines, read_words

_LACK = ("can't allocate memory", "not enough memory", "cannot allocate memory", "out of memory", "bad_alloc",
         "failed to map segment")  # fmt: skip
"""Of the messages of torch, of the system and of its loader of libraries, in small letters."""
_NO_THREAD = ("can't start new thread", "threadpoolbuilderror", "failed to spawn thread")
"""Of the messages of Python and of Rust libraries, in small letters."""

CGROUP = "the cgroup "
"""How the name of a limit begins that a cgroup sets."""


@dataclass(frozen=True)
class MemoryLimit:
    """A limit on memory, and how much of it is used."""

    used_bytes: int
    """Without the kernel's file cache, which it can free."""
    limit_bytes: int
    of: str
    """What sets the limit."""

    @property
    def left_bytes(self) -> int:
        """Memory left before the kernel slows processes down or kills one; below 0 if the limit is already exceeded."""
        return self.limit_bytes - self.used_bytes


def limit_bytes(root: Path = ROOT) -> int | None:
    """Return the memory this process may use: the machine's, or less if a cgroup sets a limit; None if unknown.

    `root` contains /proc and /sys, here and below.
    """
    known = [limit for limit in (machine_bytes(root), cgroup_bytes(root)) if limit]
    return min(known, default=None)


def machine_bytes(root: Path = ROOT) -> int | None:
    """Return the machine's memory, None if unknown."""
    found = _kilobytes(root / "proc/meminfo", "MemTotal")
    return found if found is not None else system.machine_bytes()


def cgroup_bytes(root: Path = ROOT) -> int | None:
    """Return the smallest limit of this process's cgroup (v2, else v1) and its parents; None: no limit."""
    return min((limit for _, limit in _limits(root)), default=None)


def available_bytes(root: Path = ROOT) -> int | None:
    """Return what can be allocated now without swapping and within each cgroup's limit."""
    free = [limit.left_bytes for folder in limited_cgroups(root) if (limit := cgroup_memory_limit(folder)) is not None]
    on_machine = _here(root, _kilobytes(root / "proc/meminfo", "MemAvailable"), system.available_bytes)
    known = [*free, *([] if on_machine is None else [on_machine])]
    return max(min(known), 0) if known else None


def free_bytes(
    *,
    held_bytes: int = 0,
    unheld_bytes: int = 0,
    limit_gb: float | None = None,
    n_processes: int = 1,
    root: Path = ROOT,
) -> int | None:
    """Return what a process of a run may hold in all, here and now; None if the system does not say.

    It is its part of what is available and of the `held_bytes` that this process has, or less: `limit_gb` (GiB) if its
    user has set a limit, or the limit on its address space without the `unheld_bytes`, the addresses that it takes and
    holds no memory at.
    """
    available, space = available_bytes(root), address_space_bytes()
    known = [
        None if available is None else (available + held_bytes) // n_processes,
        None if space is None else max(space - unheld_bytes, 0),
        int(limit_gb * 2**30) if limit_gb else None,
    ]
    return min((one for one in known if one is not None), default=None)


def address_space_bytes() -> int | None:
    """Return the limit on this process's address space (`ulimit -v`), None if there is none."""
    return system.soft_limit("AS")


def lift_address_limit() -> None:
    """Raise the limit on this process's address space as far as it may: to the hard limit, which `ulimit -S` leaves."""
    system.set_soft_limit("AS", None)


def unheld_bytes(root: Path = ROOT) -> int:
    """Return the addresses that this process takes and holds no memory at: of files, of stacks, and what is reserved.

    Those of the heap do not count, as what the process allocates later takes them first.
    """
    found, name, size = 0, "", 0
    for line in read_lines(root / "proc/self/smaps"):
        key, _, value = line.partition(":")
        if key == "Size":
            size = int(value.split()[0])
        elif key == "Rss" and name != "[heap]":
            found += size - int(value.split()[0])
        elif not key[0].isupper():
            name = line.split()[-1]
    return found * 1024


def lack(error: BaseException) -> WhetError | None:
    """Return the error to print if this one says that memory or threads are exhausted; None for any other."""
    number = error.errno if isinstance(error, OSError) else None
    speaks = isinstance(error, RuntimeError | ImportError) or type(error).__name__ == PANIC
    says = str(error).lower() if speaks else ""
    got = " ".join(str(error).split()) or type(error).__name__
    if any(one in says for one in _NO_THREAD) or (number == errno.EAGAIN and not _is_of_a_stream(error)):
        return _no_thread(got)
    if not (isinstance(error, MemoryError) or number == errno.ENOMEM or any(one in says for one in _LACK)):
        return None
    limits = {"ulimit -v": address_space_bytes(), "machine or cgroup": limit_bytes()}
    known = ", ".join(f"{name}: {size:,} bytes" for name, size in limits.items() if size is not None)
    return WhetError(
        what="there is not enough memory",
        got=got,
        why=f"the system refused more; the limits are {known}",
        fix="raise the limit (ulimit -v, the cgroup's, the pod's), or use a smaller model, or shorter and fewer rows",
    )


PANIC = "PanicException"
"""What a Rust library raises if its code gives up: a BaseException, and no class that can be imported."""


def thread_limits(root: Path = ROOT) -> dict[str, int]:
    """Return the limits on the number of threads by name: this user's, and the smallest of the cgroup and its parents.

    A limit that is not set is left out.
    """
    soft = system.soft_limit("NPROC")
    of_user = {} if soft is None else {"ulimit -u": soft}
    of_group = [most for folder in folders("pids", root) if (most := _number(folder / "pids.max")) is not None]
    return of_user | ({"pids.max of the cgroup": min(of_group)} if of_group else {})


def _is_of_a_stream(error: BaseException) -> bool:
    """Return whether a stream that does not wait raised this error, which has the number of a lack of threads."""
    return hasattr(error, "characters_written") or getattr(error, "filename", None) is not None


def _no_thread(got: str) -> WhetError:
    limits = {name: f"{most:,}" for name, most in thread_limits().items()}
    space = address_space_bytes()
    known = limits | ({} if space is None else {"ulimit -v": f"{space:,} bytes, of which each thread takes some"})
    return WhetError(
        what="no more threads or processes can be started",
        got=got,
        why="the system refused one; the limits are " + (", ".join(f"{n}: {v}" for n, v in known.items()) or "unknown"),
        fix="raise the limit on processes (ulimit -u, the pids limit of the container or pod), end other programs of "
        "this user, or start fewer threads: OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false",
    )


def resident_bytes(root: Path = ROOT) -> int | None:
    """Return the memory that this process holds now, None if unknown."""
    return _here(root, _kilobytes(root / "proc/self/status", "VmRSS"), system.resident_bytes)


def anonymous_bytes(root: Path = ROOT) -> int | None:
    """Return what of that is in no file: this process's own, or shared with one that has forked; None if unknown."""
    return _kilobytes(root / "proc/self/status", "RssAnon")


def data_bytes(root: Path = ROOT) -> int | None:
    """Return the addresses that this process may write to, as RLIMIT_DATA counts them; None if unknown."""
    return _kilobytes(root / "proc/self/status", "VmData")


def mapped_bytes(root: Path = ROOT) -> int | None:
    """Return the address space that this process takes now, None if unknown."""
    return _kilobytes(root / "proc/self/status", "VmSize")


def peak_bytes(root: Path = ROOT) -> int | None:
    """Return the peak memory of this process so far, None if unknown."""
    return _here(root, _kilobytes(root / "proc/self/status", "VmHWM"), system.peak_bytes)


def huge_pages(root: Path = ROOT) -> str | None:
    """Return who gets transparent huge pages: `always`, `madvise` (on request) or `never`; None if unknown."""
    words = read_words(root / "sys/kernel/mm/transparent_hugepage/enabled")
    return next((word.strip("[]") for word in words if word.startswith("[")), None)


def memory_limits(cgroups: Sequence[Path] | None = None, root: Path = ROOT) -> list[MemoryLimit]:
    """Return the limits on this process, the machine's and its cgroups', with the memory in use under each.

    A frequent caller passes `cgroups`, the result of `limited_cgroups`, because finding them takes longer than reading.
    """
    groups = limited_cgroups(root) if cgroups is None else cgroups
    found = [_machine_memory_limit(root), *(cgroup_memory_limit(folder) for folder in groups)]
    return [limit for limit in found if limit is not None]


def limited_cgroups(root: Path = ROOT) -> list[Path]:
    """Return the folders of the cgroups around this process that limit its memory; they do not change during a run."""
    return list(dict.fromkeys(folder for folder, _ in _limits(root)))


def cgroup_memory_limit(folder: Path) -> MemoryLimit | None:
    """Return the limit of this folder's cgroup and its used memory; None if it has no limit or does not report it."""
    limit = _limit_in(folder)
    used = next((size for name in _USE_FILES if (size := _number(folder / name)) is not None), None)
    if limit is None or used is None:
        return None
    return MemoryLimit(max(used - _file_cache_bytes(folder), 0), limit, f"{CGROUP}{folder}")


_LIMIT_FILES = ("memory.max", "memory.high", "memory.limit_in_bytes")
"""memory.high is below memory.max, where both are set: from there on the kernel slows the processes down until they
hardly run."""
_USE_FILES = ("memory.current", "memory.usage_in_bytes")
_CACHE = ("inactive_file", "active_file", "slab_reclaimable")
"""Memory that the kernel frees before it kills a process. cgroup v1 prefixes the names with `total_`."""
_NO_LIMIT = 1 << 60
"""cgroup v1 writes a number near 2^63 for no limit."""


def _machine_memory_limit(root: Path) -> MemoryLimit | None:
    """Return the machine's memory; free swap space counts as free."""
    path = root / "proc/meminfo"
    total = _here(root, _kilobytes(path, "MemTotal"), system.machine_bytes)
    available = _here(root, _kilobytes(path, "MemAvailable"), system.available_bytes)
    if total is None or available is None:
        return None
    return MemoryLimit(total - available - (_kilobytes(path, "SwapFree") or 0), total, "this machine")


def _limits(root: Path) -> Iterator[tuple[Path, int]]:
    """Yield (folder, limit) of each cgroup around this process that has one."""
    for folder in folders("memory", root):
        if (limit := _limit_in(folder)) is not None:
            yield folder, limit


def _limit_in(folder: Path) -> int | None:
    limits = [limit for name in _LIMIT_FILES if (limit := _number(folder / name)) is not None and limit < _NO_LIMIT]
    return min(limits, default=None)


def _file_cache_bytes(folder: Path) -> int:
    pairs = [line.split() for line in read_lines(folder / "memory.stat")]
    found = {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
    return sum(found.get(f"total_{name}", found.get(name, 0)) for name in _CACHE)


def _number(path: Path) -> int | None:
    words = read_words(path)
    return int(words[0]) if words and words[0].isdigit() else None


def _kilobytes(path: Path, name: str) -> int | None:
    found = [line.split() for line in read_lines(path) if line.startswith(f"{name}:")]
    return int(found[0][1]) * 1024 if found else None


def _here(root: Path, read: int | None, ask: Callable[[], int | None]) -> int | None:
    """Return what was read; if nothing was, because this system has no /proc, what it says when it is asked."""
    return ask() if read is None and root == ROOT else read
