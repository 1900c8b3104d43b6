"""Which address of the first host all others reach: tried, not guessed from names."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from whet.errors import Problem
from whet.hardware.network import leads_out
from whet.launch.agent.channel import Message
from whet.launch.hosts.member import Member


def candidates(members: Sequence[Member], master_addr: str | None) -> list[str]:
    """Return the addresses by which the first host might be reached, the likeliest first."""
    if master_addr is not None and _is_address(master_addr):
        return [master_addr]
    first, *others = [member.facts for member in members if member.facts is not None]
    if master_addr is not None:
        return _usable(address for facts in (first, *others) for address in facts.master[0])
    by_ssh = [first.ssh[1]] if first.ssh else [facts.ssh[0] for facts in others if facts.ssh]
    return _usable([*by_ssh, *first.addresses])


def chosen(
    members: Sequence[Member], addresses: Sequence[str], answers: Mapping[str, Message], master_addr: str | None
) -> tuple[str, list[Problem]]:
    """Return the first address through which all others have reached the first host, or "" and who has not."""
    first, *others = members
    failing = {
        address: [member for member in others if not _reached(answers[member.name]["greetings"][address], first)]
        for address in addresses
    }
    for address, missing in failing.items():
        if not missing:
            return address, []
    if not addresses:
        return "", [_no_address(first, members, master_addr)]
    best = min(failing, key=lambda address: len(failing[address]))
    return "", [_unreached(member, first, answers[member.name], master_addr) for member in failing[best]]


def resolved_otherwise(members: Sequence[Member], master_addr: str | None, address: str) -> list[str]:
    """Return a line for each host that resolves the master's name to something that does not lead to it."""
    if master_addr is None or _is_address(master_addr):
        return []
    return [
        f"{member.name} resolves {master_addr} to {_resolved(member)}; ranks use {address} instead"
        for member in members
        if member.facts is not None and address not in member.facts.master[0]
    ]


def _reached(greeting: Mapping[str, Any], first: Member) -> bool:
    return not greeting["error"] and greeting["answer"] == first.name


def _unreached(member: Member, first: Member, answer: Message, master_addr: str | None) -> Problem:
    tried = [f"{address}: {one['error'] or 'another host answers'}" for address, one in answer["greetings"].items()]
    port = first.facts.port if first.facts is not None else 0
    name = "" if master_addr is None or _is_address(master_addr) else f" ({master_addr} is {_resolved(member)} there)"
    return Problem(
        what=f"{member.name} cannot reach {first.name} on port {port}",
        got=f"{'; '.join(tried)}{name}",
        why=f"all ranks find each other through rank 0 on {first.name}",
        fix=f"open TCP ports on {first.name} for the other hosts, or name an address of it that they reach: "
        "--master_addr ADDRESS",
    )


def _no_address(first: Member, members: Sequence[Member], master_addr: str | None) -> Problem:
    if master_addr is None:
        got, why = "only loopback addresses", "the other hosts need an address of it that leads there"
    else:
        got = "; ".join(f"{member.name}: {_resolved(member)}" for member in members)
        why = "no host resolves the name to an address that other hosts can use"
    return Problem(
        what=f"{first.name} has no address for the other hosts" if master_addr is None
        else f"{master_addr} is no address of {first.name} on any host",
        got=got,
        why=why,
        fix="give the address itself: --master_addr ADDRESS (hostname -I on the first host shows its addresses)",
    )  # fmt: skip


def _resolved(member: Member) -> str:
    assert member.facts is not None
    found, error = member.facts.master
    return ", ".join(found) or f"nothing ({error})"


def _usable(addresses: Iterable[str]) -> list[str]:
    return [address for address in dict.fromkeys(addresses) if _is_address(address) and leads_out(address)]


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
