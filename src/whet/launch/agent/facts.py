"""What an agent finds on its host before anything starts: versions, plan, addresses, memory, a port."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib import metadata
from typing import Any

from whet.errors import ConfigError, Problem, WhetError
from whet.hardware import cpu, memory, topology
from whet.hardware import network as interfaces
from whet.hardware.rank_plan import RankPlan, plan_ranks
from whet.hardware.topology import Topology
from whet.launch import command, libraries
from whet.launch.agent import network
from whet.launch.libraries import Preload
from whet.version import __version__


@dataclass(frozen=True)
class Prepared:
    """What the ranks of this host will be started with."""

    topology: Topology
    ranks: tuple[RankPlan, ...]
    preload: Preload
    line: list[str]


@dataclass(frozen=True)
class Facts:
    """What the launcher learns of a host."""

    name: str
    """The host's own name for itself."""
    whet: str
    python: str
    torch: str
    """Its version, "" if it is not installed."""
    transformers: str
    command: str
    n_ranks: int
    port: int
    """The port that its listener answers on."""
    addresses: Mapping[str, str]
    """Its addresses -> the interface of each."""
    bits_per_s: Mapping[str, float]
    """Interface -> the speed that it names, of those that name one."""
    ssh: tuple[str, ...]
    """(address of the launcher, address of this host) of the ssh connection; () if there is none."""
    master: tuple[list[str], str]
    """What the name of the master resolves to here, or why it does not."""
    available_bytes: int | None
    problems: list[Problem] = field(default_factory=list)

    def message(self) -> dict[str, Any]:
        """Return the facts in the form of a message."""
        return asdict(self)

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> Facts:
        """Return the facts of a message; another version of whet may send fewer, or others that this one ignores."""
        known = {one.name for one in fields(cls)}
        given = {name: value for name, value in message.items() if name in known}
        problems = [_problem(one) for one in message.get("problems", ())]
        return cls(**{**_UNKNOWN, **given, "ssh": tuple(message.get("ssh", ())), "problems": problems})


_UNKNOWN: Mapping[str, Any] = {
    "name": "", "whet": "", "python": "", "torch": "", "transformers": "", "command": "", "n_ranks": 0,
    "port": 0, "addresses": {}, "bits_per_s": {}, "master": ([], ""), "available_bytes": None,
}  # fmt: skip
"""What is taken for facts that a host does not send."""


def _problem(one: Mapping[str, Any]) -> Problem:
    what, why, fix = (str(one.get(name, "not said")) for name in ("what", "why", "fix"))
    return Problem(what=what, got=one.get("got"), why=why, fix=fix)


class Finder:
    """Finds what can be found, and collects every problem instead of ending at the first."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def attempt(self, find: Callable[[], Any]) -> Any:
        """Return what the function returns, None if it found a problem."""
        try:
            return find()
        except WhetError as error:
            self.problems += error.problems
        except Exception as error:
            self.problems.append(
                Problem(
                    what="this host cannot be prepared",
                    got=f"{type(error).__name__}: {error}",
                    why="the launcher did not expect this",
                    fix="run whet launch --dry_run on this host, which shows where it happens",
                )
            )
        return None


def find(spec: Mapping[str, Any]) -> tuple[Facts, Prepared | None, network.Listener | None]:
    """Return the facts of this host, what its ranks will be started with, and the listener for the other hosts."""
    finder = Finder()
    finder.attempt(lambda: _enter(spec["working_dir"]))
    prepared = finder.attempt(lambda: _prepare(spec))
    listener = finder.attempt(lambda: _listen(spec))
    connection = os.environ.get("SSH_CONNECTION", "").split()
    facts = Facts(
        name=os.uname().nodename,
        whet=__version__,
        python=platform.python_version(),
        torch=_version("torch"),
        transformers=_version("transformers"),
        command=" ".join(prepared.line[1:]) if prepared else "",
        n_ranks=len(prepared.ranks) if prepared else 0,
        port=listener.port if listener else 0,
        addresses=finder.attempt(interfaces.addresses) or {},
        bits_per_s=interfaces.nominal_speeds(),
        ssh=(connection[0], connection[2]) if len(connection) == 4 else (),
        master=interfaces.resolve(spec["master_addr"]) if spec["master_addr"] else ([], ""),
        available_bytes=memory.available_bytes(),
        problems=finder.problems,
    )
    return facts, prepared, listener


def clock() -> float:
    """Return the time of this host's clock."""
    return time.time()


def _enter(folder: str | None) -> None:
    if folder is None:
        return
    try:
        os.chdir(folder)
    except OSError as error:
        raise ConfigError(
            what="the working folder is missing",
            got=f"{folder}: {error.strerror}",
            why="ranks start in the same folder on every host",
            fix="create it or mount it there, or name a folder that all hosts have: --working_dir FOLDER (without it, "
            "the launcher's own)",
        ) from error


def _prepare(spec: Mapping[str, Any]) -> Prepared:
    """Return the plan of this host's ranks, and their command."""
    line = command.command_line(spec["command"], spec["commands"]) if spec["command"] else []
    usable = cpu.usable_cpus()
    own = topology.read(cpus=usable).within(usable)
    ranks = plan_ranks(own, quota_cores=cpu.quota_cores(), n_ranks=spec["n_ranks"], kept_free=spec["kept_free_cores"])
    preload = libraries.choose(spec["memory_allocator"], spec["openmp"])
    return Prepared(own, ranks, preload, line)


def _listen(spec: Mapping[str, Any]) -> network.Listener:
    port = spec["port"]
    try:
        return network.Listener(port, spec["word"], spec["name"])
    except OSError as error:
        raise ConfigError(
            what="the master port is not free",
            got=f"port {port}: {error.strerror}",
            why="the first rank listens on it for all others",
            fix=f"end the program that uses it (ss -ltnp 'sport = :{port}'), or leave --master_port out: "
            "a free port is then chosen",
        ) from error


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
