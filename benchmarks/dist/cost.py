"""A model of what a step of several ranks costs: measured rates, bytes, and their overlap with the backward pass."""

from __future__ import annotations

from dataclasses import dataclass

BACKWARD = 2 / 3
"""Share of the backward pass in a step's products: two of three."""
EXCHANGES = 10
"""Small exchanges of a step: counts, losses, flags."""


@dataclass(frozen=True)
class Network:
    """What was measured between two ranks."""

    bytes_per_s: float
    """Of a large sum: bytes of the buffer in a second, times 2 (n - 1) / n."""
    cpu_s_per_byte: float
    """Time of a core for a byte of the buffer: that of a sum without a limit on the link, when both cores are busy."""
    latency_s: float
    """Of a sum of one number."""


@dataclass(frozen=True)
class Work:
    """A step of one rank alone."""

    step_s: float
    dense_bytes: int
    """Gradients that are summed during the backward pass."""
    row_bytes: int
    """Rows of embedding tables that a rank sends after it."""
    table_bytes: int
    """Of these tables: they are summed instead once they are shorter than the rows of all ranks (dist/tables.py)."""
    bucket_bytes: int
    """Of a bucket; the last of them is sent after the backward pass."""


def step_s(work: Work, network: Network, n_ranks: int) -> float:
    """Return the seconds of a step of so many ranks, each with as many tokens as the one of `work`."""
    if n_ranks == 1:
        return work.step_s
    ring = 2 * (n_ranks - 1) / n_ranks
    forward_s, backward_s = work.step_s * (1 - BACKWARD), work.step_s * BACKWARD
    busy_s = work.dense_bytes * network.cpu_s_per_byte * ring  # the core that computes copies and adds as well
    backward_s += busy_s
    sent, done_s = 0, 0.0
    n_full, rest = divmod(work.dense_bytes, work.bucket_bytes)
    sizes = [rest, *[work.bucket_bytes] * n_full]
    for size in sizes:
        sent += size
        ready_s = forward_s + backward_s * min(sent / work.dense_bytes, 1.0)
        done_s = max(done_s, ready_s) + size * ring / network.bytes_per_s + 2 * (n_ranks - 1) * network.latency_s
    by_rows = n_ranks * work.row_bytes < work.table_bytes
    table_bytes = (n_ranks - 1) * work.row_bytes if by_rows else ring * work.table_bytes
    tables_s = table_bytes * (1 / network.bytes_per_s + network.cpu_s_per_byte)
    small_s = EXCHANGES * network.latency_s * max(1.0, (n_ranks - 1) / 2)
    return max(done_s, forward_s + backward_s) + tables_s + small_s
