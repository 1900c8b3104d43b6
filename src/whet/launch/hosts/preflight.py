"""The pre-flight: every host is asked at the same time, and all that keeps the run from starting is shown at once."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whet.errors import ConfigError, Problem
from whet.launch.agent.channel import Message
from whet.launch.agent.facts import Facts
from whet.launch.hosts import checks, ssh
from whet.launch.hosts.master import candidates, chosen
from whet.launch.hosts.member import Member

_CLOCK_S = 2.0
_GREET_S = 5.0
_MESH_S = 8.0
_SHOW_S = 5.0
_QUESTIONS = itertools.count(1)
"""Numbers for the questions of this process: a host that is slow may answer one after the next was asked."""


@dataclass(frozen=True)
class Ready:
    """What the pre-flight has found; the ranks can be started with it."""

    master_addr: str
    master_port: int
    n_ranks: int
    bytes_per_s: Mapping[str, float]
    """Host -> the measured speed of its link to the next one; empty for one host."""
    shown: Mapping[str, Message]
    """Host -> the picture of its plan, and what its ranks get."""

    def place(self, member: Member, node_rank: int) -> dict[str, Any]:
        """Return what a host needs to know of its place in the run."""
        return {
            "first_rank": member.first_rank,
            "n_ranks": self.n_ranks,
            "node_rank": node_rank,
            "master_addr": self.master_addr,
            "master_port": self.master_port,
            "interface": member.interface,
        }


def prepare(
    members: Sequence[Member], spec_of: Callable[[Member], Mapping[str, Any]], master_addr: str | None, within_s: float
) -> Ready:
    """Return what the run starts with; raises ConfigError with every problem of every host."""
    problems = _found(members, spec_of, within_s)
    healthy = [member for member in members if member.facts is not None]
    if others := checks.other_versions(healthy):  # they may not understand what else is asked
        raise ConfigError.of([*problems, *checks.problems(healthy), *others])
    _compare_clocks(healthy)
    problems += checks.problems(healthy)
    address, speeds = "", {}
    if members[0] in healthy and healthy[0].facts and healthy[0].facts.port:
        address, more = _connected(healthy, master_addr)
        problems += more
        if address and len(healthy) > 1:
            speeds, more = _meshed(healthy)
            problems += more
    if problems:
        raise ConfigError.of(problems)
    first_rank = 0
    for member in members:
        assert member.facts is not None
        member.first_rank = first_rank
        first_rank += member.facts.n_ranks
    assert members[0].facts is not None
    ready = Ready(address, members[0].facts.port, first_rank, speeds, {})
    places = {member.name: ready.place(member, number) for number, member in enumerate(members)}
    shown = _asked(members, _SHOW_S, "show", lambda member: places[member.name])
    if lost := [_lost(member) for member in members if member.name not in shown]:
        raise ConfigError.of(lost)
    return Ready(address, members[0].facts.port, first_rank, speeds, shown)


def _asked(
    members: Sequence[Member], within_s: float, ask: str, given: Callable[[Member], Mapping[str, Any]]
) -> dict[str, Message]:
    """Return the answer of each host that gives one in time."""
    until, number = time.monotonic() + within_s, next(_QUESTIONS)
    for member in members:
        member.channel.send(ask=ask, question=number, **given(member))
    answers = {member.name: _answer(member, number, until) for member in members}
    return {name: answer for name, answer in answers.items() if answer is not None}


def _answer(member: Member, number: int, until: float) -> Message | None:
    """Return the answer of a host to the question of this number; None if it comes too late, as others may have."""
    while True:
        message = member.channel.receive(max(until - time.monotonic(), 0.01))
        if message is None or message.get("question") == number:
            return message


def _found(members: Sequence[Member], spec_of: Callable[[Member], Mapping[str, Any]], within_s: float) -> list[Problem]:
    """Fill in the facts of every host that answers; return a problem for each other one."""
    answers = _asked(members, within_s, "find", spec_of)
    problems: list[Problem] = []
    for member in members:
        if member.name in answers:
            member.facts = Facts.of(answers[member.name]["facts"])
        else:
            problems.append(_silent(member))
    return problems


def _silent(member: Member) -> Problem:
    """Return the problem of a host that has never answered."""
    code, said = None if member.process is None else member.process.poll(), [*member.channel.noise[-5:], *member.said]
    if not member.by_hand:
        return ssh.problem(member.name, code, said)
    return Problem(
        what=f"{member.name} does not answer",
        got=" ".join(said)[-300:] or ("no answer in time" if code is None else f"exit code {code}"),
        why="each node looks at its own cores and software before ranks start, and says what it has found",
        fix="look at the load of that node and at what its launcher prints, then start all launchers again",
    )


def _compare_clocks(members: Sequence[Member]) -> None:
    sent = time.time()
    for name, answer in _asked(members, _CLOCK_S, "clock", lambda _: {}).items():
        member = next(one for one in members if one.name == name)
        member.clock_ahead_s = answer["time"] - (sent + answer["arrived"]) / 2


def _connected(members: Sequence[Member], master_addr: str | None) -> tuple[str, list[Problem]]:
    """Return the address of the first host that all others reach, and what keeps them from it."""
    if len(members) == 1:
        members[0].address, members[0].interface = "127.0.0.1", "lo"
        return "127.0.0.1", []
    first = members[0].facts
    assert first is not None
    addresses = candidates(members, master_addr)
    answers = _asked(members, _GREET_S, "greet", lambda _: {"candidates": addresses, "port": first.port})
    if lost := [_lost(member) for member in members if member.name not in answers]:
        return "", lost
    address, problems = chosen(members, addresses, answers, master_addr)
    for member in members if address else ():
        member.address, member.interface = answers[member.name]["towards"][address]
        if not member.interface:
            problems.append(
                Problem(
                    what=f"{member.name}: no network interface leads to {members[0].name}",
                    got=f"packets to {address} leave from {member.address or 'nowhere'}",
                    why="ranks connect to each other through an interface that has an address of its own",
                    fix=f"set up a route there (ip route get {address}), or name another address with --master_addr",
                )
            )
    return address, problems


def _meshed(members: Sequence[Member]) -> tuple[dict[str, float], list[Problem]]:
    """Return the speed of the link from each host to the next, and which hosts do not reach which."""
    targets = {member.name: (member.address, member.facts.port if member.facts else 0) for member in members}

    def peers(member: Member) -> dict[str, Any]:
        others = {name: target for name, target in targets.items() if name != member.name}
        return {"peers": others, "source": member.address}

    answers = _asked(members, _MESH_S, "mesh", peers)
    problems = [_lost(member) for member in members if member.name not in answers]
    for member in members:
        greetings = answers.get(member.name, {"greetings": {}})["greetings"]
        refused = {name: one["error"] for name, one in greetings.items() if one["error"] or one["answer"] != name}
        if refused:
            problems.append(_unreached(member, targets, refused))
    return ({}, problems) if problems else _speeds(members, targets)


def _speeds(
    members: Sequence[Member], targets: Mapping[str, tuple[str, int]]
) -> tuple[dict[str, float], list[Problem]]:
    """Measure the link from each host to the next, in two or three turns so that no host sends while it receives."""
    following = {member.name: members[(n + 1) % len(members)].name for n, member in enumerate(members)}
    even = len(members) // 2 * 2
    found: dict[str, Message] = {}
    for turn in (members[:even:2], members[1:even:2], members[even:]):
        found |= _asked(
            turn, _MESH_S, "link", lambda member: {"to": targets[following[member.name]], "source": member.address}
        )
    problems = [_lost(member) for member in members if member.name not in found]
    return {name: float(answer["bytes_per_s"]) for name, answer in found.items()}, problems


def _unreached(member: Member, targets: Mapping[str, tuple[str, int]], refused: Mapping[str, str]) -> Problem:
    tried = [f"{name} at {targets[name][0]}: {error or 'another host answers'}" for name, error in refused.items()]
    return Problem(
        what=f"{member.name} cannot reach {', '.join(refused)}",
        got=f"from {member.address} ({member.interface}) to {'; '.join(tried)}",
        why="every rank connects to every other one, on ports that the system chooses",
        fix="open all TCP ports between the hosts of the run, or name an address of another network with --master_addr",
    )


def _lost(member: Member) -> Problem:
    code = None if member.process is None else member.process.poll()
    said = " ".join(member.said[-3:]) or ("it does not answer" if code is None else f"exit code {code}")
    return Problem(
        what=f"{member.name} does not answer any more",
        got=said,
        why="the connection ended during the pre-flight, or the host is very slow",
        fix="look at the load and the network of that node, and at what its launcher prints"
        if member.by_hand
        else f"look at the host's load and its network: ssh {member.name} uptime",
    )
