"""Batches of a run whose rows have no index: those of an iterable data set.

Such a source is read in its own order and one step ahead, so that the end of an epoch is known at its last step. The
random number generators are seeded from (seed, epoch, batch) before each batch, so sources and collators that use them
give the same batches again. A resumed run restores the state of the source if that is exact. Otherwise it
reads the finished steps again, and compares the last batch with the one before the stop.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Protocol

import numpy as np

from whet.config.ranks import here
from whet.data.batch import Batch
from whet.errors import ConfigError, DataError
from whet.log import logger
from whet.optional import is_from
from whet.train.batches.draws import Draws, seed_everything
from whet.train.batches.pieces import pieces_of
from whet.train.compat import dataloaders
from whet.train.compat.public import PublicTrainer
from whet.train.resume import schema
from whet.train.resume.fingerprint import digest_of_rows
from whet.train.run import Run
from whet.train.state import State
from whet.train.sync import Sync


@dataclass(frozen=True)
class Step:
    """The batches of this rank in a step, and the rows that all ranks share."""

    batches: list[Batch]
    rows: list[Any]

    def digest(self) -> str | None:
        """Return a checksum of the rows, which any number of ranks shares."""
        return digest_of_rows(self.rows) if self.rows else None


class Source(Protocol):
    """Where the steps of an epoch come from."""

    def steps(self, epoch: int, skip: int, state: Any) -> Iterator[Step]:
        """Yield the steps of the epoch, after the first `skip` ones or from `state` on."""
        ...

    def state(self) -> Any:
        """Return the position after the rows read so far, as JSON values; None if they have to be read again."""
        ...


_KINDS = {
    "epoch": schema.count, "step": schema.count, "n_left_out": schema.count, "digest": schema.optional(schema.text),
}  # fmt: skip


class StreamLoader:
    """The batches of each step of a run, read one step ahead."""

    def __init__(
        self, source: Source, steps_per_epoch: int | None, max_steps: int, micro_rows: int, *, reads_again: bool = True
    ) -> None:
        """With `reads_again`, a resumed run reads what an interrupted one has read, if the source has no state."""
        self.micro_rows, self._reads_again = micro_rows, reads_again
        self.source, self.steps_per_epoch, self.max_steps = source, steps_per_epoch, max_steps
        self.epoch, self.step = 0, 0
        """The epoch that is being read, and its finished steps."""
        self.epoch_ended = True
        self._steps: Iterator[Step] | None = None
        self._ahead: Step | None = None
        self._last = Step([], [])
        self._state: Any = None
        self._saved: State | None = None
        self.n_left_out = 0

    def take(self, plan_step: int) -> list[Batch]:
        """Return the batches of the next step; none if the source has no more rows."""
        if self._steps is None:
            self._begin()
        found = self._last = self._ahead or Step([], [])
        self._state = self.source.state()
        self.step += 1
        self._look_ahead()
        return found.batches

    def sample(self, plan_step: int) -> Batch:
        """Return the first of the batches that `take` returns next."""
        if self._steps is None:
            self._begin()
        if self._ahead is None:
            raise DataError(
                what="the training set is empty",
                why="there is nothing to learn from",
                fix="pass a train_dataset that gives rows",
            )
        return self._ahead.batches[0]

    def begins_epoch(self, plan_step: int) -> bool:
        """Return whether the next step is the first of an epoch."""
        return self.epoch_ended or self.step == 0

    def ends_epoch(self, plan_step: int) -> bool:
        """Return whether the last step was the last of an epoch."""
        return self.epoch_ended

    def skip_epoch(self, plan_step: int) -> None:
        """Begin the next epoch with the next step; count the steps left out, if their number is known."""
        if not self.epoch_ended:
            self.n_left_out += max((self.steps_per_epoch or 0) - self.step, 0)
            self._end()

    def epochs_done(self, plan_step: int) -> float:
        """Return how many epochs are done; without a length the run counts as one epoch, as in transformers."""
        return self.epoch + (0.0 if self.epoch_ended else self.step / (self.steps_per_epoch or self.max_steps))

    def close(self) -> None:
        """Release the source."""
        self._steps = self._ahead = None

    def state(self) -> State:
        """Return the position in the source."""
        position = {"epoch": self.epoch, "n_left_out": self.n_left_out}
        if self.epoch_ended:
            return {**position, "step": 0, "rows": None, "digest": None}
        return {**position, "step": self.step, "rows": self._state, "digest": self._last.digest()}

    def load_state(self, saved: State) -> None:
        """Keep the saved position; `open` reads up to it."""
        schema.require_all(saved, _KINDS, "loader")
        self._saved, self.n_left_out = saved, saved["n_left_out"]

    def open(self) -> None:
        """Read up to the saved position; raises DataError if the source gives other rows than before."""
        state, self._saved = self._saved, None
        if state is None:
            return
        self.close()
        self.epoch, self.step = state["epoch"], state["step"]
        self.epoch_ended = self.step == 0
        if self.epoch_ended:
            return
        if state["rows"] is not None:
            self._steps = self.source.steps(self.epoch, self.step, state["rows"])
        elif not self._reads_again:
            logger.warning(
                "ignore_data_skip: the data of %d steps of this epoch are not read again; the run continues with the "
                "rows that come first now, so its result is not that of a run without a stop", self.step
            )  # fmt: skip
            self._begin()
            return
        else:
            logger.info("reading the data of %d finished steps again, to resume after them", self.step)
            self._steps = self.source.steps(self.epoch, self.step - 1, None)
            if next(self._steps, Step([], [])).digest() != state["digest"] and here().is_first:  # it is rank 0's
                raise _other_rows()
        self._look_ahead()

    def _begin(self) -> None:
        self._steps, self.step, self.epoch_ended = self.source.steps(self.epoch, 0, None), 0, False
        self._ahead = next(self._steps, None)

    def _look_ahead(self) -> None:
        assert self._steps is not None
        self._ahead = next(self._steps, None)
        if self._ahead is None:
            self._end()

    def _end(self) -> None:
        self.epoch_ended, self._steps, self._ahead = True, None, None
        self.epoch += 1


@dataclass
class RowSource:
    """Rows of an iterable data set, made into whet's batches."""

    run: Run
    micro_rows: int
    draws: Draws
    sync: Sync

    def __post_init__(self) -> None:
        dataset = self.run.train_dataset
        # Loading a state changes the object, so the run reads a copy of the user's.
        self._dataset = copy.copy(dataset) if is_from(dataset, "datasets", "IterableDataset") else dataset
        self._has_state = _state_is_exact(dataset)

    def steps(self, epoch: int, skip: int, state: Any) -> Iterator[Step]:
        dataset, args = self._dataset, self.run.args
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        seed_everything(args.seed, epoch, 0)
        if state is not None:
            dataset.load_state_dict(state)
        rows = iter(dataset)
        size = args.train_rows_per_step
        if state is None:
            _skip(rows, skip * size)
        begun = skip
        while taken := self._next(rows, size, epoch, skip):
            if skip == begun:
                self._require_same_rows(taken)
            skip += 1
            with self.draws.apart(epoch << 32 | skip, self.run.place.rank):
                batches = self._batches(taken)
            if batches:
                yield Step(batches, taken)

    def state(self) -> Any:
        return self._dataset.state_dict() if self._has_state else None

    def _next(self, rows: Iterator[Any], size: int, epoch: int, skip: int) -> list[Any]:
        """Return the rows of the next step; a source that draws random numbers draws the same on all ranks."""
        if self.sync.n_ranks > 1:  # the steps before it left each rank's generators in a state of its own
            seed_everything(self.run.args.seed, epoch, skip + 1)
        return list(islice(rows, size))

    def _require_same_rows(self, rows: list[Any]) -> None:
        seen = self.sync.gather(digest_of_rows(rows), schema.text) if self.sync.n_ranks > 1 else [""]
        if len(set(seen)) > 1:
            raise ConfigError(
                what="the training set gives other rows on each rank",
                got=type(self.run.train_dataset).__name__,
                why="whet deals the rows of each step to the ranks; one that splits itself would lose rows",
                fix="let the data set give all rows on every rank, in the same order",
            )

    def _batches(self, rows: list[Any]) -> list[Batch]:
        args, objective = self.run.args, self.run.objective
        numbers = np.arange(len(rows))
        if args.dataloader_drop_last:
            numbers = numbers[: len(rows) - len(rows) % (self.micro_rows * self.run.place.n_ranks)]
        pieces = pieces_of(self.run, rows, numbers, self.micro_rows) if len(numbers) else []
        return [replace(objective.batch(rows, *piece), is_extra=is_extra) for *piece, is_extra in pieces]


