"""How many rows go through the model at a time: found before training, on the longest rows of the data set.

The rows of a step are cut into more micro-batches where fewer fit: accumulation rises, the curve stays. On a GPU a pass
that does not fit ends in an error, and the next one is tried with fewer rows. On a CPU there is no error, the kernel
ends the process: so passes begin with one row, and only what a line through the measured peaks says will fit is run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from whet.card import Card
from whet.data import budget
from whet.data.store import RowStore
from whet.errors import ConfigError
from whet.log import logger
from whet.optim import registry
from whet.precision import policy
from whet.train.control import stop
from whet.train.trials import precision as probe
from whet.train.trials.memory import GpuRoom, HostRoom, mib

if TYPE_CHECKING:
    from whet.train.loop import Fit

CARD = Card(
    name="batch size trial",
    asked_by="auto_find_batch_size",
    does="Trial passes find how many rows fit into memory; the rest is accumulated.",
    improves="memory",
    same_result="yes",
    hurts="When you know what fits: the trial takes a few passes.",
    source="find_executable_batch_size of accelerate",
    page="loading.md",
)

_MOST_GROWTH = 4
"""How many times as many rows as have run the next pass may have: a line through small ones is a guess."""
_OTHER_STATE = 8
"""Bytes a weight for the state of an optimizer that does not say: two float32 moments, as most have."""
_WIDE, _NARROW = 64, 8
"""Rows that the products of a GPU like a multiple of: on an A100 and its successors, and before (NVIDIA's guide)."""


def settle(fit: Fit) -> int:
    """Return the most rows of a micro-batch: what was asked for, or what fits; the log says what was found."""
    asked = fit.args.per_device_train_batch_size
    rows = _found(fit, asked) if fit.args.auto_find_batch_size else asked
    device = fit.trainer.device
    if device.type == "cuda" and not fit.trainer.objective.packed:
        note = disliked(rows, torch.cuda.get_device_capability(device))
        if note:
            logger.info("%s", note)
    return rows


def disliked(rows: int, capability: tuple[int, int]) -> str | None:
    """Return what to say of a padded batch of so many rows on a GPU of this capability, None where all is well.

    Only there is the size of a product a multiple of the rows. Packed rows make products of as many rows as they have
    tokens, which is another number in each batch; and on a CPU the blocks of a product are of a few rows.
    """
    liked = _WIDE if capability[1] == 0 and capability[0] >= 8 else _NARROW
    if rows % liked == 0:
        return None
    return f"a batch of {rows} rows is no multiple of {liked}, which this GPU's tensor cores are fastest with"


def largest_measured(peak: Callable[[int], int], fits: Callable[[int], bool], most: int) -> int:
    """Return the most rows, up to `most`, whose measured peak fits; 0 where not even one row's does.

    Nothing is run that the line through the last two peaks says will not fit.
    """
    peaks: dict[int, int] = {}
    good, bad, rows = 0, most + 1, 1
    while good < rows < bad:
        peaks[rows] = peak(rows)
        good, bad = (rows, bad) if fits(peaks[rows]) else (good, rows)
        rows = _next(peaks, fits, good, bad)
    return good


def largest_tried(fits: Callable[[int], bool], most: int) -> int:
    """Return the most rows, up to `most`, with which a pass runs; 0 where it does not even with one."""
    good, bad, rows = 0, most + 1, most
    while good < rows < bad:
        good, bad = (rows, bad) if fits(rows) else (good, rows)
        rows = (good + bad) // 2
    return good


def _next(peaks: Mapping[int, int], fits: Callable[[int], bool], good: int, bad: int) -> int:
    """Return with how many rows to go on: the most that should fit, `good` where there are no more."""
    if good == 0:
        return 0
    if len(peaks) == 1:
        return min(good + 1, bad - 1)
    fewer, more = sorted(peaks)[-2:]
    slope = max((peaks[more] - peaks[fewer]) / (more - fewer), 0.0)
    candidates = range(min(_MOST_GROWTH * good, bad - 1), good, -1)
    return next((rows for rows in candidates if fits(int(peaks[good] + slope * (rows - good)))), good)


class _Passes:
    """Forward and backward passes over the longest rows, which leave no trace."""

    def __init__(self, fit: Fit, longest: np.ndarray) -> None:
        self.fit, self.longest = fit, longest
        self.n_rows = min(fit.args.train_rows_per_step, len(fit.trainer.train_dataset))

    def run(self, rows: int) -> None:
        """Run the first micro-batch of so many rows; twice if steps will sum gradients, which then are in memory."""
        if name := stop.asked():
            self.fit.edges.leave(f"stopped by {name}", {})
        trainer = self.fit.trainer
        tokens = self.fit.args.max_tokens_per_batch
        _, last = budget.cuts(trainer.train_dataset, self.longest[:rows], rows, tokens)[0]
        batch = trainer.objective.batch(trainer.train_dataset, self.longest[:last], 0).to(trainer.device)
        precision = policy.make(trainer.precision.name, trainer.device)
        probe.Passes(trainer, [batch] * (1 if last == self.n_rows else 2)).run(precision)


def _found(fit: Fit, asked: int) -> int:
    trainer = fit.trainer
    most = min(asked, len(trainer.train_dataset))
    with probe.no_trace(trainer.model, trainer.device):
        passes = _Passes(fit, _longest(trainer.train_dataset, most))
        state = _state_to_come(fit)
        find = _on_gpu if trainer.device.type == "cuda" else _on_host
        found, told = find(fit, passes, state, most)
    if found == 0:
        raise ConfigError(
            what="auto_find_batch_size finds no batch that fits",
            got=told,
            why="even a pass over one row takes more memory than there is",
            fix="use --gradient_checkpointing, shorter rows, or --optim adamw_whet_8bit, which keeps less state",
        )
    logger.info("auto_find_batch_size: %s", _outcome(fit, found if found < most else asked, asked, told))
    return found if found < most else asked


def _on_host(fit: Fit, passes: _Passes, state_bytes: int, most: int) -> tuple[int, str]:
    room = HostRoom(fit.edges.memory.limits if fit.edges.memory else None, state_bytes)
    peaks: dict[int, int] = {}

    def peak(rows: int) -> int:
        if not peaks:
            passes.run(rows)  # what is set up once is not the batch's
        peaks[rows] = room.peak(lambda: passes.run(rows))
        return peaks[rows]

    found = largest_measured(peak, room.fits, most)
    if fit.edges.memory is not None:
        fit.edges.memory.forget_peak()
    measured = ", ".join(f"{rows}: {mib(size)}" for rows, size in peaks.items())
    return found, f"peaks by rows: {measured}; {mib(state_bytes)} for the optimizer; {room.told()}"


def _on_gpu(fit: Fit, passes: _Passes, state_bytes: int, most: int) -> tuple[int, str]:
    room = GpuRoom(fit.trainer.device, state_bytes)
    found = largest_tried(lambda rows: room.runs(lambda: passes.run(rows)), most)
    return found, f"{room.told()}; {mib(state_bytes)} for the optimizer"


def _outcome(fit: Fit, found: int, asked: int, told: str) -> str:
    if found == asked:
        return f"{found} rows at a time fit, as asked for ({told})"
    per_step = fit.args.train_rows_per_step
    n_batches = -(-per_step // found)
    return f"{found} of {asked} rows at a time fit; {n_batches} batches make a step of {per_step} rows ({told})"


def _state_to_come(fit: Fit) -> int:
    """Return the bytes that the optimizer will take beside those it has: all, unless the run was resumed."""
    given, _ = fit.trainer.given_optimizers
    whole = registry.model_state_bytes(fit.trainer.model, fit.args) if given is None else None
    if whole is None:
        whole = _OTHER_STATE * sum(parameter.numel() for parameter in fit.parameters if parameter.requires_grad)
    states = fit.optimizer.state.values()
    there = sum(
        value.numel() * value.element_size()
        for state in states
        for value in state.values()
        if isinstance(value, Tensor)
    )
    return max(whole - there, 0)


def _longest(dataset: Any, n_rows: int) -> np.ndarray:
    """Return the places of the longest rows, longest first."""
    sizes = dataset.lengths if isinstance(dataset, RowStore) else [_size(dataset[row]) for row in range(len(dataset))]
    return np.argsort(-np.asarray(sizes), kind="stable")[:n_rows]


def _size(row: Any) -> int:
    """Return how many tokens a row has, or else how many numbers; the same for all rows that do not tell."""
    if not isinstance(row, Mapping):
        return 1
    if "input_ids" in row:
        return len(row["input_ids"])
    return sum(value.numel() if isinstance(value, Tensor) else int(np.size(value)) for value in row.values())
