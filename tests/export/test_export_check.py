"""The comparison of an export with its model: what is no number is not close, whichever batch it is in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from whet.errors import ConfigError
from whet.export import check

KINDS: tuple[check.Kind, ...] = ("rows", "vectors", "scores", "tokens")


def _padded(rows: Sequence[Tensor], *, full: int = 0) -> check.Columns:
    ids = pad_sequence([*rows, torch.zeros(full, dtype=torch.int64)], batch_first=True)[: len(rows)]
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


class _Model:
    """Gives two numbers for each row or token; in one call the export's first number is another one."""

    def __init__(self, kind: check.Kind, odd_call: int | None = None, value: float = 0.0) -> None:
        self._kind, self._odd_call, self._value, self._n_calls = kind, odd_call, value, 0

    def __call__(self, columns: check.Columns) -> dict[str, Any]:
        ids = columns["input_ids"].float()
        found = torch.stack([ids, 1 - ids], dim=-1)
        found = found if self._kind == "tokens" else found.sum(1)
        if self._n_calls == self._odd_call:
            found[0, ..., 0].view(-1)[0] = self._value
        self._n_calls += 1
        return {"logits": found}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", [0, 1, 7])
def test_nan_in_any_batch_is_refused(kind: check.Kind, call: int) -> None:
    rows = [torch.arange(1, 3 + n % 5) for n in range(check.N_ROWS)]
    check.compared(rows, _padded, 8, _Model(kind), _Model(kind), kind).require_close(1e-4)
    found = check.compared(rows, _padded, 8, _Model(kind), _Model(kind, call, float("nan")), kind)
    with pytest.raises(ConfigError, match="does not compute what the model computes"):
        found.require_close(1e-4)
