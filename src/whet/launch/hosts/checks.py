"""What the hosts' facts say against starting: each problem names the host, what was seen and the fix."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from whet.console import amount
from whet.errors import Problem
from whet.launch.hosts.member import Member
from whet.version import DISTRIBUTION, __version__

_CLOCK_S = 2.0
_SLOW_FRAC = 0.25
"""A link below this part of the usual speed is reported; a busy machine alone explains a factor of two."""
_MOST_EXPECTED = 10e9
"""Bits per second that one connection of the measurement reaches on a faster interface, too."""
_LEAST_EXPECTED = 1e9
"""Bits per second of the slowest network that clusters have, for interfaces that do not name their speed."""
_EXAMPLE_WEIGHTS = 100e6
_FREE_FRAC = 0.5
"""A host with less free memory than this part of the others' is worth a line: all ranks train the same model."""


def problems(members: Sequence[Member]) -> list[Problem]:
    """Return what each host found about itself, and where hosts differ that must not."""
    own = [
        replace(one, what=f"{member.name}: {one.what}")
        for member in members
        if member.facts is not None
        for one in member.facts.problems
    ]
    return [*own, *_versions(members), *_commands(members), *_named_twice(members)]


def remarks(members: Sequence[Member], bytes_per_s: Mapping[str, float]) -> list[str]:
    """Return what is odd about a host, or its link to the next one, but stops nothing."""
    return [*_clocks(members), *_memory(members), *_links(members, bytes_per_s)]


def other_versions(members: Sequence[Member]) -> list[Problem]:
    """Return a problem for each host that has another version of whet than the launcher."""
    return [
        _differs(member, "whet", member.facts.whet, __version__, "the launcher")
        for member in members
        if member.facts is not None and member.facts.whet != __version__
    ]


def _named_twice(members: Sequence[Member]) -> list[Problem]:
    """Return a problem for each host, of those reached by name, that is another one by a different name."""
    named = [one for one in members if one.process is not None and one.facts is not None and one.facts.addresses]
    first: dict[frozenset[str], str] = {}
    found: list[Problem] = []
    for member in named:
        addresses = frozenset(member.facts.addresses) if member.facts is not None else frozenset[str]()
        name = first.setdefault(addresses, member.name)
        if name != member.name:
            found.append(
                Problem(
                    what=f"{member.name} is the same machine as {name}",
                    got=f"both have the addresses {', '.join(sorted(addresses))}",
                    why="their ranks would be bound to the same cores",
                    fix=f"name it once, with the ranks that it is to have: {name}:2",
                )
            )
    return found


def _versions(members: Sequence[Member]) -> list[Problem]:
    found: list[Problem] = []
    known = [member for member in members if member.facts is not None]
    for first, member in ((known[0], other) for other in known[1:]):
        assert first.facts is not None
        assert member.facts is not None
        for package in ("torch", "transformers"):
            theirs, ours = getattr(member.facts, package), getattr(first.facts, package)
            if theirs != ours:
                found.append(_differs(member, package, theirs, ours, first.name))
        ours, theirs = (_minor(one.facts.python) for one in (first, member) if one.facts is not None)
        if ours != theirs:
            found.append(_differs(member, "Python", member.facts.python, first.facts.python, first.name))
    return found


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _differs(member: Member, what: str, got: str, wanted: str, of: str) -> Problem:
    where, version = (member.name, wanted) if wanted else (of, got)
    other = "start the launcher there with another Python" if member.by_hand else "name another Python with --python"
    return Problem(
        what=f"{member.name}: another version of {what}",
        got=f"{got or 'none'}; {of} has {wanted or 'none'}",
        why="ranks that compute with different versions do not train the same model",
        fix=f"install it on {where} ({_install(what, version)}), or {other}",
    )


def _install(what: str, version: str) -> str:
    """Return how a version is installed; builds such as 2.13.0+cpu are in an index of PyTorch's own."""
    public, _, build = version.partition("+")
    if what == "Python":
        return f"Python {version}"
    distribution = DISTRIBUTION if what == "whet" else what
    return f"pip install {distribution}=={public}" + (f", from PyTorch's index for {build}" if build else "")


