"""What only some operating systems have is named in whet/system.py, and in code that only Linux reaches."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest
from hidden import MODULES, OF_DARWIN, OF_MMAP, OF_OS, OF_SIGNAL

ROOT = Path(__file__).resolve().parents[2]
WHET = ROOT / "src" / "whet"
_MODULES = {*MODULES, "pty", "syslog", "crypt", "posix", "nt", "msvcrt", "winreg", "winsound", "_winapi"}
_NAMES = {
    "os": {*OF_OS, *OF_DARWIN, "statvfs", "fdatasync", "sync", "lchown", "mknod", "getsid", "setuid",
           "setgid", "ttyname", "openpty", "confstr", "eventfd", "posix_spawn", "lockf", "startfile", "O_BINARY",
           "O_SYNC", "kill"},
    "signal": {*OF_SIGNAL, "SIGBREAK", "CTRL_C_EVENT", "CTRL_BREAK_EVENT", "siginterrupt", "pause"},
    "mmap": {*OF_MMAP},
    "socket": {"AF_UNIX", "AF_NETLINK", "SO_REUSEPORT", "send_fds", "recv_fds"},
    "time": {"tzset", "pthread_getcpuclockid"},
}  # fmt: skip
"""Module -> its parts that Windows or macOS lacks. What is hidden in a test of other systems is forbidden here.

