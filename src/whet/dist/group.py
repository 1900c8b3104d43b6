"""The process group of a run: where its ranks meet, and their exchanges. Only this folder calls torch.distributed.

torch joins the ranks (`env://`, `tcp://`). What is decided here: an address for MPI launchers and Slurm, which set
none; the loopback interface for ranks of one machine, so that nobody outside can take the place of a rank; and for gloo
the interface that leads to rank 0, because gloo looks its own host name up, which on many machines is 127.0.1.1 or
unknown.

A rank that ends closes its connections, and the others' next collective fails: `LostRankError`. A rank that hangs is
noticed after the timeout of the group.
"""

from __future__ import annotations

import atexit
import os
import platform
import re
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as torch_dist
from torch import Tensor

from whet import system
from whet.config.ranks import LostRankError, Place, here, rank_variables, restarted
from whet.dist import messages
from whet.dist.messages import Check
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
        fix=f"set MASTER_ADDR to the name or address of rank 0's machine, for all ranks "
        f"({_HOW.get(place.launcher, _ANY)}); MASTER_PORT too if {_USUAL_PORT} is not free there; or use whet launch "
        "--hosts",
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
            fix="check that every rank was started, that MASTER_ADDR is an address of rank 0's machine which all "
            f"machines reach, and that MASTER_PORT is free there; {_GLOO} must name, on each machine, the interface "
            "that leads to the others; a process alone needs RANK and WORLD_SIZE taken out: env -u RANK -u WORLD_SIZE",
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
                f"{','.join(missing)}; {platform.node()} has {have}",
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
        f"MASTER_ADDR={address.host} is {', '.join(found)} on {platform.node()}, which has "
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
    """Return the first node of Slurm's list, such as rack1node09 of rack[1-2]node[09-10]; None if there is none."""
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
    """Return a port that follows from the process that started all ranks of this machine."""
    number, _ = system.starter(rank_variables(environment))
    return _LOWEST_PORT + number % _N_PORTS


T = TypeVar("T")
_LOST = re.compile(
    r"gloo/|Connection (closed|reset|refused)|[Tt]imed out|timeout|pair closure|Broken pipe|NCCL|recvValue|sendBytes"
    r"|failed to recv|DistStoreError|process group"
)
"""Messages with which torch's backends report a rank that is gone or does not answer."""
_LONGEST_WAIT = timedelta(days=2)
_for_waits: list[tuple[Any, Any]] = []
"""The process group of this process's run, and another one of the same ranks, whose exchanges may take long."""


