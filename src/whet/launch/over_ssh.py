"""`whet launch` on several hosts over the system's ssh: check all of them, start each, and end all together.

The user names the hosts (`--hosts h1:2,h2`) or an MPI hostfile. Each is asked by `whet doctor --json` for its software,
then to plan its ranks; all problems of all hosts are raised at once. Then `whet launch` runs on each (`__main__.py`),
and they meet at the first host. This module passes signals on, shows what hosts print, and stops all hosts when one
fails or is lost.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import IO, Any

from whet import json_output, system
from whet.config.environment import LAUNCH
from whet.config.secrets import hidden
from whet.console import duration, plural
from whet.errors import EXIT_BAD_CONFIG, EXIT_IO, EXIT_OK, EXIT_STOPPED_AND_SAVED, ConfigError, Problem
from whet.hardware import network
from whet.launch.arguments import HostsArguments, LaunchArguments
from whet.launch.rank import ENDING, NOT_STARTED_AGAIN, SAVE_S, STOP_S, blame, handled, say
from whet.launch.run import require_startable
from whet.version import DISTRIBUTION, __version__

_NAME = re.compile(r"(?:[\w.-]+@)?(?:\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\]|[\w.-]+)")
_SLOT_KEYS = ("slots", "cpu")
"""Open MPI's and older LAM's word for the ranks of a host."""
_MOST_KEYS = ("max_slots", "max-slots", "maxslots")
"""Open MPI's word for the ranks that a host gets at most, where more are started than there are slots."""
_EQUALS = re.compile(r"\s*=\s*")
_WHY = {
    "ifname": "whet chooses the interface of every host that leads to the first one; leave ifname out, and add "
    "--master_addr with the first host's address on the network that ranks are to use",
}
"""Key of a hostfile that whet does not honour -> why, and what to do instead."""


@dataclass(frozen=True)
class Host:
    """A host that ranks run on."""

    name: str
    """As ssh takes it: an address, a name, an alias of ~/.ssh/config, with user@ if need be."""
    slots: int | None
    """Its ranks; None: as many as its own topology suggests."""


def hosts_of_option(text: str) -> list[Host]:
    """Return the hosts of `h1[:slots],h2[:slots]`; raises ConfigError."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    return _joined([_entry([word], f"--hosts {text}") for word in words], f"--hosts {text}")


def hosts_of_file(path: Path) -> list[Host]:
    """Return the hosts of a hostfile: `host`, `host slots=N` or `host:N` on each line, # starts a comment."""
    try:
        lines = path.read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            what="the hostfile cannot be read",
            got=f"--hostfile {path}: {error}",
            why="its lines name the hosts that ranks run on",
            fix="write one host on each line, such as: node1 slots=2; or name the hosts: --hosts node1,node2",
        ) from error
    plain = (_EQUALS.sub("=", line.partition("#")[0]) for line in lines)
    numbered = [(number, line.split()) for number, line in enumerate(plain, start=1)]
    return _joined([_entry(words, f"{path}, line {number}") for number, words in numbered if words], f"{path}")


def _entry(words: list[str], source: str) -> Host | Problem:
    """Return the host that the words of one entry name, or what is wrong with them."""
    name, slots = _split(words[0])
    most: str | None = None
    for word in words[1:]:
        key, _, value = word.partition("=")
        if key in _SLOT_KEYS and slots is None:
            slots = value
        elif key in _MOST_KEYS and most is None:
            most = value
        else:
            twice = key in (*_SLOT_KEYS, *_MOST_KEYS)
            why = "the number of ranks of a host is given once" if twice else "after a host only slots=N is understood"
            return _bad(source, word, _WHY.get(key, why))
    if not _NAME.fullmatch(name) or name.startswith("-"):
        return _bad(source, name, "this is not the name or address of a host")
    for number in (slots, most):
        if number is not None and not _is_count(number):
            return _bad(source, number, "the number of ranks of a host is a whole number from 1")
    if most is not None and (slots is None or int(slots) > int(most)):
        why = "a host gets as many ranks as it has slots, and max_slots must allow them"
        return _bad(source, f"max_slots={most}, {f'slots={slots}' if slots else 'without slots=N'}", why)
    return Host(name.replace("[", "").replace("]", ""), None if slots is None else int(slots))


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and int(text) > 0


