"""The network of this machine: addresses, the interface that leads to another machine, names, listening sockets."""

from __future__ import annotations

import array
import ipaddress
import socket
import struct
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from whet import system

_SIOCGIFCONF = 0x8912
_IFREQ_BYTES = 40
_MOST_INTERFACES = 1024
_RESOLVE_S = 4.0


def addresses() -> dict[str, str]:
    """Return the addresses of this machine -> the name of their interface, without loopback and link-local ones."""
    found = {**_ipv4(), **_ipv6()} if system.is_linux() else system.addresses_of_interfaces()
    return {text: name for text, name in found.items() if leads_out(text)}


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
    """Return IPv4 address -> interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        buffer = array.array("B", bytes(_IFREQ_BYTES * _MOST_INTERFACES))
        asked = struct.pack("iP", len(buffer), buffer.buffer_info()[0])
        n_bytes = struct.unpack("iP", system.ioctl(probe.fileno(), _SIOCGIFCONF, asked))[0]
    raw = buffer.tobytes()
    parts = [raw[start : start + _IFREQ_BYTES] for start in range(0, n_bytes, _IFREQ_BYTES)]
    # an address beyond the first of an interface may have a label such as eth0:1
    return {socket.inet_ntoa(part[20:24]): part[:16].split(b"\0")[0].decode().partition(":")[0] for part in parts}


def _ipv6() -> dict[str, str]:
    """Return IPv6 address -> interface."""
    try:
        lines = Path("/proc/net/if_inet6").read_text("ascii").splitlines()
    except OSError:
        return {}
    words = [line.split() for line in lines]
    return {str(ipaddress.IPv6Address(bytes.fromhex(parts[0]))): parts[5] for parts in words if len(parts) == 6}
