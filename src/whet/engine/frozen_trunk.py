"""The results of a run's frozen layers: whether they can be kept, what keeps them, and how passes are given them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from whet import system
from whet.data.batch import Batch
from whet.data.store import RowStore
from whet.engine.own_losses import SmoothedLoss
from whet.engine.run import Run
from whet.engine.step import StepTrunk
from whet.errors import ConfigError, StorageError
from whet.log import logger
from whet.models import last_block
from whet.models.experts.layer import has_experts
from whet.models.forwards import Replaced
from whet.models.view import ModelView
from whet.objectives.base import Objective
from whet.objectives.distilled import without_teacher
from whet.store.snapshot import free_bytes


def trunk_of(run: Run) -> StepTrunk:
    """Return what keeps the results of the frozen layers in this run; raises ConfigError if they cannot be kept."""
    args = run.args
    assert args.freeze_layers is not None
    if (why := _why_not(run)) is not None:
        raise ConfigError(
            what="cache_frozen_trunk does not go with this training",
            got=why,
            why="the hidden states of each row are kept from one epoch to the next, in packed batches of one process",
            fix="leave --cache_frozen_trunk out: --freeze_layers alone saves the backward pass of these layers",
        )
    n_blocks = args.freeze_layers
    if n_blocks == len(ModelView(run.model).blocks()):
        assert run.objective.packed_model is not None
        last_block.switch_off(run.objective.packed_model.module)  # it would leave out states that are kept
    student = without_teacher(run.objective)  # a teacher's pass is no part of filling the cache
    folder = None if run.is_trial else run.output_dir
    return Cached(Trunk(run.model, n_blocks), student, run.train_dataset, folder)


def _why_not(run: Run) -> str | None:
    model, packed = run.model, run.objective.packed_model
    reasons = {
        "label_smoothing_factor": isinstance(run.objective, SmoothedLoss),
        f"{type(model).__name__}, whose batches run padded": packed is None,
        f"{type(model).__name__}, of a family that whet has no file for": packed is not None and packed.family.proven,
        "experts, whose balance is that of all tokens": has_experts(model),
        f"rows in a {type(run.train_dataset).__name__}; whet's commands make a RowStore of theirs": not isinstance(
            run.train_dataset, RowStore
        ),
        f"{run.place.n_ranks} ranks": run.place.n_ranks > 1,
        f"the {run.device.type.upper()}": run.device.type != "cpu",
    }
    return next((text for text, holds in reasons.items() if holds), None)


_TOKENS = 4096
"""Tokens that are computed at a time. Which rows these are follows from the data alone, not from the order of the run:
a resumed run computes the same states, bitwise."""
_WORDS = ("input_ids", "token_type_ids")
"""What the states of a row depend on, besides the weights."""


class Cached(StepTrunk):
    """The frozen layers run once for each row of the training data."""

    def __init__(self, trunk: Trunk, objective: Objective, rows: RowStore, folder: Path | None) -> None:
        """The states are kept on the disk of the folder; None: in memory, for the few rows of a trial."""
        self._trunk, self._objective, self._rows, self._folder = trunk, objective, rows, folder
        self._group_of = _groups(rows)
        self._is_filled = np.zeros(int(self._group_of[-1]) + 1, dtype=bool)
        self._words: dict[str, np.ndarray] = {}
        self._states: Tensor | None = None
        """(tokens, D)."""
        self._versions: list[int] = []

    @contextmanager
    def of(self, batch: Batch) -> Iterator[None]:
        """Give the pass of this batch the states of its rows; those that nobody has read yet are computed first."""
        assert batch.rows is not None
        for group in np.unique(self._group_of[batch.rows]):
            if not self._is_filled[group]:
                self._fill(int(group))
        self._require_same_weights()
        with self._trunk.given(self._taken(batch)):
            yield

    def _taken(self, batch: Batch) -> Tensor:
        """Return the states (1, N, D) of a batch; tokens that fill it up have those of its first ones."""
        assert self._states is not None
        places = _places(self._rows, batch.rows)
        for name, column in _words(batch).items():
            if not np.array_equal(column, self._words[name][places]):
                raise _other_rows(name)
        more = batch.n_computed - len(places)
        return self._states.index_select(0, torch.from_numpy(np.append(places, places[:more])))[None]

    def _fill(self, group: int) -> None:
        """Compute the states of a group of neighbouring rows."""
        rows = np.arange(*np.searchsorted(self._group_of, [group, group + 1]))
        batch = self._objective.batch(self._rows, rows, 0)
        if batch.cu_seqlens is None:
            raise _padded()
        places = _places(self._rows, rows)
        words = _words(batch)
        if any(len(column) != len(places) for column in words.values()):
            raise _other_rows("input_ids")
        found = self._run(batch, step=0)
        if self._states is None:
            if not torch.equal(found, self._run(batch, step=1)):
                raise _random()
            self._begin(words, found)
        assert self._states is not None
        self._states[places[0] : places[-1] + 1] = found[: len(places)]
        for name, column in words.items():
            self._words[name][places] = column
        self._is_filled[group] = True

    def _run(self, batch: Batch, step: int) -> Tensor:
        """Return the states (N, D) of a batch, in the precision of the pass that asks."""
        with torch.no_grad():
            found = self._trunk.states(lambda: self._objective.forward(batch, seed=0, step=step))
        if found.shape[:2] != (1, batch.n_computed):
            raise AssertionError(f"states {tuple(found.shape)} of {batch.n_computed} tokens")
        return found[0]

    def _begin(self, words: dict[str, np.ndarray], found: Tensor) -> None:
        n_tokens = int(self._rows.cu_seqlens[-1])
        self._states = _stored((n_tokens, found.shape[-1]), found.dtype, self._folder)
        self._words = {name: np.zeros(n_tokens, dtype=np.int64) for name in words}
        self._versions = self._now()
        size = self._states.numel() * self._states.element_size()
        logger.info(
            "cache_frozen_trunk: %d tokens take %.4g MB of %s; their frozen layers run once",
            n_tokens, size / 1e6, self._folder or "addresses",
        )  # fmt: skip

    def _now(self) -> list[int]:
        return [-1 if weight.requires_grad else weight._version for weight in self._trunk.weights]

    def _require_same_weights(self) -> None:
        if self._now() == self._versions and -1 not in self._versions:
            return
        raise ConfigError(
            what="frozen layers changed while their results were kept",
            got="a weight of theirs is trained, or was written to",
            why="cache_frozen_trunk computes their hidden states once",
            fix="leave --cache_frozen_trunk out to train these layers later in the run",
        )


def _groups(rows: RowStore) -> np.ndarray:
    """Return the group of each row (rows,): neighbours with about `_TOKENS` tokens together."""
    before = (rows.cu_seqlens[1:] - 1) // _TOKENS
    return np.unique(before, return_inverse=True)[1]


def _places(rows: RowStore, taken: np.ndarray | None) -> np.ndarray:
    """Return where in the data the tokens of these rows are, end to end."""
    assert taken is not None
    lengths = rows.lengths[taken]
    starts = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum())) + np.repeat(rows.cu_seqlens[taken] - starts, lengths)


def _words(batch: Batch) -> dict[str, np.ndarray]:
    """Return the columns of the batch's real tokens, without those that fill it up."""
    found = {name: batch.inputs[name].flatten() for name in _WORDS if batch.inputs.get(name) is not None}
    if batch.columns is not None:
        found = {name: column[batch.columns] for name, column in found.items()}
    return {name: column[: batch.n_in_rows].numpy() for name, column in found.items()}


