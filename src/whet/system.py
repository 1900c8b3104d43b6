"""What whet asks of the operating system, in a version for Linux and in others for macOS and Windows.

Parts of Python that only some systems have (`fcntl`, `resource`, `msvcrt`, os.fork, SIGHUP, /proc) are named here, and
in code that only Linux reaches. Python says which of them there are; the name of the system decides what Python does
not say. For what a system lacks, the functions return None or False, raise OSError or refuse (`require_linux`). Their
docstrings name what is left out.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import mmap
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, NoReturn

from whet.errors import ConfigError

if TYPE_CHECKING:
    import subprocess


_os: Any = os
_signal: Any = signal
_mmap: Any = mmap
"""What only some systems have is asked of these: a check of types knows the names of one system alone."""


def is_linux() -> bool:
    """Return whether this is Linux."""
    return sys.platform.startswith("linux")


def _is_windows() -> bool:
    return sys.platform == "win32"


def require_linux(what: str, *, why: str, fix: str) -> None:
    """Raise ConfigError on another system."""
    if not is_linux():
        raise ConfigError(what=what, got=sys.platform, why=why, fix=fix)


@cache
def _part(name: str) -> Any:
    """Return a module of Python that some systems lack; None if this one does."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _lacking(what: str) -> OSError:
    return OSError(errno.ENOTSUP, f"{what} on {sys.platform}")


# ---- files ----

BINARY: int = getattr(os, "O_BINARY", 0)
"""For os.open: bytes are read and written as they are. Windows translates the ends of lines without it."""
_CAREFUL = BINARY | sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_CLOEXEC"))


def open_plain(path: Path, flags: int, mode: int = 0o666, *, follow: bool = False) -> int:
    """Open a file as os.open does, but not through a link, unless `follow`; it does not wait at a pipe."""
    if follow:
        return os.open(path, flags | _CAREFUL, mode)
    no_link = getattr(os, "O_NOFOLLOW", None)
    if no_link is None and path.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return os.open(path, flags | _CAREFUL | (no_link or 0), mode)


def fsync(path: Path) -> None:
    """Wait until the file, or the folder's list of names, is on the disk; Windows has no call for a folder."""
    if _is_windows():
        if path.is_dir():
            return
        handle = open_plain(path, os.O_RDWR)  # it syncs what may be written to
    else:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    try:
        fsync_handle(handle)
    finally:
        os.close(handle)


def fsync_handle(handle: int) -> None:
    """Wait until an open file is on the disk. os.fsync of macOS waits for the disk's cache only."""
    fcntl = _part("fcntl")
    if hasattr(fcntl, "F_FULLFSYNC"):
        with contextlib.suppress(OSError):  # a network folder has no such call
            fcntl.fcntl(handle, fcntl.F_FULLFSYNC)
            return
    os.fsync(handle)


_SCANNED_S, _SCANNED_EVERY_S = 2.0, 0.05


def rename(old: Path, new: Path, *, replaces: bool = False) -> None:
    """Rename a file or a folder; with `replaces`, a file over another one.

    Windows renames nothing that is open, and virus scanners open what was just written: it is tried again for a while.
    """
    until_s = time.monotonic() + _SCANNED_S
    while True:
        try:
            old.replace(new) if replaces else old.rename(new)
        except PermissionError:
            if not _is_windows() or time.monotonic() > until_s:
                raise
            time.sleep(_SCANNED_EVERY_S)
        else:
            return


def allocate_on_disk(handle: int, n_bytes: int) -> None:
    """Give an empty open file its size on the disk; OSError if there is no room."""
    if hasattr(os, "posix_fallocate"):
        _os.posix_fallocate(handle, 0, n_bytes)
        return
    zeros = memoryview(bytes(1 << 20))
    with os.fdopen(handle, "wb", closefd=False) as file:
        for begin in range(0, n_bytes, len(zeros)):
            file.write(zeros[: n_bytes - begin])