def _split(word: str) -> tuple[str, str | None]:
    """Return name and slots of `name:slots`; an IPv6 address has slots only after its brackets."""
    name, colon, slots = word.rpartition(":")
    if not colon or (":" in name and not name.endswith("]")):
        user, at, address = word.rpartition("@")
        return (f"{user}{at}[{address}]" if word.count(":") > 1 and "[" not in word else word), None
    return name, slots


def _bad(source: str, got: str, why: str) -> Problem:
    return Problem(
        what=f"a host is not understood ({source})",
        got=got,
        why=why,
        fix="name hosts as node1, node1:2 or user@node1 in --hosts node1:2,node2; a hostfile also has node1 slots=2",
    )


def _joined(entries: Iterable[Host | Problem], source: str) -> list[Host]:
    """Return each host once; one that is named again gets the ranks of all its entries, as with MPI."""
    entries = list(entries)
    if problems := [entry for entry in entries if isinstance(entry, Problem)]:
        raise ConfigError.of(problems)
    hosts = [entry for entry in entries if isinstance(entry, Host)]
    if not hosts:
        raise ConfigError.of([_bad(source, "no host", "ranks need a host to run on")])
    found: dict[str, list[Host]] = {}
    for host in hosts:
        found.setdefault(host.name, []).append(host)
    return [
        every[0] if len(every) == 1 else Host(name, sum(host.slots or 1 for host in every))
        for name, every in found.items()
    ]


MARK, BEAT = b"whet-launch: ", b"\0"
"""What a host's line of facts begins with, and the byte that is a sign of life."""
_NODE = ("-m", "whet.launch")
_DOCTOR = ("-m", "whet", "doctor", "--json", "--no_measure")
_ASKS = 'printf \'\\n%s %s %s %s\\n\' {mark} "$(uname -n)" "$(cat /proc/sys/kernel/random/boot_id)" "$SSH_CONNECTION"; '
_HOST_MARK = "whet-host:"
_JOINS_S = 60.0
"""How long the launchers of the hosts wait for each other; they are started at the same time."""
_PLANS_S = 60.0
_EVERY_S = 0.05
_LEAVES_S = STOP_S + 3.0
_RETURNS_S, _ASKS_AGAIN_S = 300.0, 5.0
"""How long a restart waits for hosts that were lost, and how often it asks them."""
_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
_SSH_PORT = "22"
_RESOLVES_S = 2.0
_OPTIONS = ("-T", "-oBatchMode=yes", "-oControlPath=none")
"""No questions, no terminal, and a connection of our own: a shared one outlives its users."""
_CAUSES = (
    ("Permission denied", "ssh asks for a password, or does not accept the key",
     "let the key in once: ssh-copy-id {host}; an encrypted key needs a running ssh-agent"),
    ("Host key verification failed", "ssh does not know this host's key",
     "check and accept it once: ssh {host} true"),
    ("Could not resolve hostname", "this machine does not know the name",
     "correct the name, or give the host's address: a Host entry in ~/.ssh/config, or a line in /etc/hosts"),
    ("Connection refused", "nothing listens on the ssh port of the host",
     "start sshd there (systemctl start ssh), or set its Port in ~/.ssh/config"),
    ("timed out", "the host does not answer",
     "check that it is on, and that no firewall drops ssh: ssh -v {host} true"),
    ("No route to host", "no network leads to the host",
     "check that it is on, and its address: ssh -v {host} true"),
    ("Network is unreachable", "no network leads to the host",
     "check the routes of this machine: ip route; then: ssh -v {host} true"),
    ("No module named", "whet is not installed for the Python that is started there",
     f"install the same whet there (pip install {DISTRIBUTION}), or name the Python that has it with --python"),
    ("not found", "the Python of this launcher does not exist there",
     "name the Python of the hosts with --python PATH"),
    ("No such file", "the Python of this launcher does not exist there",
     "name the Python of the hosts with --python PATH"),
)  # fmt: skip
"""A part of what ssh or the remote shell says -> what it means, and the fix."""