def _random() -> ConfigError:
    return ConfigError(
        what="the frozen layers give other results each time",
        got="two passes over the same rows that differ",
        why="cache_frozen_trunk computes them once; dropout, or another draw of random numbers, is on in them",
        fix="set the dropout of the model's configuration to 0, or leave --cache_frozen_trunk out",
    )


def _padded() -> ConfigError:
    return ConfigError(
        what="cache_frozen_trunk goes with packed batches",
        got="batches with padding",
        why="the state of a row must not depend on the rows next to it",
        fix="leave --cache_frozen_trunk out, or what makes batches padded (--attn_implementation, a collator)",
    )


def _other_rows(name: str) -> ConfigError:
    return ConfigError(
        what="the rows are not the same each time",
        got=f"another {name} than when the frozen layers ran over this row",
        why="cache_frozen_trunk computes the states of a row once, and a collator or a data set changed its tokens",
        fix="leave --cache_frozen_trunk out",
    )


def _stored(shape: tuple[int, ...], dtype: torch.dtype, folder: Path | None) -> Tensor:
    """Return a tensor of zeros whose memory is a file on the disk of the folder, complete from the beginning.

    Raises StorageError if the disk has no room: a file that grew later would end the process instead. Without a folder
    it takes memory for what is written to it.
    """
    size = int(np.prod(shape)) * dtype.itemsize
    if folder is None:
        addresses = system.addresses_without_memory(size)
        held = np.zeros(size, dtype=np.uint8) if addresses is None else np.frombuffer(addresses, dtype=np.uint8)
        return torch.from_numpy(held).view(dtype).view(shape)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            if free_bytes(folder) < size:
                raise OSError("too few free bytes")
            system.allocate_on_disk(file.fileno(), size)
            numbers = np.memmap(file, dtype=np.uint8, mode="r+", shape=(size,))
    except OSError as error:
        raise StorageError(
            what="the disk has no room for the hidden states of the frozen layers",
            got=f"{size / 1e6:,.1f} MB needed, {free_bytes(folder) / 1e6:,.1f} MB free in {folder}: {error}",
            why="cache_frozen_trunk keeps the states of all tokens of the training data",
            fix="name another disk in --output_dir, or leave --cache_frozen_trunk out",
        ) from error
    return torch.from_numpy(numbers).view(dtype).view(shape)


