"""Protects a run: checks memory, loss spikes, and weights that got no gradient in its first step."""

from __future__ import annotations

import re
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from transformers import TrainerCallback

from whet.errors import ConfigError, NonFiniteError
from whet.hardware import memory
from whet.hardware.memory import MemoryLimit
from whet.log import logger
from whet.models import adapters
from whet.models.experts.settings import settings_of
from whet.store import schema
from whet.store.save import Ranks
from whet.store.state import State
from whet.watch.meter import StepResult

LEAST_INTERVAL_S = 0.05
"""Time between two checks, each of which reads some files of the kernel in about 0.1 ms; less if memory grows fast."""
_USED_UP_FRAC = 0.1
"""The next check comes before so much of the memory that is left would be used up, at the pace since the last one."""
WARN_FRAC, WARN_OWN_FRAC = 0.15, 0.5
STOP_FRAC, STOP_OWN_FRAC = 0.05, 0.25
"""Memory is scarce if less than the first fraction of the limit is left, and less than the second fraction of the
memory of the process itself. So a small run continues on a machine that other programs fill."""
LOSSES, FEWEST_LOSSES = 32, 8
"""Number of losses that a spike is compared with, and the fewest needed for a comparison."""


@dataclass
class MemoryGuard:
    """Checks between micro-batches how much memory the limits on this process leave."""

    limits: Callable[[], Sequence[MemoryLimit]]
    resident: Callable[[], int | None] = memory.resident_bytes
    peak: Callable[[], int | None] = memory.peak_bytes

    def __post_init__(self) -> None:
        self._peak_before = self.peak() or 0
        self._next_s = 0.0
        self._last: tuple[float, int] | None = None
        self._warned = False

    def shortage(self) -> str | None:
        """Return a description of the shortage if the run has to stop, else None; warn once before that."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return None
        holds = self.resident()
        if holds is None:
            return None
        more, pace = self._growth_to_peak(holds), self._growth_per_s(now_s, holds)
        self._next_s = now_s + LEAST_INTERVAL_S
        for limit in self.limits():
            left = limit.left_bytes - more
            if pace > 0:
                self._next_s = min(self._next_s, now_s + _USED_UP_FRAC * max(left, 0) / pace)
            if left < min(STOP_FRAC * limit.limit_bytes, STOP_OWN_FRAC * (holds + more)):
                return _describe(limit, left, more)
            if not self._warned and left < min(WARN_FRAC * limit.limit_bytes, WARN_OWN_FRAC * (holds + more)):
                self._warned = True
                logger.warning("memory is getting scarce: %s", _describe(limit, left, more))
        return None

    def has_room_for(self, n_bytes: int) -> bool:
        """Return whether another process may take so many bytes, and the run neither stops nor is warned of that."""
        holds = self.resident()
        if holds is None:
            return True
        more = max((self.peak() or 0) - holds, 0)
        return all(
            limit.left_bytes - more - n_bytes >= min(WARN_FRAC * limit.limit_bytes, WARN_OWN_FRAC * (holds + more))
            for limit in self.limits()
        )

    def _growth_per_s(self, now_s: float, holds: int) -> float:
        """Return how many bytes a second the process has grown by since the last check."""
        before_s, held = self._last or (now_s, holds)
        self._last = now_s, holds
        return (holds - held) / (now_s - before_s) if now_s > before_s else 0.0

    def forget_peak(self) -> None:
        """Ignore the peak so far, which is that of the trials."""
        self._peak_before = self.peak() or 0

    def _growth_to_peak(self, holds: int) -> int:
        """Return how much more memory than now a micro-batch takes: activations are freed between two micro-batches.

        A peak from before the run, such as that of loading the model, does not count.
        """
        peak = self.peak() or 0
        return max(peak - holds, 0) if peak > self._peak_before else 0


def memory_guard(limit_gb: float | None) -> MemoryGuard | None:
    """Return the guard that `memory_limit_gb` asks for: with the system's limits, with this limit, or None."""
    if limit_gb == 0:
        return None
    if limit_gb is None:
        cgroups = memory.limited_cgroups()
        return MemoryGuard(lambda: memory.memory_limits(cgroups))
    limit = int(limit_gb * 2**30)
    return MemoryGuard(lambda: [MemoryLimit(memory.resident_bytes() or 0, limit, "memory_limit_gb")])


