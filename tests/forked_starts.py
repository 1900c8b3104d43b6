"""Python processes of tests that begin at once: forked from one process that has imported torch, transformers and whet.

A test writes `subprocess.run([sys.executable, "-m", "whet", ...])` as ever. Once `install` was called, such a start is
handed to a server: a process that has imported everything heavy and waits. It forks a child that becomes the program:
words, folder, environment, streams, session and limits are those that were asked for, and then the program runs as
`__main__`. The child is a real process and a child of the one that asked, so signals, exit codes, process groups and
`wait` are the kernel's. Only the imports, three to five seconds of processor time, are not repeated.

What a fork would not show is started as ever: another interpreter or options of it, a variable that differs from the
server's and is not in `_HARMLESS` (imports read many: OMP_NUM_THREADS, HF_HOME), a folder that would shadow an imported
module, other limits, cores or rights, and tests marked `true_start`, which are about the start itself: what it imports,
how long it takes, what it prints or allocates.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import pkgutil
import resource
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

_HARMLESS = {
    "PATH", "PWD", "OLDPWD", "SHLVL", "_", "PYTHONPATH", "TERM", "COLUMNS", "LINES", "KUBECONFIG", "PIP_NO_INDEX",
    "TOKENIZERS_PARALLELISM", "TENSORBOARD_LOGGING_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR",
    "CUBLAS_WORKSPACE_CONFIG", "CUDA_MODULE_LOADING", "KMP_INIT_AT_FORK", "KMP_DUPLICATE_LIB_OK",
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "ROLE_RANK",
}  # fmt: skip
_HARMLESS_PREFIXES = ("PYTEST_", "TORCHELASTIC_", "WHET_")
"""Variables that no import reads, those among them that libraries set while tests run; whet reads its own when it needs
them. Others that differ ask for a true start."""
_HEAVY = (
    "datasets", "torch._dynamo", "torch.distributed", "torch.utils.data", "transformers.trainer",
    "transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto",
    "transformers.models.bert.modeling_bert", "transformers.models.bert.tokenization_bert",
    "transformers.models.llama.modeling_llama",
)  # fmt: skip
_ROOMS = ("whet", "whet.cli", "whet.tasks", "whet.jobs")
"""All modules of these rooms are imported, and so what they import."""
_LIGHT = ("doctor", "k8s", "launch")
"""Commands of whet that import little: there is nothing to save. pytest has to import modules before they are used."""
_LARGEST = 100_000
_LIMITS = tuple(getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_"))
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of linux/prctl.h

Job = dict[str, Any]


class Starts:
    """The server of this process, made when it is first needed, and whether starts are forked."""

    def __init__(self) -> None:
        self.forked = False
        self.n_forked = 0
        self._true_start = subprocess.Popen._execute_child  # type: ignore[attr-defined]
        self._lock = threading.Lock()
        self._server: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        self._modules: set[str] = set()
        self._base: set[str] = set()
        self._environment: dict[str, str] = {}
        self._limits: list[Any] = []
        self._libc = ctypes.CDLL(None)

    def install(self) -> None:
        """Let subprocess ask this object for each child. What differs from now (variables, limits) is not forked."""
        starts = self
        self._environment, self._limits = dict(os.environ), _limits()

        def execute_child(process: Any, *given: Any) -> None:
            starts.start(process, given)

        subprocess.Popen._execute_child = execute_child  # type: ignore[attr-defined]

    def start(self, process: Any, given: tuple[Any, ...]) -> None:
        """Start the child of a Popen: what its own `_execute_child` does."""
        job = self._job(given) if self.forked else None
        if job is None:
            self._true_start(process, *given)
            return
        self.n_forked += 1
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = given[10:16]
        streams = [asked if asked != -1 else own for own, asked in enumerate((p2cread, c2pwrite, errwrite))]
        with self._lock:
            process.pid = self._fork(job, streams)
        process._child_created = True
        process._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    def close(self) -> None:
        """End the server. What it has forked are children of this process, and stay."""
        if self._server is not None and self._line is not None:
            self._line.close()
            self._server.wait(30)
            self._server = self._line = None

    def _job(self, given: tuple[Any, ...]) -> Job | None:
        """Return what the server needs to know, or None if only a true start is the same."""
        args, executable, before_exec, close_fds, pass_fds, cwd, env, _, _, shell = given[:10]
        restore_signals, gid, gids, uid, umask, new_session, process_group = given[16:]
        plain = executable is None and before_exec is None and close_fds and not pass_fds and not shell
        own_rights = (gid, gids, uid, umask) == (None, None, None, -1)
        if not (plain and own_rights and restore_signals and is_python(args)):
            return None
        words, options = _program(args), [os.fsdecode(word) for word in args][1 : len(args) - len(_program(args))]
        folder = os.path.abspath(os.fsdecode(cwd or "."))  # noqa: PTH100
        variables = os.environ if env is None else env
        environment = {os.fsdecode(name): os.fsdecode(value) for name, value in variables.items()}
        if not os.access(folder, os.X_OK):
            return None
        same = _decisive(environment) == _decisive(self._environment) and _limits() == self._limits
        if not same:
            return None
        with self._lock:
            self._serve()
        first = _first_folder(words, folder)
        firsts = [] if first is None or "-P" in options else [first]
        paths = [os.path.join(folder, one) for one in environment.get("PYTHONPATH", "").split(os.pathsep) if one]  # noqa: PTH118
        if first is None or any(map(self._shadows, [*(one or folder for one in firsts), *paths])):
            return None
        job = {
            "words": words, "folder": folder, "environment": environment, "paths": [*firsts, *paths],
            "options": options, "parent": os.getpid(),
            "session": new_session, "group": process_group, "umask": _umask(),
        }  # fmt: skip
        return job if len(json.dumps(job)) < _LARGEST else None

    def _shadows(self, folder: str) -> bool:
        """Return whether a module of the folder would be imported in place of one that the server has imported."""
        if folder in self._base:
            return False
        try:
            names = os.listdir(folder)  # noqa: PTH208
        except OSError:
            return False
        shadows = {name.removesuffix(".py") for name in names if name.endswith(".py")} & self._modules
        # a folder without __init__.py, such as the built `site` of the docs, comes after every module of that name
        packages = (os.path.join(folder, name, "__init__.py") for name in names if name in self._modules)  # noqa: PTH118
        return bool(shadows) or any(map(os.path.exists, packages))

    def _fork(self, job: Job, streams: list[int]) -> int:
        """Return the process that the server has forked, a child of this one."""
        assert self._line is not None
        self._libc.prctl(_SUBREAPER, 1)
        try:
            socket.send_fds(self._line, [json.dumps(job).encode()], streams)
            return int(self._line.recv(100))
        finally:
            self._libc.prctl(_SUBREAPER, 0)

    def _serve(self) -> None:
        if self._server is not None:
            return
        self._line, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * _LARGEST)
        words = [sys.executable, __file__, str(end.fileno())]
        forked, self.forked = self.forked, False
        log = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._server = subprocess.Popen(
                words, env=self._environment, pass_fds=[end.fileno()],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log,
            )  # fmt: skip
        finally:
            self.forked = forked
        end.close()
        facts = b""
        while not facts.endswith(b"\n"):
            part = self._line.recv(1 << 16)
            if not part:
                log.seek(0)
                raise AssertionError(f"the server of forked starts did not start: {log.read().decode()}")
            facts += part
        log.close()
        known = json.loads(facts)
        own = [os.path.abspath(one) for one in self._environment.get("PYTHONPATH", "").split(os.pathsep) if one]  # noqa: PTH100
        self._modules, self._base = set(known["modules"]) | {"sitecustomize", "usercustomize"}, {*known["base"], *own}


STARTS = Starts()
"""What `subprocess` of this process asks, once it is installed."""


def is_python(args: Any) -> bool:
    """Return whether the command is this interpreter with a program that may be heavy, without options of its own."""
    if isinstance(args, str | bytes | os.PathLike) or len(args) < 2 or os.fsdecode(args[0]) != sys.executable:
        return False
    words = _program(args)[:3]
    if words[:2] == ["-m", "pytest"] or (words[:2] == ["-m", "whet"] and words[2:] and words[2] in _LIGHT):
        return False
    return (words[:1] in (["-c"], ["-m"]) and len(words) > 1) or "".join(words[:1]).endswith(".py")


def _program(args: Any) -> list[str]:
    """Return the words after the interpreter and `-W ignore` or `-P`, the options of it that a fork can take on."""
    words = [os.fsdecode(word) for word in args][1:]
    words = words[2:] if words[:2] == ["-W", "ignore"] else words
    return words[1:] if words[:1] == ["-P"] else words


def _first_folder(words: Sequence[str], folder: str) -> str | None:
    """Return the first entry of the program's sys.path; None if there is no such script."""
    if words[0] == "-c":
        return ""
    if words[0] == "-m":
        return folder
    script = Path(folder, words[0])
    return str(script.resolve().parent) if script.is_file() else None