def follow_umask(file: Path) -> None:
    """Give a file the mode of new files of this process; safetensors writes files that only their owner can read.

    Windows and some file systems have no modes: files are left unchanged.
    """
    if not hasattr(os, "fchmod"):
        return
    with contextlib.suppress(OSError):
        descriptor = open_plain(file, os.O_RDONLY)
        try:
            _os.fchmod(descriptor, 0o666 & ~_umask())
        finally:
            os.close(descriptor)


def _umask() -> int:
    status = Path("/proc/self/status")
    with contextlib.suppress(OSError, ValueError, StopIteration):
        line = next(line for line in status.read_text("ascii", "replace").splitlines() if line.startswith("Umask:"))
        return int(line.split()[1], 8)
    before = os.umask(0o077)  # it can be read only by setting it
    os.umask(before)
    return before


@contextmanager
def numbered_folder(folder: Path) -> Iterator[Path]:
    """Yield a name of the folder in ASCII, through an open file (Linux); its own name on other systems."""
    descriptors = Path("/proc/self/fd")
    if not descriptors.is_dir():
        yield folder
        return
    descriptor = os.open(folder, os.O_RDONLY | _os.O_DIRECTORY)
    try:
        yield descriptors / str(descriptor)
    finally:
        os.close(descriptor)


def own_descriptor(path: Path) -> int | None:
    """Return the number of the open file of this process that a path of Linux names; None for any other path."""
    head, _, number = str(path).rpartition("/fd/")
    here = f"/proc/{os.getpid()}"
    tasks = head.removeprefix(f"{here}/task/")
    return int(number) if number.isdigit() and (head == here or (tasks != head and tasks.isdigit())) else None


# ---- locks ----

LOCKED = frozenset({errno.EAGAIN, errno.EACCES})
"""The numbers of the error of `lock` if another process has locked the file."""
_LOCKED_BYTE = 1 << 30
"""Windows keeps others from reading what is locked: this byte lies behind the text of the file."""


def lock(handle: int, *, shared: bool = False) -> None:
    """Lock an open file until it is closed, or raise OSError at once.

    Windows has no shared locks: a `shared` one is in the way of others until it is closed.
    """
    if (fcntl := _part("fcntl")) is not None:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        return
    if (msvcrt := _part("msvcrt")) is None:
        raise _lacking("no locks of files")
    os.lseek(handle, _LOCKED_BYTE, os.SEEK_SET)
    try:
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
    finally:
        os.lseek(handle, 0, os.SEEK_SET)


def removes_open_files() -> bool:
    """Return whether a file can be removed while a process has it open, which Windows refuses."""
    return not _is_windows()


# ---- memory ----


def _psutil() -> Any:
    """Return psutil, which reads what whet reads from /proc on Linux; None if it is not installed."""
    try:
        import psutil
    except ImportError:
        return None
    return psutil


def _asked_psutil(ask: Callable[[Any], Any]) -> Any:
    """Return what psutil says; None if it cannot."""
    if (psutil := _psutil()) is None:
        return None
    try:
        return ask(psutil)
    except (psutil.Error, OSError, AttributeError, NotImplementedError, RuntimeError):
        return None


def resident_bytes() -> int | None:
    """Return the memory that this process holds now, None if unknown."""
    return _asked_psutil(lambda psutil: psutil.Process().memory_info().rss)


def peak_bytes() -> int | None:
    """Return the peak memory of this process so far, None if unknown."""
    if (resource := _part("resource")) is None:
        return _asked_psutil(lambda psutil: psutil.Process().memory_info().peak_wset)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def forget_peak() -> None:
    """Set the peak memory of this process to what it holds now, where that is possible (Linux, proc(5))."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", "ascii")


def machine_bytes() -> int | None:
    """Return the machine's memory, None if unknown."""
    if hasattr(os, "sysconf"):
        with contextlib.suppress(ValueError, OSError):
            return _os.sysconf("SC_PAGE_SIZE") * _os.sysconf("SC_PHYS_PAGES")
    return _asked_psutil(lambda psutil: psutil.virtual_memory().total)


def available_bytes() -> int | None:
    """Return the memory of the machine that can be allocated without swapping, None if unknown."""
    return _asked_psutil(lambda psutil: psutil.virtual_memory().available)