@dataclass(frozen=True)
class Group:
    """The ranks of a run, with the exchanges that they need. All ranks make the same calls in the same order."""

    place: Place
    device: torch.device = torch.device("cpu")  # noqa: RUF009 it is immutable
    """Where exchanged numbers have to be: the CPU for gloo and MPI, the rank's GPU for nccl."""
    timeout: timedelta = timedelta(minutes=30)
    """How long a rank waits for the others in an exchange."""

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return self.place.rank

    @property
    def n_ranks(self) -> int:
        """The number of ranks."""
        return self.place.n_ranks

    def sum_of(self, numbers: Tensor) -> Tensor:
        """Return the sum over the ranks of a tensor of the same shape on each, where it was."""
        return self._reduced(numbers, torch_dist.ReduceOp.SUM)

    def largest_of(self, numbers: Tensor) -> Tensor:
        """Return the largest over the ranks, element by element."""
        return self._reduced(numbers, torch_dist.ReduceOp.MAX)

    def any_of(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank."""
        return bool(self.largest_of(torch.tensor([int(flag)])).item())

    def gather(self, value: T, valid: Check, *, large: bool = False) -> list[T]:
        """Return the values of all ranks, in the order of their numbers: JSON and arrays, as `messages.gather` says.

        `valid` says which values a rank may send; any other ends the run. `large`: they may be larger than 64 MiB.
        """
        with self.noticing("gathered values"):
            return messages.gather(value, valid, n_ranks=self.n_ranks, device=self.device, large=large)

    def of_first(self, value: T, valid: Check) -> T:
        """Return the value of rank 0, which is JSON or arrays; `valid` says which values it may send."""
        with self.noticing("waited for rank 0"):
            return messages.of_first(value, valid, rank=self.rank, device=self.device)

    def copy_from_first(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite these tensors with those of rank 0."""
        with self.noticing("copied weights from rank 0"), torch.no_grad():
            for tensor in tensors:
                _copy_from_first(tensor.detach())

    def gather_rows(self, rows: Tensor, most: int) -> list[Tensor]:
        """Return each rank's `rows` (most, ...), which every rank has filled up to the same number of rows."""
        assert rows.shape[0] == most
        found = [torch.empty_like(rows) for _ in range(self.n_ranks)]
        with self.noticing("gathered rows"):
            torch_dist.all_gather(found, rows.contiguous())
        return found

    def to_first(self, own: Tensor | None, rank: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """Return, on rank 0, the tensor that `rank` has as its `own`; None on the others. All ranks call it.

        They wait for each other however long it takes, as in `wait`: rank 0 writes to a disk meanwhile.
        """
        if rank == 0 or self.rank not in (0, rank):
            return own if self.rank == rank else None
        with self.noticing("collected tensors on rank 0"):
            if self.rank == rank:
                assert own is not None
                torch_dist.send(own.detach().cpu().contiguous(), dst=0, group=_group_for_waits())
                return None
            found = torch.empty(tuple(shape), dtype=dtype)
            torch_dist.recv(found, src=rank, group=_group_for_waits())
            return found

    def wait(self) -> None:
        """Wait for all ranks, however long they take: one of them may prepare data, or write to a slow disk.

        A rank that has ended is noticed at once: its connections are closed.
        """
        with self.noticing("waited for the others"):
            torch_dist.all_reduce(torch.zeros(1), group=_group_for_waits())

    def another(self) -> Any:
        """Return a process group of the same ranks, for exchanges whose order does not follow from the others'."""
        return torch_dist.new_group(timeout=self.timeout)

    def lost(self, error: RuntimeError, doing: str = "exchanged gradients") -> LostRankError | None:
        """Return the error of a lost rank that torch's error stands for; None for any other."""
        return LostRankError(self.place, doing, error) if _LOST.search(str(error)) else None

    @contextmanager
    def noticing(self, doing: str) -> Iterator[None]:
        """Raise LostRankError for an error of the block that comes from another rank."""
        try:
            yield
        except RuntimeError as error:
            lost = self.lost(error, doing)
            if lost is None:
                raise
            raise lost from error

    def _reduced(self, numbers: Tensor, how: Any) -> Tensor:
        sent = numbers.to(self.device, copy=True)
        with self.noticing("agreed with the others"):
            torch_dist.all_reduce(sent, how)
        return sent.to(numbers.device)


def _copy_from_first(own: Tensor) -> None:
    """Overwrite the tensor with that of rank 0, in any layout and type: gloo sends memory as it lies, of some types."""
    for dim, stride in enumerate(own.stride()):
        if stride == 0 and own.shape[dim] > 1:  # one element that stands for many, such as that of expand
            own = own.narrow(dim, 0, 1)
    sent = own.contiguous()
    if sent.numel():
        torch_dist.broadcast(sent.reshape(-1).view(torch.uint8), src=0)
    if sent.data_ptr() != own.data_ptr():
        own.copy_(sent)


def join(backend: str | None, timeout_s: float, *, on_gpu: bool = False) -> Group | None:
    """Return the group of this process's run, joined now unless it was before; None for a process alone.

    Raises ConfigError if this torch has no such backend, or if the ranks do not find each other.
    """
    place = here()
    if place.n_ranks == 1:
        return None
    if not torch_dist.is_available():
        raise ConfigError(
            what="this build of torch has no torch.distributed",
            got=f"rank {place.rank} of {place.n_ranks}",
            why="ranks exchange their gradients through it",
            fix="install torch from its own packages, or start whet once, without a launcher",
        )
    if not torch_dist.is_initialized():
        _join(place, _backend(backend, on_gpu=on_gpu), timedelta(seconds=timeout_s))
    _group_for_waits()
    name = torch_dist.get_backend()
    gpu = torch.device("cuda", place.local_rank % torch.cuda.device_count()) if on_gpu else None
    if gpu is not None:
        torch.cuda.set_device(gpu)
    device = gpu if gpu is not None and "nccl" in name else torch.device("cpu")
    return Group(place, device, timedelta(seconds=timeout_s))


def _group_for_waits() -> Any:
    """Return the process group of waits, on the CPU; it is made once, by all ranks together."""
    run = torch_dist.distributed_c10d._get_default_group()
    if not _for_waits or _for_waits[0][0] is not run:
        backend = "gloo" if torch_dist.is_backend_available("gloo") else None
        _for_waits[:] = [(run, torch_dist.new_group(timeout=_LONGEST_WAIT, backend=backend))]
    return _for_waits[0][1]


def leave() -> None:
    """Leave the process group, if this process is in one; what other ranks still do is not waited for."""
    _for_waits.clear()
    if torch_dist.is_available() and torch_dist.is_initialized():
        torch_dist.destroy_process_group()


def _backend(asked: str | None, *, on_gpu: bool) -> str:
    name = (asked or ("nccl" if on_gpu else "gloo")).lower()
    if name == "ccl" and not torch_dist.is_backend_available(name):
        logger.warning("ddp_backend ccl: Intel's oneCCL bindings are no longer developed; the ranks exchange by gloo")
        return "gloo"
    if not torch_dist.is_backend_available(name):
        raise ConfigError(
            what="ddp_backend names a backend that this build of torch does not have",
            got=name,
            why=_why_missing(name),
            fix="use --ddp_backend gloo, which is part of every build of torch and needs nothing else",
        )
    return name


def _why_missing(name: str) -> str:
    reasons: dict[str, str] = {
        "mpi": "torch has it only when it was compiled on a machine with MPI; mpirun starts ranks that use gloo",
        "nccl": "it is for NVIDIA's GPUs, and part of torch's CUDA builds only",
    }
    have = [one for one in ("gloo", "mpi", "nccl", "ucc", "xccl") if torch_dist.is_backend_available(one)]
    return f"{reasons.get(name, 'no backend of this name is registered')}; there is {', '.join(have)}"


def _join(place: Place, backend: str, timeout: timedelta) -> None:
    address = address_for(place, os.environ)
    logger.info("joining %d ranks at %s as rank %d, by %s", place.n_ranks, str(address), place.rank, backend)
    choose_interface(place, address, os.environ)
    try:
        with met(place, address, timeout):
            store = store_of_attempt(place, address, timeout)
            torch_dist.init_process_group(
                backend, None if store is not None else address.init_method, timeout, place.n_ranks, place.rank, store
            )
            Group(place).any_of(False)
    except ConfigError:
        leave()
        raise
    if backend == "gloo":
        atexit.register(leave)  # gloo's threads may run into what the end of Python takes away
