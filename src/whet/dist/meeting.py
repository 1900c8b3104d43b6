"""Where the ranks of a run meet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from whet.config.ranks import Place, rank_variables
from whet.dist.launchers import first_rank, slurm
from whet.dist.launchers.parent import launcher_pid
from whet.errors import ConfigError

GLOO, LOOPBACK = "GLOO_SOCKET_IFNAME", "lo"
LOCALHOST = "127.0.0.1"
_LOWEST_PORT, _N_PORTS = 20000, 20000
_USUAL_PORT = 29500
"""Of torchrun, transformers and accelerate, for runs whose user gives MASTER_ADDR alone."""


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


def address_for(place: Place, environment: Mapping[str, str]) -> Address:
    """Return where the ranks meet: as the launcher says, as it lets them find out, or here if all ranks are here.

    Ranks of one machine meet at 127.0.0.1, whatever MASTER_ADDR says: nobody else can reach that. Only torchrun's agent,
    which may serve their store, listens where it likes. Without MASTER_PORT they take a port that follows from Slurm's
    step, or from the process that started them all.
    """
    host, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    on_loopback = place.one_machine and not served_by_agent(environment)
    if on_loopback:
        host = host and LOCALHOST
    given = "RANK" in environment and "WORLD_SIZE" in environment
    if host and port:
        if not port.isdigit() or not 0 < int(port) < 65536:
            raise ConfigError(
                what="MASTER_PORT is not a port", got=port, why="rank 0 waits for the others there",
                fix="set it to a free port above 1024, the same for all ranks",
            )  # fmt: skip
        return Address(host, int(port), from_launcher=given, on_loopback=on_loopback)
    if host and not place.one_machine:
        return Address(host, _USUAL_PORT, from_launcher=False)
    if not place.one_machine:
        try:
            return Address(*first_rank.find(place, environment), from_launcher=False)
        except first_rank.UnknownError as error:
            raise _unknown(place, str(error)) from error
    number = int(port) if port and port.isdigit() else _port_here(place, environment)
    return Address(host or LOCALHOST, number, from_launcher=False, on_loopback=on_loopback)


def served_by_agent(environment: Mapping[str, str]) -> bool:
    """Return whether the store in which the ranks meet is one that torchrun's agent serves."""
    return environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def needs_exchange(place: Place, environment: Mapping[str, str]) -> bool:
    """Return whether a rank learns where the ranks meet by an exchange with all others, for which each of them waits."""
    return not place.one_machine and not environment.get("MASTER_ADDR") and place.launcher != "Slurm"


def _port_here(place: Place, environment: Mapping[str, str]) -> int:
    """Return a port that all ranks of this run know, and other runs on this machine hardly ever use."""
    if place.launcher == "Slurm" and environment.get("SLURM_JOB_ID"):
        return slurm.port(environment)
    return _LOWEST_PORT + launcher_pid(rank_variables(environment)) % _N_PORTS


def _unknown(place: Place, why: str) -> ConfigError:
    return ConfigError(
        what="it is not known where the ranks meet",
        got=f"rank {place.rank} of {place.n_ranks}, started by {place.launcher}; MASTER_ADDR is not set; {why}",
        why="ranks on several machines find each other at an address of rank 0's machine",
        fix="set MASTER_ADDR to the name or address of rank 0's machine and MASTER_PORT to a free port there, for all "
        "ranks (mpirun of Intel MPI and MPICH: -genv NAME VALUE; of Open MPI: -x NAME=VALUE), or use whet launch",
    )


def not_met(place: Place, address: Address, waited_s: float, error: BaseException) -> ConfigError:
    """Return the error of ranks that did not find each other."""
    return ConfigError(
        what=f"rank {place.rank} of {place.n_ranks} did not meet the others at {address}",
        got=str(error).splitlines()[0] if str(error) else type(error).__name__,
        why=f"all ranks have to join within {waited_s:.0f} seconds (--ddp_timeout)",
        fix="check that every rank was started, that MASTER_ADDR is reachable from all machines and MASTER_PORT is free "
        f"on rank 0's; {GLOO} must name, on each machine, the interface that leads to the others; a process alone "
        "needs RANK and WORLD_SIZE taken out: env -u RANK -u WORLD_SIZE",
    )