def _describe(limit: MemoryLimit, left_bytes: int, more_bytes: int) -> str:
    used = limit.used_bytes + more_bytes
    return (
        f"{_mib(used)} of {_mib(limit.limit_bytes)} that {limit.of} allows are in use at the peak, "
        f"{_mib(max(left_bytes, 0))} are left"
    )


def _mib(n_bytes: float) -> str:
    return f"{n_bytes / 2**20:,.0f} MiB"


class SpikeGuard:
    """Rejects steps whose loss is many times the usual one.

    With `in_backward` a step that is not finite has updated some weights by the time that its loss is known.
    """

    def __init__(self, limit: float | None, *, in_backward: bool = False) -> None:
        self.limit, self._in_backward = limit, in_backward
        self.losses: deque[float] = deque(maxlen=LOSSES)
        """Losses of the last applied steps."""
        self.n_bad_in_a_row = 0
        """Consecutive steps, up to now, that were not applied."""

    def state(self) -> State:
        """Return the losses that the next one is compared with, and the number of consecutive steps not applied."""
        return {"losses": list(self.losses), "n_bad_in_a_row": self.n_bad_in_a_row}

    def load_state(self, saved: State) -> None:
        """Continue from the saved losses and count."""
        schema.require_all(saved, {"losses": schema.list_of(schema.number), "n_bad_in_a_row": schema.count}, "spikes")
        self.losses.extend(saved["losses"])
        self.n_bad_in_a_row = saved["n_bad_in_a_row"]

    def reject_spike(self, result: StepResult) -> StepResult:
        """Return the result, marked as not applied if its loss is a spike."""
        if self.limit is None or not result.applied:
            return result
        if len(self.losses) >= FEWEST_LOSSES and result.loss > self.limit * statistics.median(self.losses):
            return replace(result, applied=False)
        self.losses.append(result.loss)
        return result

    def require_progress(self, result: StepResult, step: int, most: int) -> None:
        """Log a step that was not applied; raise NonFiniteError after `most` consecutive ones."""
        if result.rescaled:
            return
        self.n_bad_in_a_row = 0 if result.applied else self.n_bad_in_a_row + 1
        if not result.applied:
            self._log(step, result)
        if self.n_bad_in_a_row >= most:
            raise _too_many_not_applied(self.n_bad_in_a_row, step, result, in_backward=self._in_backward)

    def _log(self, step: int, result: StepResult) -> None:
        if result.finite:
            logger.warning(
                "step %d was not applied: loss %s is more than %s times the median of the steps before it",
                step, result.loss, self.limit,
            )  # fmt: skip
        else:
            logger.warning(
                "step %d was not applied%s: loss %s, gradient norm %s",
                step, " in full" if self._in_backward else "", result.loss, result.grad_norm,
            )  # fmt: skip


def _too_many_not_applied(n_steps: int, step: int, result: StepResult, *, in_backward: bool) -> NonFiniteError:
    spike = result.finite
    return NonFiniteError(
        what=f"{n_steps} steps in a row were " + ("loss spikes" if spike else "not finite"),
        got=f"loss {result.loss}, gradient norm {result.grad_norm} at step {step}",
        why="the weights would " + ("diverge" if spike else "become NaN")
        + ("; optimizer_in_backward has already applied those of their gradients that are finite" if in_backward
           else "; they are still those of the last good step"),
        fix="lower --learning_rate, raise --warmup_steps, or check the rows of these steps",
    )  # fmt: skip


# ---- weights without a gradient ----

_MOST_NAMED = 3
_ONE_OF_MANY = re.compile(r"\.experts\.(expert_)?\d+\.")
"""A module for each expert: those that get no token in a step have no gradient in it, and may have one in the next."""
_LAYER_DROPS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")


