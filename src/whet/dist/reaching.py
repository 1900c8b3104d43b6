"""Waits until a rank can reach rank 0, says what it waits for, and gives up on what no waiting heals.

torch's own wait for rank 0 is silent for minutes, whatever keeps a rank from it.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch.distributed as torch_dist

from whet.config.ranks import Place
from whet.dist.meeting import Address, served_by_agent
from whet.errors import ConfigError, escape_controls
from whet.hardware.network import addresses, listening, resolve

Kind = Literal["reached", "closed", "another program", "refused", "refused here", "no answer", "unresolved", "not ours"]
_BEST_FIRST: tuple[Kind, ...] = ("reached", "closed", "another program", "refused", "refused here", "no answer")
_SOON_S = 30.0
"""Outlasts the retries of name services (10 s) and four of TCP's (15 s)."""
_CONNECT_S = 3.0
_ANSWER_S = 10.0
_FIRST_LINE_S, _NEXT_LINE_S = 5.0, 30.0
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
_PAUSE_OF_STRANGERS_S = 5.0
"""torch prints lines of its own for each attempt at something else than its store."""
_WORD_BYTES = 16
_FIXES: Mapping[Kind, str] = {
    "unresolved": "set MASTER_ADDR to an address, or to a name that every machine resolves (getent hosts {host})",
    "no answer": "check that MASTER_ADDR is the machine of rank 0, in a network that all machines share, and that no "
    "firewall drops packets to port {port} there",
    "refused": "start rank 0, on the machine that MASTER_ADDR names, with the same MASTER_PORT; read its messages if it "
    "has ended; --ddp_timeout is how long the others wait for it",
    "refused here": "set MASTER_ADDR to the address of rank 0's machine in the network that all machines share (ip "
    "address shows it there): Linux distributions often give a machine's own name an address such as 127.0.1.1; if all "
    "ranks run on this machine, set LOCAL_RANK and LOCAL_WORLD_SIZE too, or start rank 0 first",
    "closed": "look at what forwards connections to rank 0 (a proxy, a tunnel), and whether rank 0 has started",
    "another program": "end the program that uses the port on rank 0's machine (ss -ltnp 'sport = :{port}'), or set "
    "another MASTER_PORT for all ranks; where a proxy answers for every address, MASTER_ADDR may be wrong",
    "not ours": "set MASTER_ADDR, for all ranks, to an address of the machine that rank 0 runs on (here: {own}), or "
    "start rank 0 on the machine that has this address",
}


@dataclass(frozen=True)
class _Attempt:
    """What one attempt to reach rank 0 led to."""

    kind: Kind
    seen: str
    ip: str = ""


