"""The ranks arrive at rank 0's store before they join; one that ends with an error before says so there.

torch's own wait for ranks is blind: a rank that never comes keeps all others until their timeout. Launchers that stop
all ranks when one fails (torchrun, whet launch) need none of this.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as torch_dist

from whet.config.ranks import Place
from whet.dist import reaching
from whet.dist.meeting import LOCALHOST, Address, address_for, needs_exchange
from whet.errors import ConfigError
from whet.hardware import network

_ARRIVED, _ENDED, _N_ENDED, _READ = "whet/arrived", "whet/ended", "whet/n-ended", "whet/read-ended"
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5
_FAREWELL_S = 30.0
"""How long rank 0 keeps its store for ranks that have not come, which would wait for it until their timeout."""
_CONNECT_S = 3.0
_LONGEST_SAYING_S = 15.0
"""How long a rank that ends waits for rank 0, which may still load torch: its own end is delayed by as much."""
_served: list[Any] = []
"""The store that rank 0 serves before it joins."""
_arrived: list[Address] = []
"""Where this rank has arrived: it has heard there what the others know."""


def stopped_by_launcher(environment: Mapping[str, str]) -> bool:
    """Return whether a launcher ends all ranks when one fails; it may also start them again, at the same store."""
    return "TORCHELASTIC_RESTART_COUNT" in environment


def _is_left_alone(place: Place, environment: Mapping[str, str]) -> bool:
    """Return whether nothing is served or said: mpirun ends the ranks of several machines itself, as torchrun does."""
    joined = bool(_arrived) or torch_dist.is_initialized()
    return joined or stopped_by_launcher(environment) or needs_exchange(place, environment)


@contextmanager
def together(place: Place, address: Address, timeout: timedelta, environment: Mapping[str, str]) -> Iterator[None]:
    """Run the block when all ranks are there; rank 0 serves the store until it ends.

    Raises ConfigError if a rank has ended instead, and RuntimeError after the timeout.
    """
    if stopped_by_launcher(environment):
        yield
        return
    store = store_at(address, place.is_first, timeout, place.n_ranks)
    _arrived[:] = [address]
    _wait(place, store, timeout.total_seconds())
    yield
    _served.clear()
    del store  # torch has one of its own by now, which shares the server


def serve_early(place: Place, timeout_s: float, environment: Mapping[str, str]) -> None:
    """Let rank 0 serve its store from now on, so that ranks that fail while it prepares data find it.

    What keeps it from that is reported when it joins.
    """
    if place.n_ranks == 1 or not place.is_first or _is_left_alone(place, environment):
        return
    with suppress(ConfigError, OSError, RuntimeError):
        address = address_for(place, environment)
        found, _ = network.resolve(address.host)
        if any(reaching.is_own(ip) for ip in found):
            _served[:] = [store_at(address, True, timedelta(seconds=timeout_s), place.n_ranks)]


def say_ended(place: Place, code: int, environment: Mapping[str, str], longest_s: float = _LONGEST_SAYING_S) -> bool:
    """Say at rank 0's store that this rank ended before it joined; return whether rank 0 could be reached."""
    if place.is_first or _is_left_alone(place, environment):
        return False
    try:
        address = address_for(place, environment)
    except ConfigError:
        return False
    until, has_said = time.monotonic() + longest_s, False
    while True:
        with suppress(OSError, RuntimeError):
            socket.create_connection((address.host, address.port), _CONNECT_S).close()
            store = store_at(address, False, timedelta(seconds=_CONNECT_S), None)
            store.add(_N_ENDED, 1)
            ended = {"rank": place.rank, "code": code, "host": os.uname().nodename}
            store.compare_set(_ENDED, "", json.dumps(ended))  # the first one keeps its word
            return True
        if time.monotonic() >= until:
            return False
        if not has_said:
            line = f"has ended, and waits up to {longest_s:.0f} s for rank 0 at {address} to say so; Ctrl-C ends it"
            print(f"whet: rank {place.rank} of {place.n_ranks} {line}", file=sys.stderr, flush=True)
            has_said = True
        time.sleep(_LONGEST_PAUSE_S)


def store_at(address: Address, serves: bool, timeout: timedelta, n_ranks: int | None) -> Any:
    """Return the store at this address, which this process serves or connects to.

    torch's stores listen on every interface of the machine; that of ranks on one machine listens on loopback alone. A
    second store of the same process shares the server of the first.
    """
    listener = _listening_on_loopback(address.port) if serves and address.on_loopback else None
    more: Any = {} if listener is None else {"master_listen_fd": listener}
    return torch_dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        address.host, address.port, n_ranks, serves, timeout, wait_for_workers=False, multi_tenant=True, **more
    )


def _listening_on_loopback(port: int) -> int | None:
    """Return the number of a socket that listens there; None if the port is taken, by an earlier store or a stranger."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):
            listener.bind((LOCALHOST, port))
            listener.listen()
            return listener.detach()
    return None


def _wait(place: Place, store: Any, timeout_s: float) -> None:
    until, pause_s = time.monotonic() + timeout_s, _SHORTEST_PAUSE_S
    n_arrived = store.add(_ARRIVED, 1)
    while n_arrived < place.n_ranks:
        if store.check([_ENDED]):
            ended = json.loads(store.get(_ENDED))
            leave_together(place, store, _FAREWELL_S)
            raise _ended_before(place, ended)
        if time.monotonic() >= until:
            raise RuntimeError(f"{n_arrived} of {place.n_ranks} ranks arrived")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        n_arrived = store.add(_ARRIVED, 0)


def leave_together(place: Place, store: Any, longest_s: float) -> None:
    """Keep the store of rank 0 for so long, until the others know what it knows, or have ended too."""
    store.add(_READ, 1)
    until = time.monotonic() + longest_s
    while place.is_first and time.monotonic() < until:
        if store.add(_READ, 0) + store.add(_N_ENDED, 0) >= place.n_ranks:
            return
        time.sleep(_SHORTEST_PAUSE_S)


def _ended_before(place: Place, ended: Mapping[str, Any]) -> ConfigError:
    return ConfigError(
        what=f"rank {ended['rank']} of {place.n_ranks} ended before it joined the others",
        got=f"exit code {ended['code']} on {ended['host']}",
        why="ranks begin a run together, and this one will not come",
        fix=f"read the messages of rank {ended['rank']} for the cause, then start all ranks again",
    )