def _decisive(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name not in _HARMLESS and not name.startswith(_HARMLESS_PREFIXES)
    }


def _limits() -> list[Any]:
    """Return what a child inherits and cannot be given later: limits, cores, priority, rights."""
    own = [resource.getrlimit(one) for one in _LIMITS]
    return [*own, sorted(os.sched_getaffinity(0)), os.getpriority(os.PRIO_PROCESS, 0), os.getresuid(), os.getresgid()]


def _umask() -> int:
    """Return the umask of this process; os.umask would change it for a moment."""
    lines = Path("/proc/self/status").read_text("ascii", errors="replace").splitlines()
    return next(int(line.split()[1], 8) for line in lines if line.startswith("Umask:"))


# What follows runs in the server and in what it forks.


def _import_everything() -> int:
    """Return how many threads there are of which a child takes care itself: OpenBLAS starts its own again."""
    for name in ("numpy", "scipy.linalg"):
        importlib.import_module(name)
    n_of_blas = len(_threads())
    for name in _HEAVY:
        importlib.import_module(name)
    for room in _ROOMS:
        module = importlib.import_module(room)
        if room != "whet":
            for one in pkgutil.walk_packages(module.__path__, f"{room}."):
                importlib.import_module(one.name)
    return n_of_blas


def _threads() -> list[str]:
    """Return the names of the threads of this process, but the one that pyarrow's allocator starts again itself."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if name != "jemalloc_bg_thd"]


def _base_path() -> list[str]:
    """Return sys.path as it is without a program and without PYTHONPATH."""
    given = {os.path.abspath(one) for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one}  # noqa: PTH100
    return [one for one in sys.path[1:] if one not in given]


def serve(line: socket.socket) -> Job | None:
    """Fork a child for each job. Return None at the end in the server, and in a child its job."""
    base = _base_path()
    del sys.path[0]  # other programs must not find what lies next to this file
    n_of_blas = _import_everything()
    if lost := _threads()[n_of_blas:]:
        raise AssertionError(f"the imports started threads, {lost}: a child would wait for those that it lacks")
    gc.collect()
    gc.freeze()
    facts = json.dumps({"modules": sorted({name.partition(".")[0] for name in sys.modules}), "base": base}).encode()
    for at in range(0, len(facts), 1 << 15):
        line.send(facts[at : at + (1 << 15)])
    line.send(b"\n")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the tests, and with them this process
    while True:
        told, streams, _, _ = socket.recv_fds(line, 4 * _LARGEST, 3)
        if not told:
            return None
        job: Job = json.loads(told)
        reading, writing = os.pipe()
        between = os.fork()
        if between == 0:
            if os.fork():
                os._exit(0)
            line.close()
            os.close(reading)
            _become(job, streams, base)
            os.write(writing, str(os.getpid()).encode())  # whoever asked may use its session from now on
            os.close(writing)
            return job
        os.close(writing)
        os.waitpid(between, 0)  # the child is then one of the process that asked
        line.send(os.read(reading, 100))
        for end in (reading, *streams):
            os.close(end)


def _become(job: Job, streams: Sequence[int], base: Sequence[str]) -> None:
    """Take on what the job says about this process: all but the program itself."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    give_up = time.monotonic() + 10
    while os.getppid() != job["parent"]:
        assert time.monotonic() < give_up, "the process that asked for this one has ended"
        time.sleep(0.0002)
    if job["session"]:
        os.setsid()
    if job["group"] != -1:
        os.setpgid(0, job["group"])
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    for stream in streams:
        os.close(stream)
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    os.umask(job["umask"])
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(job["environment"])
    sys.path[:] = dict.fromkeys([*job["paths"], *base])
    importlib.invalidate_caches()