def _commands(members: Sequence[Member]) -> list[Problem]:
    """Return a problem for each host that was started with another command than the first, by hand."""
    known = [member for member in members if member.facts is not None and member.facts.command]
    return [
        Problem(
            what=f"{other.name}: another command than on {known[0].name}",
            got=f"{_command(other)}; {known[0].name} has {_command(known[0])}",
            why="all ranks of a run execute the same command",
            fix="start the launcher with the same command on every node",
        )
        for other in known[1:]
        if _command(other) != _command(known[0])
    ]


def _command(member: Member) -> str:
    return member.facts.command if member.facts is not None else ""


def _clocks(members: Sequence[Member]) -> list[str]:
    by_clock = sorted(members, key=lambda member: member.clock_ahead_s)
    if len(by_clock) < 2 or by_clock[-1].clock_ahead_s - by_clock[0].clock_ahead_s < _CLOCK_S:
        return []
    middle = statistics.median_low(member.clock_ahead_s for member in members)
    return [
        f"{member.name}: its clock is {abs(member.clock_ahead_s - middle):.0f} s "
        f"{'ahead of' if member.clock_ahead_s > middle else 'behind'} the others'; times in logs and of files will not "
        f"agree. fix: run chronyd or systemd-timesyncd there"
        for member in members
        if abs(member.clock_ahead_s - middle) >= _CLOCK_S
    ]


def _links(members: Sequence[Member], bytes_per_s: Mapping[str, float]) -> list[str]:
    """Return a line for each host that sends slowly.

    Usual is the median over hosts of the faster of a host's two links: one bad host slows the link to it as well as its
    own, which are two of three. Such a link to a slow host is not reported: its sender is in order.
    """
    n_hosts = len(members)
    if n_hosts < 2 or len(bytes_per_s) < n_hosts:
        return []
    if n_hosts == 2:
        return _links_of_two(members, bytes_per_s)
    own = [bytes_per_s[member.name] for member in members]
    usual = statistics.median_low(max(own[n], own[n - 1]) for n in range(n_hosts))
    slow = [speed < _SLOW_FRAC * usual for speed in own]
    return [
        f"{member.name}: only {8e-9 * own[n]:.2f} Gbit/s to {members[(n + 1) % n_hosts].name}, usual here is "
        f"{8e-9 * usual:.1f}; all ranks wait for the slowest link. fix: look at the interface {member.interface} there "
        f"(ethtool {member.interface}), or choose another network with --master_addr"
        for n, member in enumerate(members)
        if slow[n] and (slow[n - 1] or not slow[(n + 1) % n_hosts])
    ]


def _links_of_two(members: Sequence[Member], bytes_per_s: Mapping[str, float]) -> list[str]:
    """Return a line for each of two hosts that sends slowly: with no third one, interfaces say what is usual."""
    found: list[str] = []
    for member, other in (members, members[::-1]):
        speed = 8 * bytes_per_s[member.name]
        named = [one.facts.bits_per_s.get(one.interface) for one in (member, other) if one.facts is not None]
        known = [one for one in named if one]
        expected = min(*known, _MOST_EXPECTED) if known else _LEAST_EXPECTED
        if speed >= _SLOW_FRAC * expected:
            continue
        usual = f"its interface {member.interface} should reach" if known else "usual networks have at least"
        waits_s = 32 * _EXAMPLE_WEIGHTS / max(speed, 1.0)
        found.append(
            f"{member.name}: only {1e-9 * speed:.2f} Gbit/s to {other.name}, {usual} {1e-9 * expected:.0f}; each step "
            f"of a model with {_EXAMPLE_WEIGHTS / 1e6:.0f} million weights waits up to {waits_s:.1f} s for gradients. "
            f"fix: look at the interface (ethtool {member.interface}), choose another network with --master_addr, or "
            "exchange less: --ddp_comm_hook bf16 or powersgd"
        )
    return found


def _memory(members: Sequence[Member]) -> list[str]:
    free = {
        member.name: member.facts.available_bytes / member.facts.n_ranks
        for member in members
        if member.facts is not None and member.facts.available_bytes and member.facts.n_ranks
    }
    if len(free) < 2:
        return []
    usual = statistics.median_high(free.values())
    by_hand = members[0].by_hand
    return [
        f"{name}: {amount(own)} of memory free for each rank, others have {amount(usual)}. "
        "fix: end what else runs there, or give it fewer ranks "
        f"({'--nproc_per_node 1 there' if by_hand else f'--hosts {name}:1'})"
        for name, own in free.items()
        if own < _FREE_FRAC * usual
    ]
