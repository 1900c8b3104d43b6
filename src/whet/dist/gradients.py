"""Sums gradients over the ranks while the backward pass computes them.

The buckets and the overlap are those of torch's DistributedDataParallel (Li et al. 2020, arXiv:2006.15704). It is not
wrapped around the model: it only watches the loss of a step's last micro-batch, so models are called as ever.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from whet.dist.group import Group

_POWERSGD_RANK, _POWERSGD_START = 4, 10
_DEFAULT_BUCKET_MB = 4
"""The last bucket is sent after the backward pass: at 1 Gbit/s 25 MiB take 0.2 s, and 4 MiB take 0.03 s."""


@dataclass(frozen=True, kw_only=True)
class ReduceOptions:
    """How gradients are exchanged."""

    comm_hook: str = "none"
    """Form in which they travel: none (as they are), fp16, bf16, powersgd."""
    bucket_mb: int | None = None
    """Size of a bucket in MiB; None: 4."""
    find_unused: bool | None = None
    """Whether parameters may have no gradient in a step; None: yes."""


class _Watched(nn.Module):
    """Has the parameters of the model, and returns the loss that it is called with."""

    def __init__(self, model: nn.Module, *, searched: bool) -> None:
        super().__init__()
        self.model = model
        if searched:  # torch warns of a search for unused parameters that finds none
            self.never_used = nn.Parameter(torch.zeros(1, device=next(model.parameters()).device))

    def forward(self, loss: Tensor) -> Tensor:
        return loss


class GradientSum:
    """Sums the gradients of a model's parameters over the ranks, except those of `apart`."""

    def __init__(
        self, group: Group, model: nn.Module, options: ReduceOptions, apart: Sequence[nn.Parameter] = ()
    ) -> None:
        self._group = group
        left_out = {id(one) for one in apart}
        self.parameters = [one for one in model.parameters() if one.requires_grad and id(one) not in left_out]
        group.copy_from_first([*model.parameters(), *model.buffers()])
        self._watching = False
        self._ddp = _wrapped(group, model, options, left_out) if self.parameters else None

    def watch(self, loss: Tensor) -> Tensor:
        """Return the loss; its backward pass, the last of a step, sums the gradients."""
        if self._ddp is None:
            return loss
        self._watching = True
        return self._ddp(loss)

    def finish(self, others: Sequence[nn.Parameter] = ()) -> bool:
        """Exchange the gradients that no watched loss has; return whether a loss was watched.

        Without one, a backward pass of the user's own has left a mean over this rank's rows in each gradient, so the
        gradients are averaged. `others` are parameters that were frozen when the training began.
        """
        watched, self._watching = self._watching, False
        if not watched and self._ddp is not None:
            self._exchange(self.parameters, 1 / self._group.n_ranks)
        self._exchange(others, 1.0 if watched else 1 / self._group.n_ranks)
        return watched or self._ddp is None

    def _exchange(self, parameters: Sequence[nn.Parameter], share: float) -> None:
        for parameter in parameters:
            if self._group.any_of(parameter.grad is not None):
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = self._group.sum_of(gradient).mul_(share)


def _wrapped(group: Group, model: nn.Module, options: ReduceOptions, left_out: set[int]) -> DistributedDataParallel:
    searched = options.find_unused is not False
    watched = _Watched(model, searched=searched)
    names = [name for name, one in watched.named_parameters() if id(one) in left_out]
    names += [name for name, _ in watched.named_buffers()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(watched, names)
    with group.noticing("prepared the exchange of gradients"), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer releases name broadcast_buffers otherwise
        ddp = DistributedDataParallel(
            watched,
            broadcast_buffers=False,
            init_sync=False,
            bucket_cap_mb=options.bucket_mb or _DEFAULT_BUCKET_MB,
            find_unused_parameters=searched,
            gradient_as_bucket_view=True,
        )
    state, hook = _HOOKS[options.comm_hook](group)
    hook.__annotations__.clear()  # torch compares them with its classes, and these are texts
    ddp.register_comm_hook(state, hook)
    return ddp


Hook = Callable[[Any, Any], Any]


def _plain(group: Group) -> tuple[Any, Hook]:
    def summed(_: Any, bucket: Any) -> Any:
        return _sum_later(bucket.buffer())

    return group, summed


def _in_fp16(group: Group) -> tuple[Any, Hook]:
    def summed_in_half(_: Any, bucket: Any) -> Any:
        buffer = bucket.buffer()
        return _sum_later(buffer.to(torch.float16)).then(lambda done: buffer.copy_(done.value()))

    return group, summed_in_half


def _in_bf16(group: Group) -> tuple[Any, Hook]:
    """Send bf16, add in fp32: gloo adds bf16 numbers in bf16, one rank after the other.

    Each rank adds one share of the bucket and sends the sum on. A thread of its own does this, one bucket at a time, so
    that the order of the exchanges is the same on all ranks.
    """
    own, thread = group.another(), ThreadPoolExecutor(1, thread_name_prefix="whet-gradients")

    def summed_from_bf16(_: Any, bucket: Any) -> Any:
        buffer, later = bucket.buffer(), torch.futures.Future()
        thread.submit(_fulfil, later, lambda: _sum_as_bf16(group.n_ranks, own, buffer))
        return later

    return group, summed_from_bf16


def _sum_as_bf16(n_ranks: int, own: Any, buffer: Tensor) -> Tensor:
    share = -(-buffer.numel() // n_ranks)
    sent = torch.zeros(n_ranks * share, dtype=torch.bfloat16, device=buffer.device)
    sent[: buffer.numel()] = buffer
    received = torch.empty_like(sent)
    torch_dist.all_to_all_single(received, sent, group=own)
    total = received.view(n_ranks, share).float().sum(0).to(torch.bfloat16)
    torch_dist.all_gather(list(sent.view(n_ranks, share)), total, group=own)
    return buffer.copy_(sent[: buffer.numel()])


def _powersgd(group: Group) -> tuple[Any, Hook]:
    """PowerSGD (Vogels et al. 2019, arXiv:1905.13727), in torch's version, which returns means.

    It starts exchanges when others end, in an order that would differ between ranks; so each bucket is waited for, and
    has a group of its own.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    state = powerSGD_hook.PowerSGDState(
        group.another(), matrix_approximation_rank=_POWERSGD_RANK, start_powerSGD_iter=_POWERSGD_START
    )

    def summed(state: Any, bucket: Any) -> Any:
        later = torch.futures.Future()
        later.set_result(powerSGD_hook.powerSGD_hook(state, bucket).wait().mul_(group.n_ranks))
        return later

    return state, summed


_HOOKS: dict[str, Callable[[Group], tuple[Any, Hook]]] = {
    "none": _plain, "fp16": _in_fp16, "bf16": _in_bf16, "powersgd": _powersgd,
}  # fmt: skip


def _sum_later(buffer: Tensor) -> Any:
    """Return torch's future of the sum over the ranks, in place."""
    work = torch_dist.all_reduce(buffer, async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])


def _fulfil(later: Any, work: Callable[[], Tensor]) -> None:
    try:
        later.set_result(work())
    except Exception as error:  # torch raises it in the backward pass
        later.set_exception(error)
