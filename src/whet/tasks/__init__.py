"""The registry of tasks: what `whet` can train, and the commands that belong to it. A folder of this one is a task.

A task plugs in by being here; nothing else names it. Its `__init__.py` has COMMANDS: each command's name -> what it
does (`Does`) and its line in `whet --help`; this is all that is read of a task that is not used. Its `task.py` has
TASK (`whet.jobs.task.Task`), or TASKS if several share their code, and COMMANDS, the same commands with their options
(`whet.config.command.Command`). That module imports neither torch nor numpy: help texts need it. docs/architecture.md
shows how to add a task.

What a task is made of, and how its run goes, is decided in `whet.jobs`; tasks do not import each other.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from whet.config.command_line import Command
    from whet.jobs.task import Task

Does = Literal["trains", "answers", "demonstrates"]
"""trains: a run of the task, that several ranks can share and a checkpoint resumes. answers: reads a text with a
trained model. demonstrates: trains alone, on data of its own."""


class Entry(NamedTuple):
    """A command of a task."""

    folder: str
    does: Does
    text: str
    """Its line in `whet --help`."""


@cache
def entries() -> Mapping[str, Entry]:
    """Return the commands of all tasks by name, in the order of the folders."""
    found: dict[str, Entry] = {}
    for folder in _folders():
        for name, (does, text) in import_module(f"{__name__}.{folder}").COMMANDS.items():
            assert name not in found, f"two tasks have the command {name}: {found[name].folder} and {folder}"
            found[name] = Entry(folder, does, text)
    return found


def command(name: str) -> "Command":
    """Return one of these commands, with its options."""
    return next(one for one in _plug(entries()[name].folder).COMMANDS if one.name == f"whet {name}")


def tasks() -> "Iterator[Task]":
    """Yield every task."""
    for folder in _folders():
        plug = _plug(folder)
        yield from plug.TASKS if hasattr(plug, "TASKS") else (plug.TASK,)


def _folders() -> list[str]:
    return sorted(one.name for one in iter_modules(__path__) if one.ispkg)


def _plug(folder: str) -> Any:
    return import_module(f"{__name__}.{folder}.task")
