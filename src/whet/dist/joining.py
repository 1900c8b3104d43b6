"""Where the ranks of a run meet, if their launcher does not say it, and through which network interface.

torch joins them (`env://`, `tcp://`). What is decided here: an address for MPI launchers and Slurm, which set none; the
loopback interface for ranks of one machine, so that nobody outside can take the place of a rank; and for gloo the
interface that leads to rank 0, because gloo looks its own host name up, which on many machines is 127.0.1.1 or unknown.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as torch_dist

from whet.config.ranks import Place, rank_variables, restarted
from whet.errors import ConfigError, escape_controls
from whet.hardware import network
from whet.log import logger

_GLOO, _LOOPBACK, _LOCALHOST = "GLOO_SOCKET_IFNAME", "lo", "127.0.0.1"
_USUAL_PORT = 29500
"""Of torchrun, transformers and accelerate, for runs whose user gives MASTER_ADDR alone."""
_LOWEST_PORT, _N_PORTS = 20000, 20000
_SLURM_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_FIRST_ENTRY = re.compile(r"(?:[^,\[\]]|\[[^\[\]]+\])+(?=,|$)")
"""The first entry of Slurm's list: node7, node[01-03,7]x or rack[1-2]node[1-3]."""
_CHOICES = re.compile(r"\[([^\[\],-]+)[^\[\]]*\]")
_SAYS_AFTER_S = 5.0


