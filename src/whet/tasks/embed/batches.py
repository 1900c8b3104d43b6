"""Which pairs share a batch: those without a text in common, so that no text is a negative of its own pair.

The batches are those of sentence-transformers' NoDuplicatesBatchSampler, for the same seed and epoch. It names the
number of batches that there would be if no text came twice, and its trainer takes so many: the rows of all later
batches are never trained. Here the number is that of the first epoch, and each epoch has all rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property
from heapq import heappop, heappush

import torch
from torch.utils.data import BatchSampler

_NO_TEXT = -1
_FEWER = 0.8
"""A mean batch below this share of the expected one is worth a line."""


class DistinctTexts(BatchSampler):
    """The batches of an epoch, as numbers of rows. Rows with a text in common are in different batches."""

    def __init__(self, columns: Sequence[Sequence[str]], batch_size: int, *, drop_last: bool, seed: int) -> None:
        number: dict[str, int] = {}
        self._texts = [tuple(number.setdefault(one, len(number)) for one in row) for row in zip(*columns, strict=True)]
        super().__init__(range(len(self._texts)), batch_size, drop_last)
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose batches come next."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Return the number of batches, which all epochs share."""
        return len(self.sizes)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches of the epoch.

        Another order of the rows may fill more or fewer batches than the first. Fewer become as many by halving the
        longest; more would be left over, so that the batches of the first epoch come again, in another order.
        """
        batches, n_wanted = self._filled(self.epoch) if self.epoch else self._first, len(self)
        if len(batches) > n_wanted or (len(batches) < n_wanted and self.drop_last):
            order = torch.randperm(n_wanted, generator=self._generator(self.epoch)).tolist()
            batches = [self._first[n] for n in order]
        while len(batches) < n_wanted:
            at = max(range(len(batches)), key=lambda n: len(batches[n]))
            half = len(batches[at]) // 2
            batches[at : at + 1] = [batches[at][:half], batches[at][half:]]
        yield from batches

    @cached_property
    def sizes(self) -> list[int]:
        """The rows of each batch of the first epoch."""
        return [len(batch) for batch in self._first]

    @cached_property
    def _first(self) -> list[list[int]]:
        """The batches of the first epoch."""
        return self._filled(0)

    def notes(self, *, needs_others: bool) -> list[str]:
        """Return what people should know of the batches, of which there is one at least.

        `needs_others`: all texts that do not fit come from the other rows of a batch.
        """
        n_rows, size = len(self._texts), self.batch_size
        n_trained, n_batches = sum(self.sizes), len(self)
        n_left_out, n_alone = n_rows - n_trained, self.sizes.count(1) if needs_others else 0
        said = []
        if n_trained / n_batches < _FEWER * n_rows / -(-n_rows // size):
            said.append(
                f"batches hold {n_trained / n_batches:.1f} rows on average, of {size}: many rows have a text in common,"
                " and these share no batch (--batch_sampler no_duplicates)"
            )
            if n_alone:
                said.append(f"{n_alone:,} of {n_batches:,} batches hold one row, which has no negatives there")
        if n_left_out >= size:  # fewer do not fill a batch in any order
            said.append(f"{n_left_out:,} of {n_rows:,} rows are left out of each epoch (--dataloader_drop_last)")
        return said

    def _filled(self, epoch: int) -> list[list[int]]:
        """Return the batches that the rows fill in the order of this epoch."""
        order = torch.randperm(len(self._texts), generator=self._generator(epoch), dtype=torch.int32).tolist()
        return [one for one in self._batches(order) if len(one) == self.batch_size or not self.drop_last]

    def _generator(self, epoch: int) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed + epoch)

    def _batches(self, order: Sequence[int]) -> Iterator[list[int]]:
        """Yield batches of the first rows that share no text; the others wait for a later batch, in their order.

        A row waits for one text that the batch holds, and while it does nobody looks at it. Of those that wait for a
        free text the first one alone is a candidate: usually a batch looks at few rows more than it takes.
        """
        rest = ((place, row, _NO_TEXT) for place, row in enumerate(order))
        waiting: dict[int, list[tuple[int, int]]] = defaultdict(list)
        """Text -> a heap of (place in the order, row)."""
        candidates: list[tuple[int, int, int]] = []
        """A heap of the same with the text that the row waited for; all of them are before the rest."""

        def look_again(text: int) -> None:
            if rows := waiting.get(text):
                heappush(candidates, (*heappop(rows), text))

        while True:
            batch: list[int] = []
            held: set[int] = set()
            while len(batch) < self.batch_size:
                found = heappop(candidates) if candidates else next(rest, None)
                if found is None:
                    break
                place, row, awaited = found
                blocking = awaited if awaited in held else next((one for one in self._texts[row] if one in held), None)
                if blocking is None:
                    batch.append(row)
                    held.update(self._texts[row])
                    continue
                heappush(waiting[blocking], (place, row))
                if blocking != awaited:
                    look_again(awaited)
            if not batch:
                return
            yield batch
            for text in held:
                look_again(text)
