"""A process of Linux that lacks what Windows and macOS lack: `python hidden.py SYSTEM PROGRAM [WORD ...]`.

It stands in for those systems, and is none of them: torch, transformers and Python's own library are those of Linux.
They are imported first, as each has another version for each system, and some of these use what is hidden here. whet is
imported afterwards, and sees:

- nowhere: fcntl, resource, pwd, grp, termios, tty, psutil and msvcrt cannot be imported; os, signal, mmap and socket
  lack what Windows lacks; /proc and /sys are not there;
- win32: the same, with psutil, whose numbers are Linux's, a `msvcrt` that locks bytes of a file by the kernel, and
  sys.platform "win32". A file that this process has open or mapped cannot be removed, renamed or replaced, nor a folder
  that has one, and a rename replaces nothing, and fails the first time, as if a virus scanner had the file open: what
  Windows does and POSIX does not. Lines of text files end with a carriage return. os.kill, which ends the process
  there, and CDLL(None) fail;
- darwin: no CPUs to bind to, no /proc, and sys.platform "darwin".
"""

from __future__ import annotations

import builtins
import ctypes
import errno
import importlib
import io
import mmap
import os
import runpy
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

SYSTEMS = ("nowhere", "win32", "darwin")
_FIRST = (
    "torch", "transformers", "transformers.trainer", "transformers.models.bert.modeling_bert",
    "transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto", "accelerate", "datasets",
    "matplotlib.backends.backend_svg", "matplotlib.font_manager", "rich.console", "rich.progress", "tqdm.auto",
    "huggingface_hub", "pyarrow.parquet", "safetensors.torch", "tokenizers", "filelock", "psutil", "torch.utils.data",
    "torch.distributed", "multiprocessing.reduction", "concurrent.futures", "asyncio", "platform", "subprocess", "uuid",
)  # fmt: skip
MODULES = ("fcntl", "resource", "pwd", "grp", "termios", "tty")
OF_OS = (
    "fork", "forkpty", "register_at_fork", "sched_getaffinity", "sched_setaffinity", "sched_yield", "nice",
    "getpriority", "setpriority", "killpg", "getpgid", "getpgrp", "setsid", "setpgid", "getuid", "geteuid", "getgid",
    "getegid", "getloadavg", "sysconf", "fchmod", "fchown", "chown", "pread", "pwrite", "posix_fallocate", "pidfd_open",
    "set_blocking", "uname", "mkfifo", "wait", "WNOHANG", "waitid", "tcgetpgrp", "O_NOFOLLOW", "O_NONBLOCK",
    "O_CLOEXEC", "O_DIRECTORY", "O_NOCTTY",
)  # fmt: skip
"""Not statvfs and getppid's kind: Python's own library has another version of what uses them."""
OF_SIGNAL = (
    "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGKILL", "SIGPIPE", "SIGALRM", "SIGQUIT", "SIGSTOP", "SIGCHLD", "SIGCONT",
    "SIGTSTP", "SIGTTIN", "SIGTTOU", "setitimer", "getitimer", "ITIMER_REAL", "alarm", "pthread_sigmask", "SIG_BLOCK",
    "SIG_SETMASK", "pidfd_send_signal", "sigwait", "sigtimedwait",
)  # fmt: skip
OF_MMAP = ("MAP_PRIVATE", "MAP_SHARED", "MAP_ANON", "MAP_ANONYMOUS", "MAP_NORESERVE", "PROT_READ", "PROT_WRITE")
OF_DARWIN = (
    "sched_getaffinity", "sched_setaffinity", "posix_fallocate", "pidfd_open", "getresuid", "memfd_create", "sendfile",
)  # fmt: skip


def hide(system: str) -> None:
    """Take from this process what the system lacks."""
    for name in _FIRST:
        importlib.import_module(name)
    names = ("listdir", "readlink", "rename")
    real = SimpleNamespace(text_open=io.open, **{name: getattr(os, name) for name in names})
    if system == "darwin":
        _remove(os, OF_DARWIN)
        _remove(signal, ("pidfd_send_signal", "sigtimedwait"))
    else:
        locking = _locking()
        for name in (*MODULES, *(("psutil",) if system == "nowhere" else ())):
            sys.modules[name] = None  # type: ignore[assignment]
        _remove(os, OF_OS)
        _remove(signal, OF_SIGNAL)
        _remove(mmap, OF_MMAP)
        socket.socketpair = partial(socket.socketpair, socket.AF_UNIX)  # type: ignore[assignment]
        _remove(socket, ("AF_UNIX",))
        if system == "win32":
            sys.modules["msvcrt"] = locking
            signal.SIGBREAK = signal.Signals.SIGUSR2  # type: ignore[attr-defined]
            os.O_BINARY = _BINARY  # type: ignore[attr-defined]
            _keep_open_files(real)
            real.text_open = partial(_open_with_crlf, real.text_open)
            os.kill = partial(_refused, os.kill)  # type: ignore[assignment]
            _require_names_of_libraries()
    _hide_proc(real)
    if system != "nowhere":
        sys.platform = system


_BINARY = 1 << 30
"""A flag that Linux ignores."""