def _run(job: Job) -> None:
    """Run the program as the interpreter does."""
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    kind, *rest = job["words"]
    if "-W" in job["options"]:
        sys.warnoptions.append("ignore")
        warnings.simplefilter("ignore")
    sys.orig_argv[:] = [sys.executable, *job["options"], *job["words"]]
    if kind == "-m":
        sys.argv[:] = ["-m", *rest[1:]]
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
    elif kind == "-c":
        sys.argv[:] = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv[:] = [kind, *rest]
        main.__file__, main.__loader__ = kind, SourceFileLoader("__main__", kind)
        exec(compile(Path(kind).read_bytes(), kind, "exec"), main.__dict__)


def _end(job: Job) -> NoReturn:
    """Run the program and end as the interpreter does, but for freeing a million objects one by one."""
    code: Any = 0
    try:
        _run(job)
    except SystemExit as end:
        code = end.code
        if not isinstance(code, int | None):
            print(code, file=sys.stderr)
            code = 1
    except BaseException as error:
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except ValueError:  # the program has closed one of them
        pass
    except OSError:
        sys.exit(code)  # the interpreter reports it
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit((code or 0) & 0xFF)


if __name__ == "__main__":
    if (given := serve(socket.socket(fileno=int(sys.argv[1])))) is not None:
        _end(given)
