"""DeepSpeed's engine around a model and an optimizer: it sums gradients, and shares what ranks hold (ZeRO).

The model is called as ever: the engine only watches the loss of each micro-batch. Names and shapes of the optimizer's
state are those of the complete parameters; DeepSpeed itself steps over flat parts of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from whet.dist.group import Group
from whet.optional import require

State = dict[str, Any]


class _Watched(nn.Module):
    """Has the parameters of the model, and returns the loss that it is called with."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, loss: Tensor) -> Tensor:
        return loss


class ZeroEngine:
    """One rank's part of a model and an optimizer that DeepSpeed shares between the ranks."""

    def __init__(
        self, group: Group, model: nn.Module, optimizer: Optimizer, config: Mapping[str, Any],
        states: Mapping[nn.Parameter, State],
    ) -> None:  # fmt: skip
        """Share the complete model and optimizer; `states` is the optimizer's state of each parameter."""
        deepspeed = _library()
        self._group, self.model, self._base = group, model, optimizer
        self._is_complete = False
        self.stage = int(config["zero_optimization"]["stage"])
        self._before = {one: set(vars(one)) for one in model.parameters()}
        self._tables = {module: module._parameters for module in model.modules()}
        with group.noticing("started DeepSpeed"):
            engine, *_ = deepspeed.initialize(
                model=_Watched(model), optimizer=optimizer, config=dict(config), dist_init_required=False
            )
        self._engine, self._zero = engine, engine.optimizer
        if states:
            self._restore(states)

    def watch(self, loss: Tensor, *, is_last: bool) -> Tensor:
        """Return the loss, whose backward pass sums the gradients of all ranks; `is_last` of this step."""
        self._engine.set_gradient_accumulation_boundary(is_last)
        return self._engine(loss * self._group.n_ranks)  # DeepSpeed averages

    def gradient_norm(self) -> float:
        """Return the norm of the complete gradient before clipping; infinite if it is not finite."""
        if self.stage < 3:
            norm = float(self._zero.scaled_global_norm())
        else:
            norms = [float(one) for one in self._zero._get_norm_groups()]
            norm = -1.0 if any(one < 0 for one in norms) else sum(one * one for one in norms) ** 0.5
        return norm if norm >= 0 else float("inf")  # DeepSpeed's sign of a gradient that is not finite

    def step(self) -> None:
        """Clip, update the weights and give them to all ranks."""
        with self._group.noticing("updated the weights"):
            self._engine.step()

    def discard(self) -> None:
        """Leave the gradients of this step out: DeepSpeed itself drops those that are not finite."""
        for gradients in self._zero.averaged_gradients.values():
            for one in gradients or ():
                if one is not None:
                    one.fill_(float("nan"))
        self.step()

    def state(self, parameters: Sequence[nn.Parameter]) -> list[State]:
        """Return the complete state of each parameter, on every rank. All ranks call this."""
        safe_get_full_optimizer_state = _library().utils.safe_get_full_optimizer_state
        self._link()
        held = next((values for values in self._base.state.values() if values), None)
        if held is None:
            return [{} for _ in parameters]
        numbers = {name: value for name, value in held.items() if not _is_shaped(value)}
        shaped = [name for name in held if name not in numbers]
        found = []
        for parameter in parameters:
            tensors = {name: _copy(safe_get_full_optimizer_state(parameter, name)) for name in shaped}
            found.append({**numbers, **tensors})
        return found

    @contextmanager
    def complete_weights(self) -> Iterator[None]:
        """Have all weights on every rank for the block, in which the model runs without exchanges."""
        if self.stage < 3 or self._is_complete:
            yield
            return
        self._gather_weights()
        try:
            yield
        finally:
            self._is_complete = False
            for one in self.model.parameters():
                one.partition()  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
            self._zero.parameter_offload.setup_zero_stage3_hooks()

    def end(self) -> None:
        """Return the model to a plain one with all weights."""
        if self.stage == 3:
            self._gather_weights()
            for one in self.model.parameters():
                one.data = one.data.clone()
        self._engine.destroy()
        for module, table in self._tables.items():
            module._parameters = table
        for one, names in self._before.items():
            for name in set(vars(one)) - names:
                delattr(one, name)

    def _gather_weights(self) -> None:
        self._is_complete, offload = True, self._zero.parameter_offload
        offload._remove_module_hooks()
        offload.fwd_pre_hook.remove()
        for one in self.model.parameters():
            one.all_gather()  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]

    def _restore(self, states: Mapping[nn.Parameter, State]) -> None:
        """Give DeepSpeed's flat parts the state that the complete parameters had."""
        safe_set_full_optimizer_state = _library().utils.safe_set_full_optimizer_state
        example = next(iter(states.values()))
        flats = (
            self._zero.fp32_partitioned_groups_flat if self.stage == 3 else self._zero.single_partition_of_fp32_groups
        )
        self._base.state.clear()
        for flat in flats:
            self._base.state[flat] = {
                name: torch.zeros_like(flat.detach(), dtype=value.dtype) if _is_shaped(value) else value
                for name, value in example.items()
            }
        self._link()
        for parameter, state in states.items():
            for name, value in state.items():
                if _is_shaped(value):
                    safe_set_full_optimizer_state(parameter, value, name)

    def _link(self) -> None:
        """Let the parameters find their state: DeepSpeed links them in the first step, before all of it exists."""
        if self.stage < 3 and all(self._base.state.get(one) for one in self._zero.single_partition_of_fp32_groups):
            self._zero._hp_optimizer_states_linked = False
            self._zero._lazy_init_hp_params_optimizer_state()


def _library() -> Any:
    """Return deepspeed, without the extension that it would compile at the first start.

    That one serves inference. A start that is killed while it compiles leaves a lock file, for which later starts wait.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    how = {"install": "--no-build-isolation deepspeed", "environment": "DS_BUILD_OPS=0 "}
    deepspeed = require("deepspeed", needed_for="the engine that --deepspeed names", **how)
    accelerator = require("deepspeed.accelerator", needed_for="--deepspeed", **how).get_accelerator()
    builder = accelerator.create_op_builder("ShareMemCommBuilder")
    if builder is not None:
        deepspeed.ops.__compatible_ops__[builder.NAME] = False
    return deepspeed


def _is_shaped(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _copy(value: Any) -> Any:
    return value.detach().cpu().clone()