@dataclass(frozen=True)
class Address:
    """The host and port at which rank 0 waits for the others."""

    host: str
    port: int
    from_launcher: bool
    """Whether the launcher set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""
    on_loopback: bool = False
    """Whether all ranks are processes of this machine, and nobody else can reach the address."""

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def init_method(self) -> str:
        """How torch is asked to join the ranks there."""
        return "env://" if self.from_launcher and not self.on_loopback else f"tcp://{self}"


def address_for(place: Place, environment: Mapping[str, str]) -> Address:
    """Return where the ranks meet: as the launcher says, on the first node of Slurm, or here if all ranks are here.

    Ranks of one machine meet at 127.0.0.1, whatever MASTER_ADDR says: nobody else can reach that. Only the agent of
    torchrun and whet launch, which serves their store, listens where it likes. Raises ConfigError if it is not known.
    """
    host, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if port and not (port.isdigit() and 0 < int(port) < 65536):
        raise ConfigError(
            what="MASTER_PORT is not a port", got=port, why="rank 0 waits for the others there",
            fix="set it to a free port above 1024, the same for all ranks",
        )  # fmt: skip
    from_launcher = bool(host and port) and "RANK" in environment and "WORLD_SIZE" in environment
    if place.one_machine and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        number = int(port) if port else _port_of_run(environment) or _port_of_launcher(environment)
        return Address(_LOCALHOST, number, from_launcher, on_loopback=True)
    if host:
        return Address(host, int(port or _USUAL_PORT), from_launcher)
    if (first := _first_of_slurm(environment)) is not None:
        return Address(first, int(port or _port_of_run(environment) or _USUAL_PORT), from_launcher=False)
    raise ConfigError(
        what="it is not known where the ranks meet",
        got=f"rank {place.rank} of {place.n_ranks}, started by {place.launcher}; MASTER_ADDR is not set",
        why="ranks on several machines find each other at an address of rank 0's machine",
        fix=f"set MASTER_ADDR to the name or address of rank 0's machine, for all ranks ({_HOW.get(place.launcher, _ANY)}"
        f"); MASTER_PORT too if {_USUAL_PORT} is not free there; or use whet launch --hosts",
    )


_ANY = "export MASTER_ADDR=NAME"
_HOW: Mapping[str | None, str] = {
    "Intel MPI or MPICH": "mpirun -genv MASTER_ADDR NAME ...",
    "Open MPI": "mpirun -x MASTER_ADDR=NAME ...",
}
"""Launcher -> how it gives all ranks a variable."""


def store_of_attempt(place: Place, address: Address, timeout: timedelta) -> Any:
    """Return the store of ranks of this machine that were started again, with names of this attempt's own; else None.

    torchrun keeps one store for all attempts, in which the addresses of the ranks that failed still are.
    """
    if not (place.one_machine and restarted() and address.init_method == "env://"):
        return None
    store = torch_dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        address.host, address.port, place.n_ranks, False, timeout
    )
    attempt = f"whet/attempt-{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    return torch_dist.PrefixStore(attempt, store)  # pyright: ignore[reportPrivateImportUsage]


@contextmanager
def met(place: Place, address: Address, timeout: timedelta) -> Iterator[None]:
    """Join the ranks in the block; a line says that this one waits. Raises ConfigError if they do not find each other.

    torch's stores listen on every interface of the machine. That of ranks on one machine listens on loopback alone: the
    store that torch makes in the block shares the server of this one, which has the same port.
    """
    timeout_s = timeout.total_seconds()
    line = f"rank {place.rank} of {place.n_ranks} waits at {address} for ranks that have not joined; for up to "
    line += f"{timeout_s:.0f} s (--ddp_timeout)"
    timer = threading.Timer(_SAYS_AFTER_S, _say, (line,))
    timer.daemon = True
    timer.start()
    try:
        store = _served_on_loopback(address, timeout) if place.is_first and address.on_loopback else None
        yield
        del store
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            what=f"rank {place.rank} of {place.n_ranks} did not meet the others at {address}",
            got=str(error).splitlines()[0] if str(error) else type(error).__name__,
            why=f"all ranks have to join within {timeout_s:.0f} seconds (--ddp_timeout)",
            fix="check that every rank was started, that MASTER_ADDR is an address of rank 0's machine which all machines "
            f"reach, and that MASTER_PORT is free there; {_GLOO} must name, on each machine, the interface that leads to "
            "the others; a process alone needs RANK and WORLD_SIZE taken out: env -u RANK -u WORLD_SIZE",
        ) from error
    finally:
        timer.cancel()


def choose_interface(place: Place, address: Address, environment: MutableMapping[str, str]) -> None:
    """Make gloo use the interface that leads to rank 0, unless GLOO_SOCKET_IFNAME names one.

    A machine to which MASTER_ADDR means itself by loopback, as it often does on rank 0's own, takes its only other
    interface. Raises ConfigError if this machine has no interface of the given name, or several to choose from.
    """
    own = network.addresses()
    there = {name for _, name in socket.if_nameindex()}
    if given := environment.get(_GLOO):
        if missing := sorted(set(given.split(",")) - there):
            have = ", ".join(f"{name} ({ip})" for ip, name in own.items()) or "none but loopback"
            raise _unclear(
                place, f"{_GLOO} names a network interface that this machine does not have",
                f"{','.join(missing)}; {os.uname().nodename} has {have}",
            )  # fmt: skip
        return
    name = _LOOPBACK if place.one_machine else _leading_to(place, address, own)
    if name in there:
        environment[_GLOO] = name
        logger.info("gloo uses the interface %s", name)


def _leading_to(place: Place, address: Address, own: Mapping[str, str]) -> str:
    """Return the interface that leads to rank 0; "" if that is not known here, and gloo is left to choose."""
    found, _ = network.resolve(address.host)
    names = [network.interface_towards(ip, {**own, _LOCALHOST: _LOOPBACK})[1] for ip in found]
    leads_out = [name for name in names if name not in ("", _LOOPBACK)]
    if leads_out or not found:
        return next(iter(leads_out), "")
    others = sorted(set(own.values()))
    if len(others) == 1:
        return others[0]
    raise _unclear(
        place, "it is not known which network interface leads to the other ranks",
        f"MASTER_ADDR={address.host} is {', '.join(found)} on {os.uname().nodename}, which has "
        f"{', '.join(others) or 'no interface but loopback'}",
    )  # fmt: skip


def _unclear(place: Place, what: str, got: str) -> ConfigError:
    return ConfigError(
        what=what,
        got=f"{got} (rank {place.rank} of {place.n_ranks})",
        why="gloo connects the ranks through one interface of each machine, whose names may differ",
        fix=f"set {_GLOO} on each machine to its own interface, or set MASTER_ADDR to rank 0's address in the network "
        f"that all machines share, and leave {_GLOO} out",
    )


def _served_on_loopback(address: Address, timeout: timedelta) -> Any:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        more: dict[str, Any] = {}
        with suppress(OSError):  # an earlier store of this process has the port, or torch says that somebody else has
            listener.bind((_LOCALHOST, address.port))
            listener.listen()
            more["master_listen_fd"] = listener.detach()
    return torch_dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        address.host, address.port, None, True, timeout, wait_for_workers=False, multi_tenant=True, **more
    )


def _say(line: str) -> None:
    """Print a line on standard error: the log of every rank but rank 0 holds errors alone."""
    print(f"whet: {escape_controls(line)}", file=sys.stderr, flush=True)


def _first_of_slurm(environment: Mapping[str, str]) -> str | None:
    """Return the first node of Slurm's list, such as rack1node09 of rack[1-2]node[09-10],login; None if there is none."""
    listed = next((environment[name] for name in _SLURM_LISTS if environment.get(name)), "")
    entry = _FIRST_ENTRY.match(listed.strip())
    name = _CHOICES.sub(r"\1", entry[0]).strip() if entry else ""
    return name if name and not set(name) & set("[]") else None


def _port_of_run(environment: Mapping[str, str]) -> int | None:
    """Return a port that follows from Slurm's step, so that the steps of a node do not meet each other."""
    job, step = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_STEP_ID", "")
    if not job.isdigit():
        return None
    return _LOWEST_PORT + (int(job) * 7 + int(step if step.isdigit() else 0)) % _N_PORTS


def _port_of_launcher(environment: Mapping[str, str]) -> int:
    """Return a port that follows from the process that started all ranks of this machine.

    It is the nearest one above this process that is no part of the rank. Parts of the rank, such as a script that does
    not `exec` its last command, have the rank's variables; one that cannot be read belongs to somebody else.
    """
    own, pid = rank_variables(environment), os.getppid()
    with suppress(OSError):
        while own and pid > 1 and own.items() <= _environment_of(pid).items():
            pid = int(Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[1])
    return _LOWEST_PORT + pid % _N_PORTS


def _environment_of(pid: int) -> dict[str, str]:
    text = Path(f"/proc/{pid}/environ").read_bytes().decode("utf-8", "surrogateescape")
    return {name: value for name, _, value in (entry.partition("=") for entry in text.split("\0"))}
