"""whet's own AdamW on the CPU: all tensors of the model in one native call, with 32-bit or 8-bit moments.

The state of a bf16 parameter contains an fp32 master. Steps and decay update the master, and the parameter is rounded
from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from whet.errors import ConfigError
from whet.kernels import shared_memory
from whet.kernels.adamw import BLOCK, AdamW8bitTensors, AdamWStep, AdamWTensors, Codes
from whet.kernels.embedding import RowsInUse, rows_in_use_of
from whet.kernels.library import library
from whet.optim.entry import Entry, Options, Shapes, Stepping, bytes_of, native_can_update, native_takes

State = dict[str, Any]
Masters = list[Tensor | None]


@dataclass
class Due:
    """Parameters that step with the same constants."""

    step: AdamWStep
    parameters: list[Tensor] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    rates: list[tuple[float, float]] = field(default_factory=list)
    """(learning rate, weight decay) of each parameter."""


class NativeAdamW(Stepping):
    """AdamW over all tensors at once; a subclass defines the moments."""

    grad_scale = 1.0
    """Factor that the next step applies to the gradient: clipping without an extra pass."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @property
    def has_step_hooks(self) -> bool:
        """Whether a hook of somebody else's runs before or after each step, and may read gradients."""
        everywhere = (*_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values())
        strange = any(not getattr(hook, "__module__", "").startswith("whet.") for hook in everywhere)
        return strange or bool(self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks)

    def start(self) -> None:
        """Create the state of every parameter, as before its first step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = self._begin(parameter)

    def _update_all(self) -> None:
        grad_scale, self.grad_scale = self.grad_scale, 1.0
        for due in _due(self, self._begin, grad_scale):
            _update(due, self._tensors, self._rows(due))

    def _rows(self, due: Due) -> list[RowsInUse | None]:
        """Return for each the rows outside of which gradient and moments are zero; None if unknown or not needed."""
        return [None] * len(due.parameters)

    def _begin(self, parameter: Tensor) -> State:
        raise NotImplementedError

    def _tensors(self, params: list[Tensor], states: list[State], masters: Masters) -> AdamWTensors | AdamW8bitTensors:
        raise NotImplementedError


class WhetAdamW(NativeAdamW):
    """AdamW (Loshchilov and Hutter 2019, algorithm 2); torch's state names, moments in fp32.

    Embedding rows that never had a gradient are skipped: AdamW without decay does not change them.
    """

    def __init__(self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8) -> None:
        super().__init__(params, lr, betas, eps)
        self._covered: dict[int, tuple[RowsInUse, Tensor]] = {}
        """Parameter's address -> the rows that contain all nonzero moments, and the first moments."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_covered", {})  # torch copies and pickles only groups and state

    def _rows(self, due: Due) -> list[RowsInUse | None]:
        found = rows_in_use_of([one.grad for one in due.parameters if one.grad is not None])
        for number, (parameter, state, rows) in enumerate(zip(due.parameters, due.states, found, strict=True)):
            if rows is None:
                self._covered.pop(id(parameter), None)  # from now on, any row may have moments
                continue
            covered = self._covered.get(id(parameter))
            if covered is None or covered[0] is not rows or covered[1] is not state["exp_avg"]:
                for name in ("exp_avg", "exp_avg_sq") if state["step"] > 1 else ():
                    rows.include(state[name].any(dim=1))  # loaded, or made by steps with an ordinary gradient
                self._covered[id(parameter)] = (rows, state["exp_avg"])
            if due.rates[number][1]:  # with decay, rows without a gradient change too
                found[number] = None
        return found

    def _begin(self, parameter: Tensor) -> State:
        blank = {"dtype": torch.float32, "device": parameter.device}
        moments = {name: torch.zeros(parameter.shape, **blank) for name in ("exp_avg", "exp_avg_sq")}
        return _with_master(parameter, {"step": 0, **moments})

    def _tensors(self, params: list[Tensor], states: list[State], masters: Masters) -> AdamWTensors:
        first, second = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
        return AdamWTensors(params, first, second, masters)


class WhetAdamW8bit(NativeAdamW):
    """AdamW with block-wise 8-bit moments (Dettmers et al. 2022, arXiv:2110.02861), for tensors of every size.

    The state has codes (uint8) and a scale (fp32) for each 256 of them. A positive second moment is never rounded to
    zero: if it is far below the block's largest, the step is smaller than AdamW's, not larger.
    """

    def _begin(self, parameter: Tensor) -> State:
        state: State = {"step": 0}
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros(parameter.shape, dtype=torch.uint8, device=parameter.device)
            state[f"{name}_scale"] = torch.zeros(
                _n_blocks(parameter.shape), dtype=torch.float32, device=parameter.device
            )
        return _with_master(parameter, state)

    def _tensors(self, params: list[Tensor], states: list[State], masters: Masters) -> AdamW8bitTensors:
        first = [Codes(s["exp_avg"], s["exp_avg_scale"], signed=True) for s in states]
        second = [Codes(s["exp_avg_sq"], s["exp_avg_sq_scale"], signed=False) for s in states]
        return AdamW8bitTensors(params, first, second, masters)


