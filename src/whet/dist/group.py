"""The process group of a run. Only the modules of this folder call torch.distributed.

A rank that ends closes its connections, and the others' next collective fails: `LostRankError`. A rank that hangs is
noticed after the timeout of the group.
"""

from __future__ import annotations

import atexit
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as torch_dist
from torch import Tensor

from whet.config.ranks import Place, here
from whet.dist import joining, messages
from whet.dist.messages import Check
from whet.errors import ConfigError, WhetError
from whet.log import logger

T = TypeVar("T")
_LOST = re.compile(
    r"gloo/|Connection (closed|reset|refused)|[Tt]imed out|timeout|pair closure|Broken pipe|NCCL|recvValue|sendBytes"
    r"|failed to recv|DistStoreError|process group"
)
"""Messages with which torch's backends report a rank that is gone or does not answer."""
_LONGEST_WAIT = timedelta(days=2)
_for_waits: list[tuple[Any, Any]] = []
"""The process group of this process's run, and another one of the same ranks, whose exchanges may take long."""


class LostRankError(WhetError):
    """Another rank ended or does not answer; the cause is in its own messages."""

    def __init__(self, place: Place, doing: str, error: BaseException, saved: str = "") -> None:
        super().__init__(
            what=f"rank {place.rank} of {place.n_ranks} lost another rank while it {doing}{saved}",
            got=str(error).splitlines()[0] if str(error) else type(error).__name__,
            why="a rank that fails or hangs stops all: no rank can finish the step alone",
            fix="read the messages of the other ranks for the cause, then start again with "
            "--resume_from_checkpoint auto, in Python trainer.train(resume_from_checkpoint=True)",
        )
        self.place, self.doing, self.error = place, doing, error


@dataclass(frozen=True)
class Group:
    """The ranks of a run, with the exchanges that they need. All ranks make the same calls in the same order."""

    place: Place
    device: torch.device = torch.device("cpu")
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
                torch_dist.broadcast(tensor.detach(), src=0)

    def gather_rows(self, rows: Tensor, most: int) -> list[Tensor]:
        """Return each rank's `rows` (most, ...), which every rank has filled up to the same number of rows."""
        assert rows.shape[0] == most
        found = [torch.empty_like(rows) for _ in range(self.n_ranks)]
        with self.noticing("gathered rows"):
            torch_dist.all_gather(found, rows.contiguous())
        return found

    def to_first(self, own: Tensor | None, rank: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """Return, on rank 0, the tensor that `rank` has as its `own`; None on the others. All ranks call it."""
        if rank == 0 or self.rank not in (0, rank):
            return own if self.rank == rank else None
        with self.noticing("collected tensors on rank 0"):
            if self.rank == rank:
                assert own is not None
                torch_dist.send(own.detach().to(self.device).contiguous(), dst=0)
                return None
            found = torch.empty(tuple(shape), dtype=dtype, device=self.device)
            torch_dist.recv(found, src=rank)
            return found.cpu()

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
    run = torch_dist.distributed_c10d._get_default_group()  # noqa: SLF001
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
    address = joining.address_for(place, os.environ)
    logger.info("joining %d ranks at %s as rank %d, by %s", place.n_ranks, str(address), place.rank, backend)
    joining.choose_interface(place, address, os.environ)
    try:
        with joining.met(place, address, timeout):
            store = joining.store_of_attempt(place, address, timeout)
            torch_dist.init_process_group(
                backend, None if store is not None else address.init_method, timeout, place.n_ranks, place.rank, store
            )
            Group(place).any_of(False)
    except ConfigError:
        leave()
        raise
    if backend == "gloo":
        atexit.register(leave)  # gloo's threads may run into what the end of Python takes away
