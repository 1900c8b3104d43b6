"""Starts a script that knows nothing of whet, and stays until it ends: the lines before and after it.

The script runs in an interpreter of its own, as `python script.py` would run it: its words, traceback, exit code and
`__main__` are Python's. What reaches into it is PYTHONPATH, which the processes that it starts inherit: Python runs the
`sitecustomize` that is found there. With `WHET_RUN=off` this process becomes the script, and nothing is changed.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from whet import console, json_output
from whet.config import environment
from whet.config.secrets import hidden
from whet.errors import ConfigError, escape_controls
from whet.hardware import cpu, topology
from whet.hardware.openmp import LIMIT_THREADS
from whet.hardware.rank_plan import RankPlan, plan_ranks
from whet.launch.picture import ranges
from whet.launch.rank import prefer_memory_of
from whet.launch.start import Preload, changed_variables, choose_libraries, of_libraries
from whet.run import reports
from whet.run.arguments import RunArguments
from whet.system import bind, dump_no_core, ending_with, require_linux, signals

SWITCH = "WHET_RUN"
"""Environment variable: off runs the script as if whet were not there."""
_SITE = Path(__file__).with_name("site")
_SCRIPT, _BLIND = "cm", "IES"
"""Letters of Python's options: those before the program, and those that keep PYTHONPATH or sitecustomize out."""
_WITH_VALUE = "WX"
_PYTHON = (".py", ".pyw", ".pyc", ".pyz")
_STARTS_RANKS = (
    "torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch", "deepspeed.launcher.runner",
)  # fmt: skip
_UNBOUND = RankPlan(local_rank=0, cores=(), n_threads=1, kept_free=0)
_THREADS = ("OMP_NUM_THREADS", *LIMIT_THREADS)
_MOST_WORDS = 4
_KILLED = 128
"""Shells report a process that a signal ended by this number plus that of the signal."""
_FORWARDED = signals("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
_FROM_TERMINAL = signals("SIGINT", "SIGQUIT")
_SLEEPS_SOON = {"GOMP_SPINCOUNT": "2000"}
"""Idle threads of OpenMP sleep after about 0.1 ms, as in whet's own commands."""


def run_script(asked: RunArguments, commands: Collection[str]) -> int:
    """Run the script to its end and return its exit code; a signal that ended it ends this process as well.

    `commands` are the names of whet's own. Raises ConfigError for what cannot be started.
    """
    require_linux(
        "whet run needs Linux",
        why="it binds the script to cores, ends with it, and passes signals on, through calls of the Linux kernel",
        fix="in the script, call whet.optimize on the model before it trains",
    )
    command = _command(asked.words, commands)
    if environment.value(SWITCH) == "off":
        _require_no_object(command)
        _become(command)
    _require_seeing(command)
    plan = None if _starts_ranks(command) else _plan()
    preload = choose_libraries(asked.memory_allocator, asked.openmp)
    with tempfile.TemporaryDirectory(prefix="whet-run-") as folder:
        variables, notes = _variables(plan, preload, folder)
        for note in notes:
            _say(note)
        _say(_first_line(asked.words, plan, preload))
        code = _started(command, variables, plan)
        found = reports.read(Path(folder))
        json_output.add(started=hidden(command)[0], models=reports.as_json(found))
        _say(reports.line(found, has_whet=not Path(folder, reports.NO_WHET).exists()))
    if code < 0:
        json_output.stop(f"the script was ended by {signal.Signals(-code).name}")
        json_output.finish(_KILLED - code)
        _end_by(signal.Signals(-code))
    return code


def _command(words: Sequence[str], commands: Collection[str]) -> list[str]:
    """Return the words of the process to start."""
    if not words:
        raise ConfigError(
            what="there is nothing to run",
            got="no script",
            why="whet run starts a Python script, a module or another command",
            fix="name it: whet run train.py ..., whet run -m package.train, or whet run -- torchrun train.py",
        )
    first = words[0]
    if first.startswith("-"):
        return [sys.executable, *words]
    path = Path(first)
    if _is_python(path):
        return [sys.executable, *words]
    if shutil.which(first) is not None:
        return list(words)
    if path.exists():
        raise ConfigError(
            what="this is no Python script",
            got=f"{first}, a folder without __main__.py" if path.is_dir() else first,
            why="its name does not end in .py, it is not executable, and it is no program on PATH",
            fix=f"name the program that runs it: whet run -- bash {first}, or whet run -- python {first}",
        )
    own = first in commands
    raise ConfigError(
        what=f"whet {first} is a command of whet" if own else "the script does not exist",
        got=f"whet run {first}" if own else first,
        why="it trains at whet's speed by itself" if own else "it is no file here, and no program on PATH",
        fix=f"leave run out: whet {first} ..." if own else "give its path: whet run folder/train.py ...",
    )


def _is_python(path: Path) -> bool:
    """Return whether Python runs this file or folder: a script, a file of modules, or one that names Python itself."""
    if path.is_dir():
        return (path / "__main__.py").is_file()
    if not path.is_file() or path.suffix in _PYTHON:
        return path.is_file()
    if os.access(path, os.X_OK):  # it says itself what runs it
        return False
    with path.open("rb") as file:
        line = file.readline(200)
    return line.startswith(b"#!") and b"python" in line


def _program(command: Sequence[str]) -> tuple[Sequence[str], str | None]:
    """Return the options of Python in the command, and the script, module or text that it runs; None: no Python."""
    name = Path(command[0]).name
    if command[0] != sys.executable and not name.startswith(("python", "pypy")):
        return (), None
    at = 1
    while at < len(command) and command[at].startswith("-") and command[at] != "-":
        word = command[at]
        letters = "" if word.startswith("--") else word[1:]
        last = next((n for n, letter in enumerate(letters) if letter in _WITH_VALUE + _SCRIPT), None)
        if last is None:
            at += 1
            continue
        value = letters[last + 1 :] or (command[at + 1] if at + 1 < len(command) else "")
        if letters[last] in _SCRIPT:
            return [*command[1:at], f"-{letters[: last + 1]}"], value
        at += 1 if letters[last + 1 :] else 2
    return command[1:at], command[at] if at < len(command) else ""


def _require_seeing(command: Sequence[str]) -> None:
    """Refuse options of Python with which nothing from outside reaches the script."""
    options, program = _program(command)
    if program is None:
        return
    blind = [
        letter
        for word in options
        if word.startswith("-") and not word.startswith(("--", "-W", "-X"))
        for letter in word[1:]
        if letter in _BLIND
    ]
    if blind:
        raise ConfigError(
            what=f"python -{blind[0]} keeps whet out of the script",
            got=shlex.join(hidden(command)[0]),
            why="whet run reaches it through PYTHONPATH and sitecustomize, which this option leaves out",
            fix=f"leave -{blind[0]} out, or run the script without whet",
        )


def _starts_ranks(command: Sequence[str]) -> bool:
    """Return whether the command may start several processes that train: it then deals out the cores."""
    _, program = _program(command)
    return program is None or program in _STARTS_RANKS


def _plan() -> RankPlan:
    """Return the cores of a script that trains alone: all that this process may use."""
    usable = cpu.usable_cpus()
    own = topology.read(cpus=usable).within(usable)
    return plan_ranks(own, quota_cores=cpu.quota_cores(), n_ranks=1)[0]


def _variables(plan: RankPlan | None, preload: Preload, folder: str) -> tuple[dict[str, str], list[str]]:
    """Return the environment of the script, and a note for each of the user's variables that had to give way."""
    given = dict(os.environ)
    found, notes = changed_variables(given, plan or _UNBOUND, preload, alone=True, interface=None)
    if plan is None:
        found, notes = of_libraries(given, preload), list(preload.notes)
    elif own := {name for name in _THREADS if name in given}:  # the script keeps the threads that its user has set
        found = {name: value for name, value in found.items() if name not in _THREADS}
        notes = [note for note in notes if note.partition("=")[0] not in own]
    if not {"OMP_WAIT_POLICY", *_SLEEPS_SOON} & given.keys():
        found |= _SLEEPS_SOON
    before = given.get("PYTHONPATH")
    found["PYTHONPATH"] = f"{_SITE}{os.pathsep}{before}" if before else str(_SITE)
    found[environment.RUN_REPORTS] = folder
    return {name: value for name, value in {**given, **found}.items() if value is not None}, notes


def _first_line(words: Sequence[str], plan: RankPlan | None, preload: Preload) -> str:
    shown = escape_controls(shlex.join(hidden(words)[0][:_MOST_WORDS])) + (" ..." if len(words) > _MOST_WORDS else "")
    cores = "" if plan is None else f" on CPUs {ranges(plan.cpus)}"
    loaded = ", ".join(Path(name).name for name in preload.every)
    return (
        f"{shown} runs unmodified{cores}{f', with {loaded} preloaded' if loaded else ''}; after two steps, its models "
        f"run without padding ({SWITCH}=off: as if whet were not there)"
    )


def _started(command: Sequence[str], variables: Mapping[str, str], plan: RankPlan | None) -> int:
    """Run the command; return its exit code, or the negative number of the signal that ended it."""
    ends_with_this = ending_with(os.getpid())

    def before_exec() -> None:
        if plan is not None:
            bind(plan.cpus)
            prefer_memory_of(plan.nodes)
        if not ends_with_this():
            os._exit(1)

    try:
        child = subprocess.Popen(command, env=variables, preexec_fn=before_exec)  # noqa: S603 (the user's command)
    except OSError as error:
        raise _unstartable(command, error) from error

    def forward(number: int, _: FrameType | None) -> None:
        if number not in _FROM_TERMINAL or not _in_foreground():  # the terminal sends these to the script as well
            child.send_signal(number)

    for number in (*_FORWARDED, *_FROM_TERMINAL):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, forward)
    return child.wait()


