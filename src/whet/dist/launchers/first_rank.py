"""Where rank 0 listens, for launchers that start ranks on several machines and do not say it."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping, Sequence

from whet.config.ranks import Place
from whet.dist.launchers import pmi, pmix, slurm
from whet.hardware.network import interface_towards, networks


class UnknownError(Exception):
    """It cannot be found; the message says why."""


def find(place: Place, environment: Mapping[str, str]) -> tuple[str, int]:
    """Return an address and port of rank 0's machine that all ranks can use; raises UnknownError.

    Every rank of the run has to call this: where the launcher offers an exchange, they tell each other their networks.
    """
    if place.launcher == "Slurm":
        return _of_slurm(environment)
    if pmi.serves(environment):
        try:
            return _common(pmi.exchange(_own(place), environment))
        except pmi.PMIError as error:
            raise UnknownError(f"the launcher's exchange failed: {error}") from error
    if pmix.serves(environment):
        try:
            return _common(pmix.exchange(_own(place), place.n_ranks))
        except pmix.PMIxError as error:
            raise UnknownError(f"the launcher's exchange failed: {error}") from error
    raise UnknownError(f"{place.launcher} offers no exchange that whet knows")


def common_network(of_ranks: Sequence[Sequence[str]]) -> str | None:
    """Return rank 0's address in the first of its networks in which every rank has an address; None if none is.

    A network in which two machines have the same address, as with the bridges of Docker and libvirt, joins nobody.
    """
    for text in _of_one_machine(of_ranks):
        network = ipaddress.ip_interface(text).network
        if all(any(ipaddress.ip_interface(other).network == network for other in own) for own in of_ranks):
            found = [ipaddress.ip_interface(other) for own in _machines(of_ranks) for other in own]
            ours = [one.ip for one in found if one.network == network]
            if len(ours) == len(set(ours)):
                return text.partition("/")[0]
    return None


def _machines(of_ranks: Sequence[Sequence[str]]) -> set[frozenset[str]]:
    """Return the addresses of each machine: ranks of one machine have the same."""
    return {frozenset(own) for own in of_ranks}


def _of_one_machine(of_ranks: Sequence[Sequence[str]]) -> list[str]:
    """Return the addresses of rank 0's machine that no other machine has."""
    others = _machines(of_ranks) - {frozenset(of_ranks[0])}
    return [text for text in of_ranks[0] if not any(text in own for own in others)]


def _own(place: Place) -> str:
    """Return what this rank sends to the others: a free port if it is rank 0, and its networks."""
    return ",".join([str(_free_port() if place.rank == 0 else 0), *networks()])


def _common(texts: Sequence[str]) -> tuple[str, int]:
    every = [text.split(",") for text in texts]
    if not every[0][1:]:
        raise UnknownError("rank 0's machine has only loopback addresses")
    of_ranks = [own for _, *own in every]
    shared = common_network(of_ranks)
    # machines of several networks that are routed to each other: rank 0's first address, and the routes decide
    first = next(iter(_of_one_machine(of_ranks)), every[0][1])
    return shared or first.partition("/")[0], int(every[0][0])


def _of_slurm(environment: Mapping[str, str]) -> tuple[str, int]:
    """Return the address of the first node: on that node itself, the one that leads to the second."""
    names = slurm.nodes(environment)
    if len(names) < 2:
        raise UnknownError(f"Slurm's list of nodes is not understood: {slurm.listed(environment) or 'it is empty'}")
    on_first = environment.get("SLURM_NODEID") == "0"
    address = _resolved(names[1] if on_first else names[0])
    if on_first:
        address = interface_towards(address, {})[0]
    return address, slurm.port(environment)


def _resolved(name: str) -> str:
    try:
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(name, None)]
    except OSError as error:
        raise UnknownError(f"the node name {name} cannot be resolved: {error.strerror}") from error
    return found[0]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