def has_addresses_without_memory() -> bool:
    """Return whether this system has addresses that no memory stands behind, which Windows has not."""
    return hasattr(mmap, "MAP_PRIVATE")


def addresses_without_memory(n_bytes: int) -> mmap.mmap | None:
    """Return addresses that no memory stands behind; None if the system grants none."""
    if not has_addresses_without_memory():
        return None
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000 if is_linux() else 0)
    try:
        return _mmap.mmap(-1, n_bytes, flags=_mmap.MAP_PRIVATE | _mmap.MAP_ANONYMOUS | no_reserve)
    except (OSError, ValueError, OverflowError):
        return None


Limited = Literal["AS", "DATA", "NPROC"]
"""What a process may take: addresses, addresses that it may write to, processes and threads of its user."""


def soft_limit(of: Limited) -> int | None:
    """Return the limit of this process (`ulimit`), None if there is none."""
    if (resource := _part("resource")) is None:
        return None
    soft, _ = resource.getrlimit(getattr(resource, f"RLIMIT_{of}"))
    return None if soft == resource.RLIM_INFINITY else soft


def set_soft_limit(of: Limited, most: int | None) -> None:
    """Limit this process, at most to its hard limit; None: to that. On Windows this does nothing."""
    if (resource := _part("resource")) is None:
        return
    kind = getattr(resource, f"RLIMIT_{of}")
    _, hard = resource.getrlimit(kind)
    known = [one for one in (most, None if hard == resource.RLIM_INFINITY else hard) if one is not None]
    resource.setrlimit(kind, (min(known, default=hard), hard))


@contextmanager
def limited_addresses(n_bytes: int) -> Iterator[bool]:
    """Let this process take so many more bytes of addresses within the block; yield whether this system limits them.

    Only Linux does.
    """
    resource, held = _part("resource"), _held_addresses()
    if resource is None or held is None:
        yield False
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    bound = [known for known in (soft, hard) if known != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min([held + n_bytes, *bound]), hard))
    try:
        yield True
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _held_addresses() -> int | None:
    try:
        return int(Path("/proc/self/statm").read_text("ascii").split()[0]) * mmap.PAGESIZE
    except OSError:
        return None


# ---- processors ----


def usable_cpus() -> frozenset[int]:
    """Return the numbers of the logical CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(_os.sched_getaffinity(0))
    bound = _asked_psutil(lambda psutil: psutil.Process().cpu_affinity())  # macOS binds no process
    return frozenset(bound or range(os.cpu_count() or 1))


def can_bind() -> bool:
    """Return whether a process can be bound to CPUs here."""
    return hasattr(os, "sched_setaffinity")


def bind(cpus: Collection[int]) -> None:
    """Bind this process, and what it starts, to these logical CPUs; OSError if that is not possible."""
    if not hasattr(os, "sched_setaffinity"):
        raise _lacking("no process is bound to CPUs")
    _os.sched_setaffinity(0, cpus)


def load() -> float | None:
    """Return how many threads of the machine wanted to run, on average over the last minute; None if unknown."""
    try:
        return _os.getloadavg()[0]
    except (OSError, AttributeError):
        return None


def physical_cores() -> int | None:
    """Return the number of physical cores of the machine, None if unknown."""
    return _asked_psutil(lambda psutil: psutil.cpu_count(logical=False))


# ---- networks ----


def ioctl(handle: int, request: int, about: bytes) -> bytes:
    """Return what Linux answers to a request about an open file."""
    return _part("fcntl").ioctl(handle, request, about)


def addresses_of_interfaces() -> dict[str, str]:
    """Return the addresses of this machine -> the name of their interface; nothing if that is unknown."""
    import socket

    known = _asked_psutil(lambda psutil: psutil.net_if_addrs()) or {}
    return {
        one.address.partition("%")[0]: name
        for name, own in known.items()
        for one in own
        if one.family in (socket.AF_INET, socket.AF_INET6)
    }


# ---- signals ----


def signals(*names: str) -> tuple[signal.Signals, ...]:
    """Return those of the signals that this system has."""
    return tuple(getattr(signal, name) for name in names if hasattr(signal, name))


STOP_SIGNALS = signals("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP", "SIGBREAK")
"""What asks a run to stop. SIGBREAK, of Ctrl-Break, is that of Windows."""


def caught_signals() -> set[int]:
    """Return the signals that have a handler, also one that Python does not know of, as faulthandler's; Linux alone."""
    try:
        lines = Path("/proc/self/status").read_text("utf-8").splitlines()
        mask = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:"))
    except (OSError, StopIteration):
        return set()
    return {number for number in range(1, mask.bit_length() + 1) if mask >> (number - 1) & 1}


