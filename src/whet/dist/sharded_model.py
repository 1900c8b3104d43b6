"""A model whose weights and gradients the ranks share, by torch's `fully_shard` (Zhao et al. 2023, arXiv:2304.11277).

A block has its weights while it computes, and what is in no block while a loss is computed. Between two steps each rank
has its rows alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import _composable_state as composable
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_group
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

from whet.dist.group import Group

_THEIRS = "torch.distributed.fsdp"
_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params", STATE_KEY, REGISTRY_KEY)


class _Place(NamedTuple):
    module: nn.Module
    name: str
    parameter: nn.Parameter
    """The complete parameter, whose memory is empty while the ranks share it."""


class _Computation(nn.Module):
    """Holds the model; a call of it is a computation with the weights that are in no block."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], Any]) -> Any:
        return work()


class ShardedModel:
    """Weights of `model` that the ranks share. `blocks` are modules that are called, with parameters of their own."""

    def __init__(
        self, group: Group, model: nn.Module, blocks: Sequence[nn.Module], *, keeps: bool, offloads: bool = False
    ) -> None:
        """Share the weights from now on. `keeps`: blocks keep their weights from forward to backward.

        `offloads`: this rank's rows, and the sums of their gradients, are in the host's memory, for a model on a GPU.
        """
        self._group, self.model = group, model
        self._places = [
            _Place(module, name, parameter)
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        self.parameters = list({id(one.parameter): one.parameter for one in self._places}.values())
        """The complete parameters; their memory is empty, except within `complete`."""
        for one in self.parameters:
            one.data = one.data.contiguous()
        self._computation, self._inside = _Computation(model), False
        self._units = [*blocks, self._computation]
        self._device = self.parameters[0].device
        mesh = DeviceMesh.from_group(_get_default_group(), self._device.type)
        pins = self._device.type == "cuda"
        where = CPUOffloadPolicy(pin_memory=pins) if offloads else OffloadPolicy()
        for unit in self._units:
            kind = type(unit)
            keeps_unit = keeps or unit is self._computation
            sharded: Any = fully_shard(unit, mesh=mesh, reshard_after_forward=not keeps_unit, offload_policy=where)
            sharded.set_gradient_divide_factor(1.0)  # losses are divided by the targets of all ranks
            sharded.set_force_sum_reduction_for_comms(True)  # gloo can add alone
            unit.__class__ = kind  # torch gives it a class of its own, which whet's operators would not know
        self._shares = {id(one.parameter): one.module._parameters[one.name] for one in self._places}
        self._hooks: list[tuple[dict[int, Any], int, Any]] = []
        self._empty()

    def share_of(self, parameter: nn.Parameter) -> Tensor:
        """Return this rank's rows of a complete parameter."""
        return self._share(parameter).detach().to_local()

    def gradient_of(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the rows of its gradient, summed over the ranks; None if it has none."""
        gradient = self._share(parameter).grad
        return None if gradient is None else gradient.to_local()

    def shape_of(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """Return the shape that it has with the rows of all ranks."""
        return tuple(self._share(parameter).shape)

    def is_trained(self, parameter: nn.Parameter) -> bool:
        """Return whether somebody asks for a gradient now."""
        return self._share(parameter).requires_grad

    def has_hooks(self, parameter: nn.Parameter) -> bool:
        """Return whether somebody hooked its gradient, before it was shared or since."""
        both = (parameter, self._share(parameter))
        return any(one._backward_hooks or one._post_accumulate_grad_hooks for one in both)

    def compute(self, work: Callable[[], Any]) -> Any:
        """Return what `work` returns, which may call the model and read weights that are in no block."""
        if self._inside:
            return work()
        self._inside = True
        try:
            return self._computation(work)
        finally:
            self._inside = False

    @contextmanager
    def complete(self, *, everywhere: bool = True) -> Iterator[None]:
        """Put the complete weights into the model for the block, on rank 0 or on every rank. All ranks call this."""
        self._collect(everywhere=everywhere)
        try:
            yield
        finally:
            self._put_back()

    def finish(self) -> None:
        """Leave the complete weights in the model of every rank, and nothing of torch's."""
        self._collect(everywhere=True)
        for module in self._computation.modules():
            for name in _MARKS:
                module.__dict__.pop(name, None)
            composable._module_state_mapping.pop(module, None)
        self._hooks = []

    def _share(self, parameter: nn.Parameter) -> Any:
        return self._shares[id(parameter)]

    def _collect(self, *, everywhere: bool) -> None:
        wanted = everywhere or self._group.rank == 0
        with self._group.noticing("collected the weights"), torch.no_grad():
            for one in self.parameters:
                found = self._share(one).detach().to(self._device).full_tensor()
                if wanted:  # of a tensor that does not divide evenly, torch returns a part of a larger one
                    is_part = found.untyped_storage().nbytes() != found.numel() * found.element_size()
                    one.data = found.clone() if is_part else found
                del found
        if not wanted:
            return
        for place in self._places:
            place.module._parameters[place.name] = place.parameter
        for module in self._computation.modules():
            self._hooks += _without_theirs(module)

    def _put_back(self) -> None:
        for place in self._places:
            place.module._parameters[place.name] = self._shares[id(place.parameter)]
        for hooks, number, hook in self._hooks:
            hooks[number] = hook
        self._hooks = []
        self._empty()

    def _empty(self) -> None:
        for one in self.parameters:
            one.data = one.data.new_empty(0)
            one.grad = None


def _without_theirs(module: nn.Module) -> list[tuple[dict[int, Any], int, Any]]:
    """Take torch's hooks off the module, and return them with where they were."""
    taken = []
    for name, hooks in module.__dict__.items():
        if name.endswith("_hooks") and isinstance(hooks, dict):
            theirs = [n for n, hook in hooks.items() if _home(hook).startswith(_THEIRS)]
            taken += [(hooks, number, hooks.pop(number)) for number in theirs]
    return taken


def _home(hook: Any) -> str:
    return getattr(getattr(hook, "hook", hook), "__module__", None) or ""
