"""Forward passes without gradients, and what becomes of them."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from whet.data.batch import Batch
from whet.models.objective import IGNORED, Objective
from whet.precision.policy import Precision
from whet.train import stop


def forward_batches(
    model: nn.Module, objective: Objective, dataset: Any, n_rows: int, precision: Precision
) -> Iterator[tuple[Batch, Any]]:
    """Yield each batch of `n_rows` rows in order, with the model's output; the model's mode is restored after."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    was_training = model.training
    model.eval()
    try:
        for first in range(0, len(dataset), n_rows):
            rows = range(first, min(first + n_rows, len(dataset)))
            batch = objective.batch(dataset, rows, 0).to(device)
            with torch.no_grad(), precision.forward():
                output = objective.forward(batch, seed=0, step=0)
            yield batch, output
            stop.check()
    finally:
        model.train(was_training)


def stack(parts: list[tuple[np.ndarray, ...]]) -> Any:
    """Return the parts' arrays one below the other, second dims filled up with -100; one array, or a tuple of them."""
    columns = [_stack_column(list(column)) for column in zip(*parts, strict=True)]
    return columns[0] if len(columns) == 1 else tuple(columns)


def _stack_column(arrays: list[np.ndarray]) -> np.ndarray:
    if arrays[0].ndim < 2:
        return np.concatenate(arrays)
    width = max(array.shape[1] for array in arrays)
    return np.concatenate(
        [
            np.pad(a, [(0, 0), (0, width - a.shape[1])] + [(0, 0)] * (a.ndim - 2), constant_values=IGNORED)
            for a in arrays
        ]
    )