def reach(place: Place, address: Address, timeout_s: float, environment: Mapping[str, str]) -> str:
    """Return rank 0's IP address once it answers there, or, on rank 0, once the others can reach it there.

    A line says what a rank waits for after 5 seconds, and every 30 seconds from then on. `patience_s` has the times.
    Raises ConfigError.
    """
    started = since = now = time.monotonic()
    speaks_at, pause_s, last = started + _FIRST_LINE_S, _SHORTEST_PAUSE_S, ""
    while True:
        found = _attempt(place, address, environment, last)
        if found.kind == "reached":
            return found.ip
        if found.kind != last:
            last, since = found.kind, now
        now = time.monotonic()
        most_s = patience_s(found.kind, timeout_s, in_kubernetes="KUBERNETES_SERVICE_HOST" in environment)
        if now - since >= most_s or now - started >= timeout_s:
            raise _given_up(place, address, found, now - started)
        if now >= speaks_at:
            left_s = min(most_s - (now - since), timeout_s - (now - started))
            _say(place, f"waits for {address}: {found.seen}; for up to {left_s:.0f} s more")
            speaks_at = now + _NEXT_LINE_S
        time.sleep(_PAUSE_OF_STRANGERS_S if found.kind in ("another program", "closed") else pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def patience_s(kind: Kind, timeout_s: float, *, in_kubernetes: bool) -> float:
    """Return how many seconds to wait for this kind of failure to pass.

    Connections that are refused, or accepted by a forwarder and closed, mean that rank 0 has not begun: it may still
    pull its image or prepare data, and gets the time of the setting. A name that does not exist, an address that never
    answers, a port that another program has, and an address that means another machine for each rank do not change: 30
    seconds. In Kubernetes names and addresses appear when a pod starts, so these get all the time there, too.
    """
    starts_later = kind in ("refused", "closed")
    appears_later = in_kubernetes and kind in ("unresolved", "no answer", "not ours", "another program")
    return timeout_s if starts_later or appears_later else min(_SOON_S, timeout_s)


@contextmanager
def saying_who_waits(place: Place, address: Address, timeout_s: float) -> Iterator[None]:
    """Say that this rank waits for the others, if the block takes long."""
    line = f"waits at {address} for ranks that have not joined; for up to {timeout_s:.0f} s (--ddp_timeout)"
    timer = threading.Timer(_FIRST_LINE_S, _say, (place, line))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _say(place: Place, text: str) -> None:
    """Print a line on standard error: the log of every rank but rank 0 holds errors alone."""
    print(f"whet: rank {place.rank} of {place.n_ranks} {escape_controls(text)}", file=sys.stderr, flush=True)


def _attempt(place: Place, address: Address, environment: Mapping[str, str], last: str) -> _Attempt:
    found, why = resolve(address.host)
    if not found:
        return _Attempt("unresolved", f"the name {address.host} cannot be resolved here: {why}")
    serves = place.is_first and not served_by_agent(environment)
    if serves:
        return _as_server(found, address)
    if last == "another program" and (ip := next((ip for ip in found if _speaks_otherwise(ip, address.port)), None)):
        return _another_program(ip, address.port)  # torch would print lines again
    tried = [_connected(ip, address.port, several_machines=not place.one_machine) for ip in found]
    return min(tried, key=lambda one: _BEST_FIRST.index(one.kind))


def _as_server(ips: list[str], address: Address) -> _Attempt:
    """Return whether the others reach this machine at one of these addresses: its own, or forwarded to it."""
    own = sorted((ip for ip in ips if is_own(ip)), key=_is_loopback)
    if own:
        return _Attempt("reached", "", own[0])
    returned = next((ip for ip in ips if _comes_back(ip, address.port)), None)
    if returned is not None:
        return _Attempt("reached", "", returned)
    return _Attempt("not ours", f"{', '.join(ips)} is no address of rank 0's machine, {os.uname().nodename}")


def is_own(ip: str) -> bool:
    """Return whether this machine has the address."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((ip, 0))
    except OSError:
        return False
    return True


def _comes_back(ip: str, port: int) -> bool:
    """Return whether a connection to this address arrives here: containers and clouds forward addresses of the host."""
    word, until = secrets.token_bytes(_WORD_BYTES), time.monotonic() + _CONNECT_S
    try:
        server = listening(port)
    except OSError:
        return True  # the port is taken: torch reports that
    with server, suppress(OSError), socket.create_connection((ip, port), _CONNECT_S) as sender:
        sender.sendall(word)
        while (left_s := until - time.monotonic()) > 0:
            server.settimeout(left_s)
            connection, _ = server.accept()
            with connection, suppress(OSError):
                connection.settimeout(1.0)  # other ranks may connect too, and send something else
                if connection.recv(_WORD_BYTES, socket.MSG_WAITALL) == word:
                    return True
    return False


def _connected(ip: str, port: int, *, several_machines: bool) -> _Attempt:
    try:
        socket.create_connection((ip, port), _CONNECT_S).close()
    except ConnectionRefusedError:
        if several_machines and _is_loopback(ip):
            seen = f"{ip} is this machine itself, and nothing listens on port {port} here; rank 0 runs elsewhere"
            return _Attempt("refused here", seen)
        return _Attempt("refused", f"rank 0 does not listen yet (connection to {ip} refused)")
    except OSError as error:
        why = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        return _Attempt("no answer", f"{ip} cannot be reached: {why}")
    return _answered(ip, port)


def _answered(ip: str, port: int) -> _Attempt:
    """Return whether rank 0's store answers: something else may have the port, or accept connections in its place."""
    ends: list[str] = []

    def ask() -> None:
        try:
            torch_dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
                ip, port, None, False, timedelta(seconds=_CONNECT_S), wait_for_workers=False
            )
            ends.append("")
        except RuntimeError as error:
            ends.append(str(error))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_ANSWER_S)
    if ends and not ends[0]:
        return _Attempt("reached", "", ip)
    if (ends and "invalid value" in ends[0]) or _speaks_otherwise(ip, port):
        return _another_program(ip, port)
    return _Attempt("closed", f"port {port} of {ip} accepts connections, but rank 0 does not answer there")


def _another_program(ip: str, port: int) -> _Attempt:
    return _Attempt("another program", f"something else than rank 0 answers on port {port} of {ip}")


def _speaks_otherwise(ip: str, port: int) -> bool:
    """Return whether something answers here that is no store: a web server, a proxy, or one that greets at once."""
    with suppress(OSError), socket.create_connection((ip, port), _CONNECT_S) as connection:
        connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
        return bool(connection.recv(1))
    return False


def _is_loopback(ip: str) -> bool:
    return ipaddress.ip_address(ip.partition("%")[0]).is_loopback


def _given_up(place: Place, address: Address, found: _Attempt, waited_s: float) -> ConfigError:
    own = ", ".join(addresses()) or "none but loopback"
    return ConfigError(
        what=f"rank {place.rank} of {place.n_ranks} does not reach rank 0 at {address}"
        if not place.is_first
        else f"the other ranks cannot reach rank 0 at {address}",
        got=f"{found.seen}; waited {waited_s:.0f} s",
        why="ranks meet at MASTER_ADDR and MASTER_PORT, where rank 0 listens",
        fix=_FIXES[found.kind].format(host=address.host, port=address.port, own=own),
    )