@dataclass(frozen=True)
class Orders:
    """What a host is to do."""

    launch: dict[str, Any]
    """Its `LaunchArguments`."""
    hosts: dict[str, Any]
    """Its `HostsArguments`: its number, and where the nodes meet."""
    working_dir: str
    variables: dict[str, str]
    commands: Sequence[str]
    ranked: Sequence[str]
    silence_s: float
    """How long the launcher may be silent before the ranks are stopped."""
    first_rank: int | None = 0
    n_restarts: int = 0
    max_restarts: int = 0
    """How often all hosts were started before, and how often they may be."""


@dataclass(frozen=True)
class _Found:
    """What a host says of itself."""

    host: Host
    machine: tuple[str, ...]
    """What tells it from other machines."""
    connection: tuple[str, ...]
    """Addresses and ports of the ssh connection: the launcher's, the host's; () without ssh."""
    software: Mapping[str, Any]


@dataclass(frozen=True)
class _Failure:
    """A rank that failed, or a host that was lost."""

    code: int
    who: str
    at: float
    by_itself: bool = True


@dataclass
class _Running:
    """A host on which the ranks run."""

    host: Host
    process: subprocess.Popen[bytes]
    readers: list[threading.Thread]
    facts: list[Mapping[str, Any]]
    """What it says in marked lines."""
    said: list[bytes]
    """Its last lines."""
    code: int | None = None

    def send(self, data: bytes) -> None:
        """Send bytes to its standard input; b"" closes it, and its ranks are stopped."""
        assert self.process.stdin is not None
        with suppress(OSError, ValueError):  # it has ended, or was closed before
            self.process.stdin.write(data)
            self.process.stdin.flush()
            if not data:
                self.process.stdin.close()


@dataclass(frozen=True)
class _Job:
    """What is launched, and how the hosts are reached."""

    asked: LaunchArguments
    several: HostsArguments
    commands: Collection[str]
    ranked: Collection[str]
    hosts: Sequence[Host]
    variables: Mapping[str, str]
    folder: str

    @property
    def python(self) -> str:
        """The Python of the hosts."""
        return self.several.python or sys.executable

    def command(self, host: Host, words: Sequence[str], before: str = "") -> list[str]:
        """Return the command that runs Python there; without ssh if the host is this machine."""
        script = f"{before}exec {shlex.join(system.python(*words, program=self.python))}"
        if is_this_machine(host.name, self.several.ssh_command):
            return ["sh", "-c", script]
        # the user's own shell there may be any
        return [*remote(self.several), host.name, f"sh -c {shlex.quote(script)}" if before else script]

    def orders(self, number: int, master: str, port: int | None, **more: Any) -> Orders:
        """Return what the host of this number is to do."""
        host = self.hosts[number]
        asked = self.asked if host.slots is None else replace(self.asked, nproc_per_node=str(host.slots))
        dry_run = more.pop("dry_run", False)
        place = HostsArguments(
            nnodes=len(self.hosts), node_rank=number, master_addr=master or None, master_port=port,
            join_timeout_s=_JOINS_S if len(self.hosts) > 1 else self.several.join_timeout_s,
        )  # fmt: skip
        return Orders(
            launch=asdict(replace(asked, dry_run=dry_run)), hosts=asdict(place), working_dir=self.folder,
            variables=dict(self.variables), commands=list(self.commands), ranked=list(self.ranked),
            silence_s=self.several.heartbeat_timeout_s, **more,
        )  # fmt: skip


