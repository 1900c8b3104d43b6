"""What `compute_metrics` gets: the arrays of all batches, in transformers' form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import EvalPrediction
from transformers.trainer_utils import denumpify_detensorize

from whet.data.batch import Batch
from whet.errors import ConfigError
from whet.kernels.cross_entropy import to_rows
from whet.objectives.base import IGNORED


class Extras:
    """The inputs and the losses of an evaluation's batches, if `include_for_metrics` names them."""

    def __init__(self, model: nn.Module, wanted: Sequence[str], pad_id: int) -> None:
        self.wanted, self._pad_id = wanted, pad_id
        self._input_name = getattr(model, "main_input_name", "input_ids")
        self._inputs: list[np.ndarray] = []
        self._losses: list[np.ndarray] = []

    def of(self, inputs: Any) -> np.ndarray | None:
        """Return what a batch was computed from, padded; None if nobody asks for it."""
        return self._input_of(inputs) if "inputs" in self.wanted else None

    def take(self, inputs: np.ndarray | None, loss: float | None, n_rows: int) -> None:
        """Keep the inputs of a batch, and its mean loss, once for each row."""
        if inputs is not None:
            self._inputs.append(inputs)
        if "loss" in self.wanted and loss is not None:
            self._losses.append(np.full(n_rows, loss, dtype=np.float32))

    def joined(self, *, concat: bool) -> dict[str, Any]:
        """Return EvalPrediction's arguments."""
        found = {"inputs": self._inputs, "losses": self._losses}
        return {name: arrays if not concat else stacked(arrays) for name, arrays in found.items() if arrays}

    def _input_of(self, inputs: Any) -> np.ndarray:
        given = inputs.inputs if isinstance(inputs, Batch) else inputs
        tokens = given.get(self._input_name) if isinstance(given, Mapping) else None
        if not isinstance(tokens, Tensor):
            raise ConfigError(
                what="include_for_metrics asks for inputs that the batches do not have",
                got=", ".join(map(str, given)) if isinstance(given, Mapping) else type(given).__name__,
                why=f"compute_metrics gets the column {self._input_name}, which the model names as its main input",
                fix="set main_input_name of the model to one of these columns, or leave inputs out",
            )
        if isinstance(inputs, Batch) and inputs.cu_seqlens is not None and inputs.columns is None:
            return _padded(inputs, tokens, self._pad_id)
        plain = tokens.detach().cpu()
        return (plain.float() if plain.dtype == torch.bfloat16 else plain).numpy()  # numpy has no bfloat16


def joined(parts: Sequence[tuple[np.ndarray, ...]], *, concat: bool) -> Any:
    """Return the batches' arrays as one array or a tuple of them; without `concat`, as a list with one of a batch."""
    if not parts:
        return None  # transformers gives None too
    if not concat:
        return [part[0] if len(part) == 1 else part for part in parts]
    columns = [stacked(column) for column in zip(*parts, strict=True)]
    return columns[0] if len(columns) == 1 else tuple(columns)


def stacked(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return the concatenated arrays (rows, ...), the other dimensions padded with -100."""
    if arrays[0].ndim < 2:
        return np.concatenate(arrays)
    widths = np.max([array.shape[1:] for array in arrays], axis=0)
    return np.concatenate(
        [
            np.pad(array, [(0, 0), *((0, most - own) for own, most in zip(array.shape[1:], widths, strict=True))],
                   constant_values=IGNORED)
            for array in arrays
        ]
    )  # fmt: skip


def judged(
    metrics_of: Callable[..., Mapping[str, Any]] | None, predictions: Any, labels: Any, extras: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the metrics as plain numbers; empty if there are no predictions or labels."""
    if metrics_of is None or predictions is None or labels is None:
        return {}
    prediction = EvalPrediction(predictions, labels, **extras)
    found: Any = metrics_of(prediction)
    if not isinstance(found, Mapping):
        raise ConfigError(
            what="compute_metrics returned no metrics",
            got=type(found).__name__,
            why="an evaluation's metrics have names",
            fix="return a dict from compute_metrics, such as {'accuracy': 0.5}",
        )
    return denumpify_detensorize(dict(found))  # pyright: ignore[reportReturnType]


def _padded(batch: Batch, tokens: Tensor, pad_id: int) -> np.ndarray:
    """Return the real tokens of a packed batch as padded rows (B, T)."""
    assert batch.cu_seqlens is not None
    of_rows, cu_seqlens = tokens[0, : batch.n_in_rows], batch.cu_seqlens
    if batch.padding is not None:
        of_rows, cu_seqlens = of_rows[batch.padding.real], batch.padding.real_starts
    return to_rows(of_rows, cu_seqlens, pad_id).cpu().numpy()
