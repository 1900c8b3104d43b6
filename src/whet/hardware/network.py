"""The network of this machine: addresses, the interface that leads to another machine, names, listening sockets."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

_SIOCGIFCONF = 0x8912
_SIOCGIFNETMASK = 0x891B
_IFREQ_BYTES = 40
_MOST_INTERFACES = 1024
_RESOLVE_S = 4.0


def addresses() -> dict[str, str]:
    """Return the addresses of this machine -> the name of their interface, without loopback and link-local ones."""
    found = {**_ipv4(), **_ipv6()}
    return {text: name for text, name in found.items() if leads_out(text)}


def nominal_speeds(root: Path = Path("/sys/class/net")) -> dict[str, float]:
    """Return interface -> its speed in bits per second, for devices that say it; virtual ones name any number."""
    found: dict[str, float] = {}
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        if not ((folder / "device").exists() or (folder / "bonding").exists()):
            continue
        with suppress(OSError, ValueError):  # of an interface that is down
            megabits = int((folder / "speed").read_text("ascii"))
            if megabits > 0:
                found[folder.name] = 1e6 * megabits
    return found


def networks() -> list[str]:
    """Return the addresses of this machine with the length of their network's prefix, such as 10.0.0.1/24."""
    found = [f"{address}/{_ipv4_prefix(label)}" for address, label in _ipv4_labels().items()]
    found += [f"{address}/{length}" for address, (_, length) in _ipv6_entries().items()]
    return [text for text in found if leads_out(text.partition("/")[0])]


def interface_towards(address: str, own: Mapping[str, str]) -> tuple[str, str]:
    """Return the own address and interface from which packets to `address` leave, "" without a route."""
    if address in own:
        return address, own[address]
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing
        source = str(probe.getsockname()[0])
        return source, own.get(source, "")
    return "", ""


def resolve(name: str, within_s: float = _RESOLVE_S) -> tuple[list[str], str]:
    """Return the addresses of a name as this host sees it, and why there are none; never waits longer than asked."""
    found: list[str] = []
    errors: list[str] = []

    def ask() -> None:
        try:
            found.extend(dict.fromkeys(str(entry[4][0]) for entry in socket.getaddrinfo(name, None)))
        except (OSError, UnicodeError) as error:  # of a name that no name service takes
            errors.append(getattr(error, "strerror", None) or str(error))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(within_s)
    if asking.is_alive():
        return [], f"no answer of the name service within {within_s:g} s"
    return found, "" if found else (errors or ["no address"])[0]


def listening(port: int) -> socket.socket:
    """Return a socket that listens on all addresses of this host, of both families if there are two."""
    if socket.has_dualstack_ipv6():
        with suppress(OSError):
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=256)
    return socket.create_server(("", port), backlog=256)


def leads_out(text: str) -> bool:
    """Return whether other machines may reach this address: not loopback, and not of one link only."""
    address = ipaddress.ip_address(text)
    return not address.is_loopback and not address.is_link_local


def _ipv4() -> dict[str, str]:
    # an address beyond the first of an interface may have a label such as eth0:1
    return {address: label.partition(":")[0] for address, label in _ipv4_labels().items()}


def _ipv4_labels() -> dict[str, str]:
    """Return IPv4 address -> the label of its interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        buffer = array.array("B", bytes(_IFREQ_BYTES * _MOST_INTERFACES))
        asked = struct.pack("iP", len(buffer), buffer.buffer_info()[0])
        n_bytes = struct.unpack("iP", fcntl.ioctl(probe.fileno(), _SIOCGIFCONF, asked))[0]
    raw = buffer.tobytes()
    parts = [raw[start : start + _IFREQ_BYTES] for start in range(0, n_bytes, _IFREQ_BYTES)]
    return {socket.inet_ntoa(part[20:24]): part[:16].split(b"\0")[0].decode() for part in parts}


def _ipv4_prefix(label: str) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFNETMASK, struct.pack("256s", label.encode()))
    return int.from_bytes(answer[20:24], "big").bit_count()


def _ipv6() -> dict[str, str]:
    return {address: interface for address, (interface, _) in _ipv6_entries().items()}


def _ipv6_entries() -> dict[str, tuple[str, int]]:
    """Return IPv6 address -> (interface, length of the network's prefix)."""
    try:
        lines = Path("/proc/net/if_inet6").read_text("ascii").splitlines()
    except OSError:
        return {}
    words = [line.split() for line in lines]
    return {
        str(ipaddress.IPv6Address(bytes.fromhex(parts[0]))): (parts[5], int(parts[2], 16))
        for parts in words
        if len(parts) == 6
    }