def require_readable(trainer: PublicTrainer) -> None:
    """Raise ConfigError for settings that a source of rows without an index cannot honour."""
    args, problems = trainer.args, []
    if args.dataloader_num_workers:
        problems.append("dataloader_num_workers: such data is read in one thread")
    if args.auto_find_batch_size:
        problems.append("auto_find_batch_size: it tries the longest rows, which are not known in advance")
    if trainer.sync.n_ranks > 1 and getattr(trainer.train_dataset, "_distributed", None) is not None:
        raise ConfigError(
            what="the training set is split by ranks already",
            got="a data set of split_dataset_by_node",
            why="whet deals its rows to the ranks, so most rows would be left out",
            fix="pass the data set as it was before split_dataset_by_node",
        )
    if problems:
        raise ConfigError(
            what="these settings do not go with an iterable data set",
            got="; ".join(problems),
            why="its rows have no index",
            fix="leave them out, or pass a data set with a length",
        )


def require_steps(args: Any) -> None:
    """Raise ConfigError if the source has no length and max_steps is not set."""
    if args.max_steps <= 0:
        raise ConfigError(
            what="the training set has no length, and max_steps is not set",
            why="the learning rate and the end of the run follow from the number of steps",
            fix="set --max_steps, and leave --min_steps out",
        )


def _state_is_exact(dataset: Any) -> bool:
    """Return whether the source can restore its exact position: the content of a shuffle buffer is not saved."""
    if not (hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")) or dataloaders.is_sized(dataset):
        return False
    return not _has_buffer(getattr(dataset, "_ex_iterable", None))


def _has_buffer(part: Any) -> bool:
    if part is None:
        return False
    if "BufferShuffled" in type(part).__name__:
        return True
    inner = getattr(part, "ex_iterables", None) or [getattr(part, "ex_iterable", None)]
    return any(_has_buffer(one) for one in inner)


def _skip(rows: Iterator[Any], n_rows: int) -> None:
    for _ in islice(rows, n_rows):
        pass


def _other_rows() -> DataError:
    return DataError(
        what="the data set gives other rows than those that this run was trained on",
        why="a run can only resume exactly if its source gives the same rows in the same order each time",
        fix="pass a data set with a length, or a datasets.IterableDataset; or start a new run without "
        "--resume_from_checkpoint",
    )