def run_on_hosts(
    asked: LaunchArguments, several: HostsArguments, commands: Collection[str], ranked: Collection[str]
) -> int:
    """Run the command on all hosts; return the exit code of the first rank that failed, or 0."""
    require_startable(asked, several, commands, ranked)
    found = hosts_of_option(several.hosts) if several.hosts else hosts_of_file(Path(several.hostfile or ""))
    shared = {LAUNCH: os.environ.get(LAUNCH) or uuid.uuid4().hex, **variables(several.env)}
    job = _Job(asked, several, commands, ranked, found, shared, several.working_dir or working_folder())
    code = EXIT_OK
    for attempt in range(asked.max_restarts + 1):
        try:
            master, plans = _prepared(job, within_s=_RETURNS_S if attempt else 0.0)
        except ConfigError as error:
            if not attempt:
                raise
            say(f"the hosts did not come back within {duration(_RETURNS_S)}: {_in_short(error)}")
            if attempt < asked.max_restarts:
                say(f"restart {attempt + 1} of {asked.max_restarts}, on all hosts")
            continue
        port = several.master_port or int(plans[0]["port"])
        n_ranks = sum(int(plan["n_ranks"]) for plan in plans)
        if not attempt:
            where = f", master {master} port {port}" if master else ""
            say(f"{plural(n_ranks, 'rank')} on {plural(len(found), 'host')}{where}")
        json_output.add(started=hidden(asked.command)[0], hosts=[one.name for one in found], ranks=n_ranks)
        if asked.dry_run:
            return EXIT_OK
        orders = [
            job.orders(
                number, master, port, n_restarts=attempt, max_restarts=asked.max_restarts,
                first_rank=sum(int(plan["n_ranks"]) for plan in plans[:number]),
            )
            for number in range(len(found))
        ]  # fmt: skip
        failure, signals = _run(job, orders)
        if failure is not None and not signals:
            say(f"{failure.who}; all ranks on all hosts were stopped")
        json_output.add(failed_rank=None if failure is None else asdict(failure))
        if signals:
            json_output.stop(f"stopped by {signals[0].name}")
        code = EXIT_OK if failure is None else failure.code
        if code in (EXIT_OK, *NOT_STARTED_AGAIN) or signals or attempt == asked.max_restarts:
            break
        say(f"restart {attempt + 1} of {asked.max_restarts}, on all hosts")
    return code


# ---- checks ----


def _prepared(job: _Job, *, within_s: float) -> tuple[str, list[Mapping[str, Any]]]:
    """Return the address where the hosts meet, and what each has planned; raises ConfigError.

    A host that was lost may start again: what is wrong with it has `within_s` to pass.
    """
    until, waits = time.monotonic() + within_s, False
    while True:
        try:
            master = _master(job, _checked(job))
            return master, _planned(job, master)
        except ConfigError as error:
            if time.monotonic() >= until:
                raise
            if not waits:
                say(f"waiting for the hosts, for {duration(within_s)} at most: {_in_short(error)}")
            waits = True
            time.sleep(_ASKS_AGAIN_S)


def _in_short(error: ConfigError) -> str:
    return "; ".join(f"{one.what} ({one.got})" for one in error.problems)


def _checked(job: _Job) -> list[_Found]:
    """Return what each host says of itself; raises ConfigError with what is wrong with any of them."""
    with ThreadPoolExecutor(len(job.hosts)) as pool:
        answers = list(pool.map(lambda host: _asked(job, host), job.hosts))
    problems = [one for one in answers if isinstance(one, Problem)]
    found = [one for one in answers if isinstance(one, _Found)]
    names: dict[tuple[str, ...], str] = {}
    for one in found:
        first = names.setdefault(one.machine, one.host.name)
        if first != one.host.name:
            problems.append(
                Problem(
                    what=f"{one.host.name} is the same machine as {first}",
                    got=f"both are {one.machine[0]}, started at the same time",
                    why="their ranks would be bound to the same cores",
                    fix=f"name it once, with the ranks that it is to have: {first}:2",
                )
            )
    problems += [problem for one in found for problem in _versions(one, found[0])]
    if problems:
        raise ConfigError.of(problems)
    return found