class Trunk:
    """The first blocks of a model, and what comes before them."""

    def __init__(self, model: nn.Module, n_blocks: int) -> None:
        view = ModelView(model)
        self._blocks: Sequence[nn.Module] = [block for _, block in view.blocks()][:n_blocks]
        depths = view.depths()
        self.weights = [weight for weight in model.parameters() if depths[id(weight)] <= n_blocks]
        """All weights that the hidden states depend on."""
        self._n_results: int | None = None
        """Of a block that returns a tuple: its length."""

    def states(self, run: Callable[[], object]) -> Tensor:
        """Return the hidden states that the last of these blocks gives in a pass, which ends there."""
        last = self._blocks[-1]
        inner = last.forward

        def stop(*args: Any, **options: Any) -> Any:
            raise _Reached(inner(*args, **options))

        with _forwards({last: stop}):
            try:
                run()
            except _Reached as reached:
                found = reached.result
            else:
                raise AssertionError("the pass has not reached the last frozen block")
        if isinstance(found, tuple) and all(one is None for one in found[1:]):
            self._n_results, found = len(found), found[0]
        if not isinstance(found, Tensor):
            raise ConfigError(
                what="cache_frozen_trunk does not know what the blocks of this model return",
                got=f"{type(last).__name__}: {type(found).__name__}",
                why="it keeps hidden states, and gives them to the first block that is trained",
                fix="leave --cache_frozen_trunk out",
            )
        return found

    @contextmanager
    def given(self, states: Tensor) -> Iterator[None]:
        """Let passes take these hidden states for those behind the last of these blocks; `states` has run before."""
        result = states if self._n_results is None else (states, *[None] * (self._n_results - 1))
        with _forwards({block: lambda *_, **__: result for block in self._blocks}):
            yield


class _Reached(Exception):  # noqa: N818
    """Carries the result of the last block."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result


@contextmanager
def _forwards(instead: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Let these modules run other forwards."""
    replaced = Replaced()
    for module, forward in instead.items():
        replaced.put(module, forward)
    try:
        yield
    finally:
        replaced.undo()
