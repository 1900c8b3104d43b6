"""Which steps of an epoch are measured where not all can be."""

from __future__ import annotations


def spread(batches: list[list[int]], n_tokens: list[int], n_steps: int) -> list[list[int]]:
    """Return the longest batch, to warm up with, and n_steps - 1 batches spread evenly over all from short to long.

    Length grouping sorts the rows: the first steps of an epoch, all long, would speak for none of the others. Two more
    follow, for a Trainer that makes batches ahead.
    """
    ordered = sorted(batches, key=lambda batch: sum(n_tokens[row] for row in batch))
    n_spread = max(n_steps - 1, 1)
    chosen = [ordered[int((i + 0.5) / n_spread * len(ordered))] for i in range(n_spread)]
    return [ordered[-1], *chosen, ordered[0], ordered[-1]]