def _asked(job: _Job, host: Host) -> _Found | Problem:
    """Return what `whet doctor` says on a host, or why it cannot be asked."""
    command = job.command(host, _DOCTOR, before=_ASKS.format(mark=_HOST_MARK))
    try:
        done = subprocess.run(  # noqa: S603 (ssh, with the options of the user)
            command, stdin=subprocess.DEVNULL, capture_output=True, check=False,
            timeout=job.several.connect_timeout_s + _PLANS_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return problem(host.name, None, [])
    except OSError as error:
        raise _no_ssh(host, command, error) from error
    text = done.stdout.decode("utf-8", "replace")
    line = next((one for one in text.splitlines() if one.startswith(_HOST_MARK)), "")
    words = line.split()[1:]
    with suppress(ValueError):
        software = json.loads(text[text.index("\n{", text.index(line)) :])["software"]
        # without ssh it is the launcher's own connection, that of the user's login
        connection = () if is_this_machine(host.name, job.several.ssh_command) else tuple(words[2:])
        return _Found(host, tuple(words[:2]), connection, software)
    return problem(host.name, done.returncode, done.stderr.decode("utf-8", "replace").splitlines())


def _no_ssh(host: Host, command: Sequence[str], error: OSError) -> ConfigError:
    return ConfigError(
        what=f"{host.name}: {command[0]} cannot be started on this machine",
        got=error.strerror,
        why="it starts the launcher on the host",
        fix="install it (the package openssh-client has ssh), or correct --ssh_command or --python",
    )


def _versions(one: _Found, first: _Found) -> Iterator[Problem]:
    """Yield a problem for each version that differs from the launcher's whet, or the first host's software."""
    if one.software["whet"] != __version__:
        yield _differs(one.host.name, "whet", one.software["whet"], __version__, "the launcher")
    for package in ("torch", "transformers"):
        theirs, ours = one.software[package] or "", first.software[package] or ""
        if theirs != ours:
            yield _differs(one.host.name, package, theirs, ours, first.host.name)
    theirs, ours = one.software["python"], first.software["python"]
    if theirs.split(".")[:2] != ours.split(".")[:2]:
        yield _differs(one.host.name, "Python", theirs, ours, first.host.name)


def _differs(host: str, what: str, got: str, wanted: str, of: str) -> Problem:
    where, version = (host, wanted) if wanted else (of, got)
    public, _, build = version.partition("+")
    distribution = DISTRIBUTION if what == "whet" else what
    install = f"pip install {distribution}=={public}" + (f", from PyTorch's index for {build}" if build else "")
    return Problem(
        what=f"{host}: another version of {what}",
        got=f"{got or 'none'}; {of} has {wanted or 'none'}",
        why="ranks that compute with different versions do not train the same model",
        fix=f"install it on {where} ({f'Python {version}' if what == 'Python' else install}), or name another Python "
        "with --python",
    )


def _master(job: _Job, found: Sequence[_Found]) -> str:
    """Return the address of the first host for all: the given one, or the one that ssh uses; "" for one host."""
    if len(job.hosts) == 1:
        return ""
    if job.several.master_addr:
        return job.several.master_addr
    first, *others = found
    by_ssh = [first.connection[2]] if first.connection else [one.connection[0] for one in others if one.connection]
    address = next((one for one in by_ssh if network.leads_out(one.partition("%")[0])), "")
    if not address:
        raise ConfigError(
            what=f"{first.host.name} has no address for the other hosts",
            got=f"ssh uses {', '.join(by_ssh) or 'none'}",
            why="the other hosts need an address of it that leads there",
            fix="give the address itself: --master_addr ADDRESS (hostname -I on the first host shows its addresses)",
        )
    return address


def _planned(job: _Job, master: str) -> list[Mapping[str, Any]]:
    """Return what each host has planned; raises ConfigError with the problems of all hosts."""
    orders = [
        job.orders(number, master, job.several.master_port, dry_run=True, first_rank=_first_rank(job.hosts[:number]))
        for number in range(len(job.hosts))
    ]
    with ThreadPoolExecutor(len(job.hosts)) as pool:
        answers = list(pool.map(lambda host, own: _plan(job, host, own), job.hosts, orders))
    problems = [one for found, _ in answers for one in ([found] if isinstance(found, Problem) else [])]
    if problems:
        raise ConfigError.of(problems)
    for host, own, (_, lines) in zip(job.hosts, orders, answers, strict=True):
        if job.asked.dry_run:
            print("\n".join(lines), file=sys.stderr)
            shown = shlex.join(hidden(job.asked.command)[0])
            say(f"  {shlex.join(job.command(host, _NODE))}  # node {own.hosts['node_rank']}: {shown}")
    return [found for found, _ in answers if not isinstance(found, Problem)]


def _first_rank(before: Sequence[Host]) -> int | None:
    """Return the number of the first rank after these hosts; None if one of them has as many as it decides itself."""
    slots = [host.slots for host in before]
    return None if None in slots else sum(slot for slot in slots if slot is not None)


def _plan(job: _Job, host: Host, orders: Orders) -> tuple[Mapping[str, Any] | Problem, list[str]]:
    """Return what a host has planned, or its problem, and the lines that it prints."""
    running = _started(job, host, orders)
    try:
        running.process.wait(job.several.connect_timeout_s + _PLANS_S)
    except subprocess.TimeoutExpired:
        running.send(b"")
        running.process.kill()
    code = running.process.wait()
    for reader in running.readers:
        reader.join()
    lines = [line.decode("utf-8", "replace") for line in running.said]
    if code == EXIT_OK and running.facts:
        return running.facts[0], lines
    what, *rest = "\n".join(lines).partition("error: ")[2].splitlines() or [""]
    parts = {name: text for name, _, text in (line.strip().partition(": ") for line in rest)}
    if not {"got", "why", "fix"} <= parts.keys():
        return problem(host.name, code, lines), lines
    return Problem(what=f"{host.name}: {what}", got=parts["got"], why=parts["why"], fix=parts["fix"]), lines


# ---- the run ----


def _run(job: _Job, orders: Sequence[Orders]) -> tuple[_Failure | None, list[signal.Signals]]:
    """Start all hosts and return when all have ended: the first failure, and the user's signals."""
    failures: list[_Failure] = []
    signals: list[signal.Signals] = []

    def note(number: int, _: FrameType | None) -> None:
        signals.append(signal.Signals(number))

    with handled(dict.fromkeys(ENDING, note)):
        # rank 0's output is shown as it is
        running = [
            _started(job, host, own, shows="" if not number else f"{host.name}: ")
            for number, (host, own) in enumerate(zip(job.hosts, orders, strict=True))
        ]
        n_passed_on, until, stopping, beat_at = 0, float("inf"), False, 0.0
        while any(one.code is None for one in running):
            if time.monotonic() > beat_at:
                beat_at = time.monotonic() + job.several.heartbeat_timeout_s / 4
                for one in running:
                    one.send(BEAT)
            for number in signals[n_passed_on:]:
                n_passed_on += 1
                until = min(until, time.monotonic() + SAVE_S + _LEAVES_S)
                for one in running:
                    one.send(bytes([number]))
            for one in running:
                if one.code is None and (code := one.process.poll()) is not None:
                    one.code = code
                    failures += _failures(one)
            known = [one.code if one.code is not None or not one.facts else one.facts[0]["code"] for one in running]
            failed = any(code not in (None, EXIT_OK, EXIT_STOPPED_AND_SAVED) for code in known)
            if EXIT_STOPPED_AND_SAVED in known:
                until = min(until, time.monotonic() + SAVE_S)
            if (failed or time.monotonic() > until) and not stopping:
                stopping, until = True, time.monotonic() + _LEAVES_S
                for one in running:
                    one.send(b"")
            elif stopping and time.monotonic() > until:
                for one in running:
                    one.process.kill()
            time.sleep(_EVERY_S)
        for one in running:
            for reader in one.readers:
                reader.join(STOP_S if failures else None)
    first = min(failures, key=lambda one: blame(one.code, one.at, by_itself=one.by_itself), default=None)
    return first, signals


def _failures(one: _Running) -> list[_Failure]:
    """Return how a host failed that has ended, if it did."""
    for reader in one.readers:
        reader.join(STOP_S)
    if one.code == EXIT_OK:
        return []
    for facts in one.facts:
        code = int(facts["code"])
        how = f"was killed by signal {code - 128}" if code > 128 else f"ended with exit code {code}"
        who = f"rank {facts['rank']} on {one.host.name} {how}"
        return [_Failure(code, who, time.monotonic() - float(facts["age_s"]), bool(facts["by_itself"]))]
    if one.code == EXIT_BAD_CONFIG:
        return [_Failure(EXIT_BAD_CONFIG, f"the launcher on {one.host.name} was refused", time.monotonic())]
    said = b" ".join(one.said[-2:]).decode("utf-8", "replace")
    who = f"{one.host.name} is lost: its connection ended with exit code {one.code}{f': {said}' if said else ''}"
    return [_Failure(EXIT_IO, who, time.monotonic())]


def _started(job: _Job, host: Host, orders: Orders, shows: str | None = None) -> _Running:
    """Start `whet launch` on a host. `shows` is what its lines begin with here; None: they are kept, not shown."""
    command = job.command(host, _NODE)
    as_it_is = shows == ""
    try:
        process = subprocess.Popen(  # noqa: S603 (ssh, with the options of the user)
            command, stdin=subprocess.PIPE, stdout=None if as_it_is else subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for this process, which passes it on
        )  # fmt: skip
    except OSError as error:
        raise _no_ssh(host, command, error) from error
    one = _Running(host, process, [], [], [])
    for stream, number in ((process.stdout, 1), (process.stderr, 2)):
        if stream is not None:
            reader = threading.Thread(target=_read, args=(stream, number, shows, one), daemon=True)
            reader.start()
            one.readers.append(reader)
    one.send(json.dumps(asdict(orders)).encode() + b"\n")
    return one


def _read(stream: IO[bytes], number: int, shows: str | None, one: _Running) -> None:
    """Show what a host prints until its end, without the marked lines, which are kept apart."""
    rest = b""
    while data := os.read(stream.fileno(), 1 << 16):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            before, mark, facts = line.partition(MARK)
            if mark:
                one.facts.append(json.loads(facts))
            if before or not mark:
                one.said[:] = [*one.said[-500:], before]
                _show(number, shows, before if mark else before + b"\n")
        if shows == "" and not MARK.startswith(rest[: len(MARK)]):
            _show(number, shows, rest)
            rest = b""
    _show(number, shows, rest)
    one.said += [rest] if rest else []
    stream.close()


def _show(number: int, shows: str | None, data: bytes) -> None:
    if shows is None or not data:
        return
    data = shows.encode() + data
    with suppress(OSError):  # a reader that is gone does not end the run
        while data:
            data = data[os.write(number, data) :]


# ---- ssh ----


def remote(several: HostsArguments) -> list[str]:
    """Return the words of the ssh command; only to ssh itself are options added."""
    words = shlex.split(several.ssh_command) or ["ssh"]
    if Path(words[0]).name != "ssh":
        return words
    # ssh gives up a little earlier, to say why; for a second at least
    waits = f"-oConnectTimeout={max(int(several.connect_timeout_s) - 1, 1)}"
    alive = f"-oServerAliveInterval={max(int(several.heartbeat_timeout_s / 3), 1)}"
    return [*words, *_OPTIONS, alive, "-oServerAliveCountMax=3", waits]


def is_this_machine(host: str, ssh_command: str) -> bool:
    """Return whether a host is the machine that the launcher runs on.

    A port of its own may lead into a container or through a tunnel, and a user name to another account: then it is not.
    """
    if "@" in host:
        return False
    if host in (*_LOCAL_NAMES, platform.node()) and Path((shlex.split(ssh_command) or ["ssh"])[0]).name != "ssh":
        return True
    name, port = _as_ssh_sees_it(host, ssh_command)
    if port != _SSH_PORT:
        return False
    return name in (*_LOCAL_NAMES, platform.node()) or _is_own_address(name) or _names_this_machine(name)


def problem(host: str, code: int | None, said: Sequence[str]) -> Problem:
    """Return what keeps a host from answering; `code` is ssh's exit code, None if it still ran."""
    text = " ".join(line.strip() for line in said if line.strip())[-300:]
    got = text or ("no answer in time" if code is None else f"ssh ended with exit code {code} and no message")
    unknown = (
        "the launcher must be able to start Python there",
        "try it by hand: ssh -v {host} true; --connect_timeout_s gives a slow host more time",
    )
    why, fix = next(((why, fix) for part, why, fix in _CAUSES if part in got), unknown)
    return Problem(what=f"{host} cannot be reached", got=got, why=why, fix=fix.format(host=host))


def _as_ssh_sees_it(host: str, ssh_command: str) -> tuple[str, str]:
    """Return the name and port that ssh would connect to: aliases of its configuration are replaced."""
    with suppress(OSError, subprocess.TimeoutExpired, ValueError):
        command = [*shlex.split(ssh_command), "-G", host]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=5)  # noqa: S603
        found = dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)
        return found.get("hostname", host), found.get("port", "22")
    return host, _SSH_PORT