def end_by(number: int) -> NoReturn:
    """End this process by a signal, for those who look at how it ended; on Windows by the exit code of shells."""
    if not _is_windows():
        if number not in signals("SIGKILL", "SIGSTOP"):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(128 + number)


class SignalNumbers:
    """The numbers of the signals that this process gets, for a thread that reads them.

    The interpreter's C handler writes them to a pipe, also while the main thread is in a long native call.
    """

    def __init__(self) -> None:
        self._sockets: Any = None
        if hasattr(os, "fork"):
            self._reads, self._writes = os.pipe()
            _os.set_blocking(self._writes, False)
        else:  # Windows waits for sockets only
            import socket

            self._sockets = socket.socketpair()
            self._sockets[1].setblocking(False)
            self._reads, self._writes = (one.fileno() for one in self._sockets)
        signal.set_wakeup_fd(self._writes, warn_on_full_buffer=False)

    def read(self, within_s: float | None = None) -> bytes | None:
        """Wait for numbers, and return them; None if none came in time, b"" once this is closed."""
        if within_s is not None and not select.select([self._reads], [], [], within_s)[0]:
            return None
        if self._sockets is not None:
            return self._sockets[0].recv(64)
        return os.read(self._reads, 64)

    def close(self) -> None:
        """Stop writing numbers: a reader gets b"", and then closes its own end."""
        signal.set_wakeup_fd(-1)
        self._sockets[1].close() if self._sockets is not None else os.close(self._writes)

    def close_reading(self) -> None:
        """Close the end that is read."""
        self._sockets[0].close() if self._sockets is not None else os.close(self._reads)


@contextmanager
def alarms(every_s: float, look: Callable[[int, Any], None]) -> Iterator[bool]:
    """Call `look(number, frame)` in the main thread every so many seconds within the block; yield whether it is.

    `look` may raise. Windows has no timers that interrupt a regular expression.
    """
    if not hasattr(signal, "setitimer"):
        yield False
        return
    before = signal.signal(_signal.SIGALRM, look)
    _signal.setitimer(_signal.ITIMER_REAL, every_s, every_s)
    try:
        yield True
    finally:
        _signal.setitimer(_signal.ITIMER_REAL, 0)
        signal.signal(_signal.SIGALRM, before)


# ---- processes ----


def after_fork(call: Callable[[], None], *, before: Collection[signal.Signals] = ()) -> None:
    """Call this in every child that is forked from now on; systems without a fork have none.

    It is called `before` any of these signals reaches the child, also one that is sent to it at once.
    """
    if not hasattr(os, "register_at_fork"):
        return
    own = threading.local()  # several threads may fork at a time, each with a mask of its own

    def hold() -> None:
        own.mask = _signal.pthread_sigmask(_signal.SIG_BLOCK, before)

    def let_through() -> None:
        _signal.pthread_sigmask(_signal.SIG_SETMASK, own.mask)

    if not before:
        _os.register_at_fork(after_in_child=call)
        return
    _os.register_at_fork(before=hold, after_in_parent=let_through, after_in_child=call)
    _os.register_at_fork(after_in_child=let_through)  # Python runs them in this order


