"""One prediction from several windows: the mean or the maximum of their logits."""

from __future__ import annotations

import numpy as np

from whet.jobs.fields import Pooling


def pooled(logits: np.ndarray, group_of: np.ndarray, pooling: Pooling = "mean") -> np.ndarray:
    """Return the logits of each group, (groups, labels); `group_of` (rows,) does not decrease and leaves none out."""
    starts = np.flatnonzero(np.diff(group_of, prepend=-1))
    if len(starts) == len(group_of):
        return logits
    if pooling == "max":
        return np.maximum.reduceat(logits, starts)
    counts = np.diff(np.append(starts, len(group_of)))
    return np.add.reduceat(logits.astype(np.float64), starts) / counts[:, None]