def _names_this_machine(name: str) -> bool:
    """Return whether a name is this machine's own with or without its domain, and leads nowhere else."""
    given, own = name.lower().rstrip("."), platform.node().lower()
    if not (given.startswith(f"{own}.") or own.startswith(f"{given}.")):
        return False
    found, _ = network.resolve(name, _RESOLVES_S)
    return not found or any(_is_own_address(address) for address in found)


def _is_own_address(name: str) -> bool:
    """Return whether the address is one of this machine's; a name is not looked up, which might take long."""
    family = socket.AF_INET6 if ":" in name else socket.AF_INET
    try:
        socket.inet_pton(family, name)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((name, 0))
    except OSError:
        return False
    return True


# ---- what the hosts get ----

PREFIXES = (
    "DNNL_", "GLOO_", "GOMP_", "HF_", "KMP_", "MKL_", "OMP_", "ONEDNN_", "PYTHON", "TOKENIZERS_", "TORCH_",
    "TRANSFORMERS_", "WHET_",
)  # fmt: skip
"""Variables that begin so are passed without being named."""


def variables(named: Sequence[str], own: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables for the ranks: those of PREFIXES, and those of `--env`; raises ConfigError."""
    found = {name: value for name, value in own.items() if name.startswith(PREFIXES)}
    missing: list[Problem] = []
    for word in named:
        name, given, value = word.partition("=")
        if given:
            found[name] = value
        elif name in own:
            found[name] = own[name]
        else:
            missing.append(
                Problem(
                    what="a variable that is to be passed is not set",
                    got=f"--env {name}",
                    why="without a value after =, the value of the launcher's own environment is passed",
                    fix=f"set it before the launcher starts, or give the value: --env {name}=VALUE",
                )
            )
    if missing:
        raise ConfigError.of(missing)
    return found


def working_folder() -> str:
    """Return the current folder as the user named it: other hosts may mount it under that name only."""
    named = os.environ.get("PWD", "")
    if named and Path(named).is_absolute() and Path(named).exists() and Path(named).samefile(Path.cwd()):
        return named
    return str(Path.cwd())