class FirstGradients(TrainerCallback):
    """Ends a run in whose first step a weight of an adapter, or of experts, got no gradient on any rank.

    Of other models it logs these weights: a pooler that the head does not read is one in many of them. The experts of a
    layer of whet are one weight, and those that got no token have a gradient of 0 in it. Gradients of weights that
    ranks share are read before the first update, after the exchange: torch calls no hooks of such weights. So are those
    of weights that are only logged: torch copies a gradient with a hook into another layout, whose norm is another in
    the last bits. With `optimizer_in_backward` the optimizer steps once for each gradient, which counts its weight.
    A resumed training logs nothing: what it names had no gradient in the first step of all.
    """

    def __init__(self, ranks: Ranks, *, in_backward: bool) -> None:
        self._ranks, self._in_backward = ranks, in_backward
        self._hooks: list[Any] = []
        self._read_at_update: dict[str, Tensor] = {}
        self._without: set[str] = set()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Look at the first step of each training, and at no other one."""
        vars(self).update(on_step_begin=self._begin, on_step_end=self._end)

    def _begin(self, _: Any, state: Any, *__: Any, model: Any = None, optimizer: Any = None, **___: Any) -> None:
        """Look for gradients from here on."""
        vars(self).pop("on_step_begin")
        required = _required(model)
        for name, weight in model.named_parameters():
            if not weight.requires_grad or _ONE_OF_MANY.search(name) or (state.global_step and name not in required):
                continue
            self._without.add(name)
            if _is_share(weight) or name not in required:
                self._read_at_update[name] = weight
            else:
                self._hooks.append(weight.register_post_accumulate_grad_hook(self._arrived(name)))
        if self._read_at_update:
            self._hooks.append(optimizer.register_step_pre_hook(self._read_some if self._in_backward else self._read))
            if self._in_backward:  # for this step alone: whoever hears each update keeps clipping out of it
                vars(self)["on_optimizer_step"] = self._read

    def _end(self, *_: Any, model: Any = None, **__: Any) -> None:
        """Raise ConfigError or log for weights without a gradient; wait if their first update was left out."""
        if self._read_at_update:
            return
        of_ranks = self._ranks.gather(sorted(self._without), schema.list_of(schema.text))
        without = set.intersection(*map(set, of_ranks))
        self._forget()
        if found := sorted(without & _required(model)):
            raise _never_learns(found, has_adapter=bool(adapters.names_of(model)))
        if without and getattr(self._ranks, "engine", None) is None:  # DeepSpeed's has ways of its own
            logger.info("no gradient in the first step, as the loss does not read them: %s", _named(sorted(without)))

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Leave nothing on the weights of a run that ended in its first step."""
        self._forget()

    def _forget(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for event in ("on_step_begin", "on_step_end", "on_optimizer_step"):
            vars(self).pop(event, None)
        self._hooks, self._read_at_update, self._without = [], {}, set()

    def _read(self, *_: Any, **__: Any) -> None:
        """Read what is left: what the optimizer does not update, too."""
        self._without -= {name for name, share in self._read_at_update.items() if share.grad is not None}
        self._read_at_update = {}

    def _read_some(self, optimizer: Any, *_: Any) -> None:
        """Read the gradients of the weights that this step of the optimizer updates: one, or the rest of them."""
        taken = {
            id(weight) for group in optimizer.param_groups for weight in group["params"] if weight.grad is not None
        }
        self._without -= {name for name, weight in self._read_at_update.items() if id(weight) in taken}

    def _arrived(self, name: str) -> Any:
        return lambda _: self._without.discard(name)


def _required(model: nn.Module) -> set[str]:
    """Return the names of the weights that have to learn: all next to an adapter, and those of whet's experts.

    Where a step leaves out blocks by chance, none of them.
    """
    config = getattr(model, "config", None)
    if any(getattr(config, name, 0.0) for name in _LAYER_DROPS):
        return set()
    names = [name for name, _ in model.named_parameters()]
    if adapters.names_of(model):
        return set(names)
    if settings_of(config) is None:
        return set()
    from whet.models.experts.layer import layers_of

    inside = tuple(f"{name}." for name, _ in layers_of(model))
    return {name for name in names if name.startswith(inside)}


def _never_learns(names: Sequence[str], *, has_adapter: bool) -> ConfigError:
    return ConfigError(
        what="weights that are to be trained got no gradient",
        got=_named(names),
        why="the loss of the first step does not depend on them, so that they would never learn",
        fix="leave these layers out of --lora_target_modules, or of target_modules and modules_to_save in the "
        "LoraConfig"
        if has_adapter
        else "train a model whose loss reads all of its blocks",
    )


def _named(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMED
    return f"{', '.join(names[:_MOST_NAMED])}{f' and {more} more' if more > 0 else ''}"


def _is_share(weight: Tensor) -> bool:
    """Return whether ranks share this weight, so that this one has some of its rows."""
    return type(weight).__name__ == "DTensor"  # importing the class takes long
