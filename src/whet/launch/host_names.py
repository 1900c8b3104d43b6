"""The hosts of a run as the user names them: `--hosts h1:2,h2`, or an MPI hostfile."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from whet.errors import ConfigError, Problem

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


def from_option(text: str) -> list[Host]:
    """Return the hosts of `h1[:slots],h2[:slots]`; raises ConfigError."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    return _joined([_entry([word], f"--hosts {text}") for word in words], f"--hosts {text}")


def from_file(path: Path) -> list[Host]:
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