def why_no_fork() -> str | None:
    """Return why no child is forked here that computes; None if it is possible. On macOS its libraries do not bear it.

    https://docs.python.org/3/library/os.html#os.fork
    """
    if is_linux() and hasattr(os, "fork") and hasattr(os, "pidfd_open"):
        return None
    return "a fork that ends with its parent is Linux's"


def dump_no_core() -> None:
    """Leave no core dump when this process ends."""
    if (resource := _part("resource")) is not None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def go_first() -> None:
    """Have the kernel end this process before all others when memory runs out, where it may be asked (Linux)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", "ascii")


_PR_SET_PDEATHSIG = 1


def ending_with(parent: int) -> Callable[[], bool]:
    """Return a call for a child of the process of this number: the kernel then kills the child when that one ends.

    It returns False if the parent has ended already. The kernels of other systems do not end a child. It is made
    before a fork: a child that has just been forked loads nothing.
    """
    if not is_linux():
        return lambda: os.getppid() == parent
    import ctypes

    call, number = ctypes.CDLL(None).prctl, int(_signal.SIGKILL)

    def end_with() -> bool:
        call(_PR_SET_PDEATHSIG, number)
        return os.getppid() == parent

    return end_with


def python(*words: str, program: str | None = None) -> list[str]:
    """Return the command that runs modules and code of whet itself, which come after `-m` or `-c`.

    Without -P, Python would look into the current folder before its own library: a project's `statistics.py` would take
    the place of Python's. If this process looks there too, so does the other: whet may lie in it.
    """
    return [program or sys.executable, *([] if _looks_into_current_folder() else ["-P"]), *words]


def _looks_into_current_folder() -> bool:
    try:
        here = Path.cwd().resolve()
        return any(Path(one).resolve() == here for one in sys.path)
    except OSError:  # the folder is gone
        return False


def start_apart(
    command: Sequence[str], errors: BinaryIO, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a process that the signals of a terminal do not reach, and that ends with this one (Linux).

    Its input is empty, its output goes nowhere, and what it says of errors to the file. `environment` None: that of
    this process.
    """
    import subprocess

    if not hasattr(os, "fork"):
        group = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)
        return subprocess.Popen(  # noqa: S603 - the caller's words
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, env=environment,
            creationflags=group,
        )  # fmt: skip
    ends_with_this = ending_with(os.getpid())
    return subprocess.Popen(  # noqa: S603 - the caller's words
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, env=environment,
        start_new_session=True, preexec_fn=lambda: ends_with_this() or os._exit(1),
    )  # fmt: skip


def kill_apart(child: subprocess.Popen[bytes]) -> None:
    """Kill a process of `start_apart` and what it has started."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            _os.killpg(child.pid, _signal.SIGKILL)
        return
    for one in _asked_psutil(lambda psutil: psutil.Process(child.pid).children(recursive=True)) or ():
        _asked_psutil(lambda _, one=one: one.kill())
    child.kill()


def starter(own: Mapping[str, str]) -> tuple[int, str]:
    """Return the number of the process that started this one, and when that process began; "" if unknown.

    It is the nearest one above this process that lacks one of these variables. A script that does not `exec` its last
    command has them; a process that cannot be read belongs to somebody else.
    """
    number, facts = os.getppid(), list[str]()
    with contextlib.suppress(OSError, IndexError, ValueError):
        while True:
            facts = Path(f"/proc/{number}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
            if number <= 1 or not own or not own.items() <= _environment_of(number).items():
                break
            number, facts = int(facts[1]), []
    return number, facts[_BEGAN] if len(facts) > _BEGAN else ""


_BEGAN = 19
"""Where /proc/PID/stat has the time at which a process began, after its name."""


def _environment_of(number: int) -> dict[str, str]:
    text = Path(f"/proc/{number}/environ").read_bytes().decode("utf-8", "surrogateescape")
    return {name: value for name, _, value in (entry.partition("=") for entry in text.split("\0"))}


def is_running(number: int) -> bool | None:
    """Return whether a process of this machine has this number, None if unknown."""
    if Path("/proc/self").exists():
        return Path(f"/proc/{number}").exists()
    return _asked_psutil(lambda psutil: psutil.pid_exists(number))