def _due(optimizer: Optimizer, begin: Callable[[Tensor], State], grad_scale: float) -> Iterator[Due]:
    """Yield the parameters that have a gradient: all at once, unless some have missed steps or groups differ.

    Parameters that share memory are updated one after the other, in the order of the groups, as in torch.
    """
    found: dict[tuple[Any, ...], Due] = {}
    given = [one for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
    turns = dict(zip(map(id, given), shared_memory.turns(given), strict=True))
    _require_one_master([one for one in given if turns[id(one)]])
    for group in optimizer.param_groups:
        (beta1, beta2), eps = group["betas"], group["eps"]
        rate = (float(group["lr"]), float(group["weight_decay"]))
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state: State = optimizer.state[parameter]
            if not state:
                state |= begin(parameter)
            state["step"] = int(state["step"]) + 1  # a state of torch's AdamW has a tensor here
            step = (beta1, beta2, eps, state["step"], grad_scale)
            key = (turns[id(parameter)], *step)
            due = found.get(key) or found.setdefault(key, Due(AdamWStep(*step)))
            due.parameters.append(parameter)
            due.states.append(state)
            due.rates.append(rate)
    for key in sorted(found, key=itemgetter(0)):
        yield found[key]


def _require_one_master(second: Sequence[Tensor]) -> None:
    """Raise ConfigError for a narrow parameter that shares memory with an earlier one: their masters would differ."""
    for one in second:
        if one.dtype != torch.float32:
            raise ConfigError(
                what="whet's AdamW cannot update these parameters",
                got=f"two parameters in {one.dtype} over the same memory, one of shape {tuple(one.shape)}",
                why="each has its values in float32 in its own state, and the update of one would undo the other's",
                fix="make them one parameter, convert the weights to float32, or use torch.optim.AdamW "
                "(--optim adamw_torch)",
            )


def _update(due: Due, tensors: Callable[..., AdamWTensors | AdamW8bitTensors], rows: list[RowsInUse | None]) -> None:
    """Take the step, on a copy if a parameter is not contiguous."""
    flat = [parameter.detach().contiguous() for parameter in due.parameters]
    grads = [parameter.grad.contiguous() for parameter in due.parameters if parameter.grad is not None]
    masters: Masters = [state.get("master") for state in due.states]
    tensors(flat, due.states, masters).update(grads, due.rates, due.step, rows)
    for parameter, updated in zip(due.parameters, flat, strict=True):
        if updated.data_ptr() != parameter.data_ptr():
            parameter.copy_(updated)


def _with_master(parameter: Tensor, state: State) -> State:
    if parameter.dtype != torch.float32:
        state["master"] = parameter.detach().float().contiguous()
    return state


def _n_blocks(shape: Any) -> int:
    return -(-prod(shape) // BLOCK)


def name_for(parameters: Iterable[Tensor]) -> str:
    """Return the optimizer that `auto` stands for: whet's own if its operator can update all of these parameters."""
    ours = library() is not None and all(map(native_can_update, parameters))
    return "adamw_whet" if ours else "adamw_torch_fused"


def state_bytes(shapes: Shapes, _options: Options, itemsize: int) -> int:
    """Two moments in fp32, and the fp32 master of a narrower parameter."""
    return sum((8 + _master_bytes(itemsize)) * prod(shape) for shape in shapes)


def state_bytes_8bit(shapes: Shapes, _options: Options, itemsize: int) -> int:
    """Two codes per element, two scales per block, and the fp32 master of a narrower parameter."""
    return sum((2 + _master_bytes(itemsize)) * prod(shape) + 8 * _n_blocks(shape) for shape in shapes)


def state_bytes_auto(shapes: Shapes, options: Options, itemsize: int) -> int:
    """The bytes of the one that `auto` stands for, for parameters on the CPU."""
    if library() is not None and native_takes(itemsize):
        return state_bytes(shapes, options, itemsize)
    return bytes_of(shapes, itemsize, moments=2, scalars=1)


def _master_bytes(itemsize: int) -> int:
    return 4 if itemsize < 4 else 0


OPTIMIZERS = (
    Entry(
        name="auto",
        rule="AdamW",
        does="AdamW: adamw_whet on a CPU with the native operators, adamw_torch_fused elsewhere",
        source="Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2",
        betas=True,
        epsilon=True,
        reads="element",
        stands_for=name_for,
        state_bytes=state_bytes_auto,
    ),
    Entry(
        name="adamw_whet",
        rule="AdamW",
        does="AdamW in one native call, on a CPU; skips vocabulary rows that never had a gradient",
        source="Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2",
        betas=True,
        epsilon=True,
        reads="element",
        on_cpu=True,
        instead="adamw_torch_fused",
        kind=WhetAdamW,
        state_bytes=state_bytes,
    ),
    Entry(
        name="adamw_whet_8bit",
        rule="AdamW",
        does="AdamW with moments of 8 bits in blocks of 256, in one native call, on a CPU",
        source="Dettmers et al. 2022, arXiv:2110.02861",
        betas=True,
        epsilon=True,
        on_cpu=True,
        instead="adamw_bnb_8bit",
        claim="8-bit states: 2 bytes per parameter (6 GB for 3 billion)",
        kind=WhetAdamW8bit,
        block=BLOCK,
        state_bytes=state_bytes_8bit,
    ),
)
