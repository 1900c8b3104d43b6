"""Native operators read and write through addresses: tensors that do not fit together are refused before that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from whet.kernels.activation import bias_act, gated_act
from whet.kernels.attention_spec import AttentionSpec, Relative
from whet.kernels.batch_position import BatchPosition, Drop
from whet.kernels.cross_entropy import linear_cross_entropy, row_cross_entropy
from whet.kernels.dropout import dropout
from whet.kernels.embedding import Tables, embed
from whet.kernels.library import library
from whet.kernels.matrix import weight_gradient
from whet.kernels.norm import Norm, add_norm
from whet.kernels.packed_attention import attend

pytestmark = pytest.mark.skipif(library() is None, reason="plain torch checks its tensors itself")

_N, _H, _K = 7, 2, 8
_ENDS = torch.tensor([0, 3, 7], dtype=torch.int32)
_SPEC = AttentionSpec(_ENDS, 1.0)


def _numbers(*shape: int) -> Tensor:
    return torch.ones(shape)


def _ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _attention(n: int = _N, k: Any = None, v: Any = None, bias: Any = None, **changes: Any) -> Tensor:
    q = _numbers(n, _H, _K)
    k, v = (_numbers(_N, _H, _K) if one is None else one for one in (k, v))
    return attend(q, k, v, replace(_SPEC, **changes), bias)


def _position(n_rows: int, n_tokens: int) -> BatchPosition:
    slots, rows = torch.zeros(n_tokens, dtype=torch.int32), torch.zeros(n_rows, dtype=torch.int32)
    return BatchPosition(0, 0, slots, slots, _ENDS, rows)


def _places(*places: int) -> Relative:
    return Relative(_numbers(3, _H, _K), None, _ints(*places))


_WRONG: dict[str, Callable[[], Any]] = {
    "fewer queries than rows have tokens": lambda: _attention(5),
    "fewer keys": lambda: _attention(k=_numbers(5, _H, _K)),
    "fewer values": lambda: _attention(v=_numbers(5, _H, _K)),
    "narrower keys": lambda: _attention(k=_numbers(_N, _H, 4), v=_numbers(_N, _H, 4)),
    "heads that are no groups": lambda: _attention(k=_numbers(_N, 3, _K), v=_numbers(_N, 3, _K)),
    "rows behind the tokens": lambda: _attention(cu_seqlens=_ints(0, 3, 9)),
    "rows that overlap": lambda: _attention(cu_seqlens=_ints(0, 90, 7)),
    "rows before the tokens": lambda: _attention(cu_seqlens=_ints(-4, 3, 7)),
    "more keys than tokens": lambda: _attention(key_counts=_ints(3, 40)),
    "key counts of fewer rows": lambda: _attention(key_counts=_ints(3)),
    "masks of fewer rows": lambda: _attention(drop=Drop(0.5, _position(1, _N), 0)),
    "a bias of too few distances": lambda: _attention(bias=_numbers(_H, 3)),
    "places of too few distances": lambda: _attention(bias=_places(0, 1, 2)),
    "places outside of the table": lambda: _attention(bias=_places(*[3] * 7)),
    "masks of fewer tokens": lambda: dropout(_numbers(_N, 4), Drop(0.5, _position(2, 5), 0)),
    "a smaller residual": lambda: add_norm(_numbers(_N, 4), _numbers(5, 4), Norm(_numbers(4), None, 1e-5)),
    "a narrower norm": lambda: add_norm(_numbers(_N, 4), None, Norm(_numbers(3), None, 1e-5)),
    "a narrower bias": lambda: bias_act(_numbers(_N, 4), _numbers(3), "gelu"),
    "a smaller gate": lambda: gated_act(_numbers(5, 4), _numbers(_N, 4), "silu"),
    "fewer ids": lambda: embed(
        (torch.zeros(7, dtype=torch.int64), torch.zeros(5, dtype=torch.int64)),
        Tables((_numbers(3, 4), _numbers(3, 4)), (None, None)),
        Norm(_numbers(4), _numbers(4), 1e-5),
    ),
    "fewer labels": lambda: linear_cross_entropy(_numbers(_N, 4), _numbers(9, 4), torch.zeros(5, dtype=torch.int64)),
    "logits of fewer tokens": lambda: row_cross_entropy(_numbers(5), torch.zeros(2, dtype=torch.int64), _ENDS),
    "a label of another row": lambda: row_cross_entropy(_numbers(_N), torch.tensor([0, 9]), _ENDS),
    "gradients of fewer rows": lambda: weight_gradient(_numbers(5, 4), _numbers(_N, 4), bias=True),
}


@pytest.mark.parametrize("name", _WRONG)
def test_tensors_that_do_not_fit_are_refused(name: str) -> None:
    with pytest.raises((ValueError, IndexError), match=r"do not fit together|outside of"):
        _WRONG[name]()


def test_tensors_that_fit_are_taken() -> None:
    for found in (
        _attention(),
        _attention(key_counts=_ints(3, 0)),
        _attention(k=_numbers(_N, 1, _K), v=_numbers(_N, 1, _K)),
        _attention(bias=_numbers(_H, 7)),
        _attention(bias=_places(0, 0, 1, 1, 2, 2, 2)),
        _attention(drop=Drop(0.5, _position(2, _N), 0)),
    ):
        assert found.shape == (_N, _H, _K)