def _remove(module: Any, names: tuple[str, ...]) -> None:
    for name in names:
        if hasattr(module, name):
            delattr(module, name)


def _hide_proc(real: Any) -> None:
    """Let Python's functions find no /proc and no /sys; psutil reads them on, as it stands for another version."""

    def is_hidden(path: Any) -> bool:
        if isinstance(path, int):
            return False
        name = os.fsdecode(path)
        if not name.startswith(("/proc", "/sys/")):
            return False
        return not _is_psutil(sys._getframe(2))

    def without(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any = ".", *given: Any, **named: Any) -> Any:
            if is_hidden(path):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            return function(path, *given, **named)

        return call

    for name in ("open", "stat", "lstat", "scandir", "listdir", "readlink"):
        setattr(os, name, without(getattr(os, name)))
    io.open = builtins.open = without(real.text_open)  # type: ignore[assignment]


def _refused(kill: Callable[[int, int], None], number: int, which: int) -> None:
    assert _is_psutil(sys._getframe(1)), "os.kill would end the process on Windows, whatever the signal"
    kill(number, which)


def _is_psutil(caller: FrameType) -> bool:
    """Return whether psutil calls, which stands for its version for another system."""
    return str(caller.f_globals.get("__name__", "")).startswith("psutil")


def _require_names_of_libraries() -> None:
    load = ctypes.CDLL.__init__

    def load_named(library: Any, name: Any, *given: Any, **named: Any) -> None:
        if name is None:
            raise TypeError("argument of type 'NoneType' is not iterable")
        load(library, name, *given, **named)

    ctypes.CDLL.__init__ = load_named  # type: ignore[method-assign]


def _open_with_crlf(
    open_file: Callable[..., Any], file: Any, mode: str = "r", buffering: int = -1, encoding: Any = None,
    errors: Any = None, newline: Any = None, *more: Any, **named: Any,
) -> Any:  # fmt: skip
    """Open a file; the lines of a text that is written end as on Windows, unless the caller says how."""
    if newline is None and "b" not in mode and set(mode) & set("wax+"):
        newline = "\r\n"
    return open_file(file, mode, buffering, encoding, errors, newline, *more, **named)


def _locking() -> ModuleType:
    """Return a `msvcrt` whose locks are those of the kernel, for an open file as on Windows."""
    import fcntl

    module = ModuleType("msvcrt")

    def locking(handle: int, mode: int, n_bytes: int) -> None:
        assert mode == 2
        writes = fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
        kind = fcntl.F_WRLCK if writes else fcntl.F_RDLCK  # Windows locks what is only read as well
        asked = struct.pack("hhqqi", kind, os.SEEK_CUR, 0, n_bytes, 0)
        try:
            fcntl.fcntl(handle, fcntl.F_OFD_SETLK, asked)
        except OSError as error:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES)) from error

    module.LK_NBLCK, module.locking = 2, locking  # type: ignore[attr-defined]
    return module


def _keep_open_files(real: Any) -> None:
    """Refuse to remove, rename and replace what this process has open or mapped."""

    def own_files() -> Iterator[str]:
        for name in real.listdir("/proc/self/fd"):
            try:
                path = real.readlink(f"/proc/self/fd/{name}")
            except OSError:
                continue
            if path.startswith("/") and not Path(path).is_dir():
                yield path
        with real.text_open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
            for line in file:
                if len(parts := line.split(maxsplit=5)) == 6:
                    yield parts[5].rstrip("\n")

    def require_closed(path: Any, dir_fd: int | None) -> None:
        folder = real.readlink(f"/proc/self/fd/{dir_fd}") if dir_fd is not None else "."
        named = Path(folder, os.fsdecode(path))
        name = str(Path(os.path.realpath(named.parent)) / named.name)
        for one in own_files():
            if one == name or one.startswith(f"{name}/"):
                raise PermissionError(errno.EACCES, f"Windows: this process has {one} open", name)

    scanned: set[str] = set()

    def require_scanned(path: Any) -> None:
        if os.fsdecode(path) not in scanned:
            scanned.add(os.fsdecode(path))
            raise PermissionError(errno.EACCES, "Windows: a virus scanner has it open", str(path))

    def closed(function: Callable[..., Any], n_paths: int) -> Callable[..., Any]:
        def call(*given: Any, dir_fd: int | None = None, **named: Any) -> Any:
            for path in given[:n_paths]:
                require_closed(path, dir_fd)
            if function is real.rename and os.path.lexists(given[1]):
                raise FileExistsError(errno.EEXIST, "Windows: rename replaces nothing", str(given[1]))
            if function is real.rename:
                require_scanned(given[0])
            return function(*given, **named) if dir_fd is None else function(*given, dir_fd=dir_fd, **named)

        return call

    for name, n_paths in (("unlink", 1), ("remove", 1), ("rename", 2), ("replace", 2)):
        setattr(os, name, closed(getattr(os, name), n_paths))


if __name__ == "__main__":
    _, system, program, *_ = sys.argv
    hide(system)
    sys.argv[:] = sys.argv[2:]
    sys.path[0] = str(Path(program).resolve().parent)
    runpy.run_path(program, run_name="__main__")
