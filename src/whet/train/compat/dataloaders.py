"""The DataLoaders that `get_train_dataloader` and similar methods return: padded batches in whet's order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset, Sampler

from whet.errors import ConfigError
from whet.train.batches import plan
from whet.train.compat import overrides
from whet.train.compat.public import PublicTrainer


class WhetLoader(DataLoader[Any]):
    """A DataLoader that whet made: whet may read its rows directly."""


class EpochSampler(Sampler[int]):
    """The rows of an epoch in whet's order; each iteration is the next epoch, or the one that was set."""

    def __init__(self, rows_of: Callable[[int], np.ndarray], n_rows: int) -> None:
        self._rows_of, self._n_rows = rows_of, n_rows
        self.epoch = 0

    def __len__(self) -> int:
        return self._n_rows

    def __iter__(self) -> Iterator[int]:
        rows, self.epoch = self._rows_of(self.epoch), self.epoch + 1
        return iter(rows.tolist())

    def set_epoch(self, epoch: int) -> None:
        """Make this the next epoch."""
        self.epoch = epoch


class Stream(IterableDataset[Any]):
    """Any iterable as torch's kind of data set."""

    def __init__(self, source: Iterable[Any]) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        return iter(self.source)


def is_sized(dataset: Any) -> bool:
    """Return whether the rows of a data set have an index; other data sets are read in their own order."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        return False
    try:
        return isinstance(dataset, Sized) and len(dataset) >= 0
    except (TypeError, NotImplementedError):
        return False


def is_empty(dataset: Any) -> bool:
    """Return whether there are no rows; an iterable counts as not empty, as its length is unknown."""
    return dataset is None or (is_sized(dataset) and len(dataset) == 0)


def train_loader(trainer: PublicTrainer) -> WhetLoader:
    """Return a loader of the training set's batches, in the order in which whet trains on them."""
    args, dataset = trainer.args, trainer.train_dataset
    if dataset is None:
        raise no_data("train", "pass train_dataset, or override get_train_dataloader")
    sampler = trainer._get_train_sampler(dataset) if is_sized(dataset) else None
    return _loader(
        dataset, args.per_device_train_batch_size, trainer.collate, sampler=sampler, drop_last=args.dataloader_drop_last
    )


def evaluation_loader(trainer: PublicTrainer, dataset: Any) -> WhetLoader:
    """Return a loader of a data set's batches in order, of the size for evaluations."""
    return _loader(evaluation_set(trainer, dataset), trainer.args.per_device_eval_batch_size, trainer.collate)


def evaluation_set(trainer: PublicTrainer, given: Any) -> Any:
    """Return the data set to evaluate on: the given one, one of the Trainer's by its name, or the Trainer's."""
    dataset = _named_set(trainer, given) if isinstance(given, str) else given
    dataset = trainer.eval_dataset if dataset is None else dataset
    if dataset is None:
        raise no_data("evaluate on", "pass eval_dataset to Trainer, or use --eval_strategy no")
    return dataset


def sampler_of(trainer: PublicTrainer, dataset: Any) -> EpochSampler:
    """Return a sampler of whet's order of rows, which is computed when an epoch begins."""
    return EpochSampler(lambda epoch: plan.make(trainer.args, dataset).order.epochs(epoch), len(dataset))


def decides_batches(trainer: PublicTrainer) -> bool:
    """Return whether the user's code decides which rows make which batch of the training."""
    return overrides.changed(trainer, *overrides.LOADER)


def no_data(what: str, fix: str) -> ConfigError:
    """Return the error of a Trainer without this data set."""
    return ConfigError(what=f"there is no data set to {what}", why="it was asked for", fix=fix)


def _named_set(trainer: PublicTrainer, name: str) -> Any:
    sets = trainer.eval_dataset
    if isinstance(sets, Mapping) and name in sets:
        return sets[name]
    raise ConfigError(
        what="eval_dataset has no set of this name",
        got=name,
        why=f"its names are {', '.join(map(str, sets))}" if isinstance(sets, Mapping) else "it is one data set",
        fix="name one of its sets, or pass the data set itself",
    )


def _loader(dataset: Any, n_rows: int, collate: Callable[..., Any], **options: Any) -> WhetLoader:
    if not is_sized(dataset):
        dataset = dataset if isinstance(dataset, IterableDataset) else Stream(dataset)
        options = {}
    return WhetLoader(dataset, batch_size=n_rows, collate_fn=collate, **options)
