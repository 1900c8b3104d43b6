"""The store in which the ranks meet before their process group exists, and what they agree on there."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, MutableMapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as torch_dist

from whet.config.ranks import Place, restarted
from whet.dist.arrival import leave_together, store_at
from whet.dist.meeting import GLOO, LOOPBACK, Address, served_by_agent
from whet.errors import ConfigError
from whet.hardware import network
from whet.log import logger

_FAREWELL_S = 5.0


def opened(place: Place, address: Address, timeout: timedelta) -> Any:
    """Return the store of this run, which rank 0, or torchrun's agent, serves at the address."""
    own = store_at(address, True, timeout, None) if place.is_first and address.on_loopback else None
    if address.from_launcher and place.one_machine and restarted():
        return _after_restart(place, address, timeout)
    method = "env://" if address.from_launcher and not address.on_loopback else f"tcp://{address}"
    found = torch_dist.rendezvous(method, place.rank, place.n_ranks, timeout=timeout)  # pyright: ignore
    store, _, _ = next(iter(found))
    store.set_timeout(timeout)
    del own  # rank 0's other store has the same server by now
    return torch_dist.PrefixStore("default_pg", store)  # pyright: ignore[reportPrivateImportUsage]


def _after_restart(place: Place, address: Address, timeout: timedelta) -> Any:
    """Return the store with names of this attempt's own.

    torchrun with a fixed port keeps one store for all attempts, so that ranks would read the addresses of dead ones.
    The ranks of one machine have the same count of restarts; on several machines torch's own names are used.
    """
    store = torch_dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        address.host, address.port, place.n_ranks, place.rank == 0 and not served_by_agent(os.environ), timeout=timeout, multi_tenant=True
    )
    attempt = f"whet/attempt-{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    return torch_dist.PrefixStore(attempt, store)  # pyright: ignore[reportPrivateImportUsage]


def choose_interface(place: Place, reached: str, store: Any, environment: MutableMapping[str, str]) -> None:
    """Make gloo use the interface that leads to the other ranks, unless GLOO_SOCKET_IFNAME names one.

    gloo itself looks its own host name up, which on many machines is 127.0.1.1 or unknown. `reached` is rank 0's IP
    address as this machine knows it. A machine to which it means itself, as MASTER_ADDR often does on rank 0's own,
    takes the interface towards the others. Raises ConfigError on all ranks if one has no interface of the given name.
    """
    given = environment.get(GLOO)
    own = {**network.addresses(), "127.0.0.1": LOOPBACK}
    source, name = ("", given) if given else network.interface_towards(reached, own)
    if place.one_machine:
        name = given or LOOPBACK
    else:
        outside = "" if name in ("", LOOPBACK) else source or next((ip for ip in own if own[ip] == name), "")
        others = _shared(place, store, outside, _unknown_interface(place, given))
        if not given and not outside and others:
            name = network.interface_towards(others[0], own)[1]
    if name and not given and name in _interfaces():
        environment[GLOO] = name
        logger.info("gloo uses the interface %s", name)


def _interfaces() -> set[str]:
    return {name for _, name in socket.if_nameindex()}


def _unknown_interface(place: Place, given: str | None) -> str:
    """Return what is wrong with the interface that the user names; "" if nothing is."""
    missing = sorted(set((given or "").split(",")) - {""} - _interfaces())
    if not missing:
        return ""
    have = ", ".join(f"{name} ({address})" for address, name in network.addresses().items()) or "none but loopback"
    return f"{GLOO}={given} on rank {place.rank}, whose machine {os.uname().nodename} has {have}"


def _shared(place: Place, store: Any, address: str, problem: str) -> list[str]:
    """Return the addresses of the other ranks that have one outside of their machine, in the order of their numbers.

    Raises ConfigError if any rank has a problem: the others would wait for it in vain.
    """
    store.set(f"whet/network/{place.rank}", json.dumps({"address": address, "problem": problem}))
    if place.is_first:
        every = [json.loads(store.get(f"whet/network/{rank}")) for rank in range(place.n_ranks)]
        store.set("whet/networks", json.dumps(every))
    else:
        every = json.loads(store.get("whet/networks"))
    if problems := [one["problem"] for one in every if one["problem"]]:
        leave_together(place, store, _FAREWELL_S)
        raise _bad_interfaces(problems)
    return _others(place, every)


def _others(place: Place, every: Sequence[Mapping[str, str]]) -> list[str]:
    return [one["address"] for rank, one in enumerate(every) if rank != place.rank and one["address"]]


def _bad_interfaces(problems: Sequence[str]) -> ConfigError:
    return ConfigError(
        what=f"{GLOO} names a network interface that a machine of this run does not have",
        got="; ".join(problems),
        why="gloo connects the ranks through this interface of each machine, whose names may differ",
        fix=f"set {GLOO} on each machine to its own interface, or leave it out: the one that leads to rank 0 is then used",
    )