os.kill of Windows ends a process, whatever the signal."""
_OF_POPEN = {"preexec_fn", "start_new_session", "process_group", "pass_fds", "creationflags", "startupinfo"}
_FOLDERS = ("/proc/", "/sys/", "/dev/")
_LAUNCH = "`require_linux` of launch/run.py comes first"
_ALLOWED: dict[str, tuple[str, set[str]]] = {
    "engine/forked_forecast.py": (
        "`why_no_fork` comes first",
        {"os.fork", "os.nice", "os.pidfd_open", "os.set_blocking", "os.sysconf", "signal.SIGKILL", "signal.SIG_BLOCK",
         "signal.SIG_SETMASK", "signal.pidfd_send_signal", "signal.pthread_sigmask", "CDLL(None)"},
    ),
    "launch/__main__.py": (_LAUNCH, {"os.kill", "signal.SIGKILL"}),
    "launch/elastic.py": (_LAUNCH, {"os.WNOHANG"}),
    "launch/over_ssh.py": (_LAUNCH, {"start_new_session"}),
    "launch/pinning.py": ("`can_bind` comes first", {"os.sysconf"}),
    "launch/rank.py": (
        _LAUNCH,
        {"os.kill", "os.killpg", "signal.SIGHUP", "signal.SIGKILL", "signal.SIG_BLOCK", "signal.pthread_sigmask",
         "signal.sigtimedwait", "preexec_fn", "start_new_session", "/proc/", "CDLL(None)"},
    ),
    "run/script.py": (
        "`require_linux` comes first",
        {"os.O_NOCTTY", "os.getpgrp", "os.kill", "os.tcgetpgrp", "signal.SIGKILL", "signal.SIGPIPE", "signal.SIGSTOP",
         "preexec_fn", "/dev/"},
    ),
    "jobs/trial_processes.py": ("the rule auto_needs_linux comes first", {"socket.AF_UNIX", "start_new_session"}),
    "hardware/network.py": ("asked on Linux", {"/proc/"}),
    "hardware/trim.py": ("asked on Linux", {"CDLL(None)"}),
    "kernels/allocator.py": ("trim.py is asked first", {"CDLL(None)"}),
}  # fmt: skip
"""File -> why another system does not get there, and what its functions may use; nothing runs when it is imported."""
_TEXTS = {"hardware/trim.py", "jobs/places.py", "kubernetes/plan.py", "kubernetes/run.py", "migrate/files.py"}
"""Files with paths of Linux as texts, also of another machine, which are compared or looked for."""


def uses(source: str) -> Iterator[tuple[str, bool]]:
    """Yield what the source uses of one system alone, and whether that happens when it is imported."""
    tree = ast.parse(source)
    later = {id(inner) for node in ast.walk(tree) if isinstance(node, _LATER) for inner in _body(node)}
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    real = _real_names(tree)
    for node in ast.walk(tree):
        for found in _of(node, real, docs):
            yield found, id(node) not in later


_LATER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def _body(function: ast.AST) -> Iterator[ast.AST]:
    body = getattr(function, "body", [])
    for node in body if isinstance(body, list) else [body]:
        yield from ast.walk(node)


def _real_names(tree: ast.AST) -> dict[str, str]:
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {one.asname or one.name: one.name for one in node.names}
    return found


def _of(node: ast.AST, real: dict[str, str], docs: Collection[int]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (f"import {one.name}" for one in node.names if one.name in _MODULES)
    elif isinstance(node, ast.ImportFrom):
        if node.module in _MODULES:
            yield f"import {node.module}"
        yield from (f"{node.module}.{one.name}" for one in node.names if one.name in _NAMES.get(str(node.module), ()))
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        module = real.get(node.value.id, "")
        if node.attr in _NAMES.get(module, ()):
            yield f"{module}.{node.attr}"
    elif isinstance(node, ast.keyword) and node.arg in _OF_POPEN:
        yield str(node.arg)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
        yield from (one for one in _FOLDERS if node.value.startswith(one))
    elif isinstance(node, ast.Compare):
        yield from (f"{one}, compared" for one in _platforms(node, real))
    elif isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("startswith", "endswith"):
            yield from (f"{one}, compared" for one in _platforms(node.func, real))
        first = node.args[0] if node.args else None
        if ast.unparse(node.func).endswith("CDLL") and isinstance(first, ast.Constant) and first.value is None:
            yield "CDLL(None)"


def _platforms(node: ast.AST, real: dict[str, str]) -> Iterator[str]:
    for one in ast.walk(node):
        if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name):
            name = f"{real.get(one.value.id, '')}.{one.attr}"
            if name in ("sys.platform", "os.name"):
                yield name


def _found() -> dict[str, set[tuple[str, bool]]]:
    files = {path.relative_to(WHET).as_posix(): path for path in sorted(WHET.rglob("*.py"))}
    del files["system.py"]
    return {name: found for name, path in files.items() if (found := set(uses(path.read_text("utf-8"))))}


def test_only_system_names_what_some_systems_lack() -> None:
    """Nothing of the kind runs when a module is imported, and functions that use it are behind a refusal."""
    wrong = {}
    for name, found in _found().items():
        allowed = _ALLOWED.get(name, ("", set()))[1]
        texts = set(_FOLDERS) if name in _TEXTS else set()
        if bad := sorted(one for one, at_import in found if one not in texts and (at_import or one not in allowed)):
            wrong[name] = bad
    assert wrong == {}, "ask whet.system"


def test_every_exception_is_in_use() -> None:
    found = {name: {one for one, _ in uses} for name, uses in _found().items()}
    assert {name: allowed - found.get(name, set()) for name, (_, allowed) in _ALLOWED.items()} == {
        name: set() for name in _ALLOWED
    }
    assert [name for name in _TEXTS if not set(_FOLDERS) & found.get(name, set())] == []


@pytest.mark.parametrize(
    ("source", "used"),
    [
        ("import fcntl", ("import fcntl", True)),
        ("def f():\n    import resource", ("import resource", False)),
        ("from os import fork", ("os.fork", True)),
        ("import os as o\ndef f():\n    o.killpg(1, 9)", ("os.killpg", False)),
        ("import signal\nENDING = (signal.SIGHUP,)", ("signal.SIGHUP", True)),
        ("import signal\nf = lambda: signal.SIGALRM", ("signal.SIGALRM", False)),
        ("import os\ndef f(flags=os.O_NOFOLLOW): ...", ("os.O_NOFOLLOW", True)),
        ("import os\nclass A:\n    x = os.O_DIRECTORY", ("os.O_DIRECTORY", True)),
        ("def f():\n    Path('/proc/self/maps')", ("/proc/", False)),
        ("import sys\ndef f():\n    return sys.platform == 'win32'", ("sys.platform, compared", False)),
        ("import sys\ndef f():\n    return sys.platform.startswith('linux')", ("sys.platform, compared", False)),
        ("def f():\n    Popen([], start_new_session=True)", ("start_new_session", False)),
        ("import ctypes\nLIBRARY = ctypes.CDLL(None)", ("CDLL(None)", True)),
    ],
)
def test_the_rule_sees_what_it_forbids(source: str, used: tuple[str, bool]) -> None:
    assert list(uses(source)) == [used]


def test_the_rule_lets_look_alikes_pass() -> None:
    source = '"""/proc/self"""\nimport os, signal, sys\nsignal.SIGINT, os.getpid, os.environ, f"on {sys.platform}"'
    assert list(uses(source)) == []


@pytest.mark.night  # 45 seconds of processor time for each
@pytest.mark.parametrize("system", ["Windows", "Darwin"])
def test_types_hold_on_other_systems(system: str) -> None:
    """As typeshed knows these systems; code that only Linux reaches is left out."""
    words = [
        sys.executable,
        "-m",
        "pyright",
        "--pythonpath",
        sys.executable,
        "--pythonplatform",
        system,
        "--outputjson",
    ]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)
    assert found["summary"]["filesAnalyzed"] > 400
    errors = [one for one in found["generalDiagnostics"] if one["severity"] == "error"]
    named = [(Path(one["file"]).relative_to(WHET).as_posix(), one["message"]) for one in errors]
    assert [one for one in named if one[0] not in _ALLOWED] == []