def _in_foreground() -> bool:
    """Return whether this process is in the foreground of a terminal."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def _say(text: str) -> None:
    """Print a line of whet's own, apart from what the script prints; a terminal gets it folded between words."""
    text = f"whet run: {text}"
    if console.is_terminal(sys.stderr):
        text = textwrap.fill(text, max(console.width(), 40), subsequent_indent="  ", break_long_words=False)
    print(text, file=sys.stderr, flush=True)


def _require_no_object(command: Sequence[str]) -> None:
    if json_output.is_wanted():
        raise ConfigError(
            what=f"{SWITCH}=off leaves nobody to print the object of --json",
            got=shlex.join(hidden(command)[0]),
            why="this process becomes the script, as if whet were not there",
            fix=f"leave --json out, or {SWITCH}",
        )


def _become(command: Sequence[str]) -> NoReturn:
    """Replace this process by the script, with the variables, cores and signals that it would have without whet."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execvp(command[0], list(command))  # noqa: S606 (the user's command, without a shell)
    except OSError as error:
        raise _unstartable(command, error) from error


def _end_by(number: signal.Signals) -> NoReturn:
    """End this process as the script ended, for those who look at how: a shell, a scheduler."""
    dump_no_core()
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    sys.exit(_KILLED + number)


def _unstartable(command: Sequence[str], error: OSError) -> ConfigError:
    return ConfigError(
        what=f"{command[0]} cannot be started",
        got=error.strerror,
        why="the system refused to run it",
        fix="check that it is a program for this machine, or a script whose first line names one",
    )
