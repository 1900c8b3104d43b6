"""The best starts and ends of each row of a packed batch."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from whet.tasks.qa.decode import concat, top_spans


def test_best_spans_break_ties_by_the_lowest_index() -> None:
    starts = torch.tensor([1.0, 3.0, 3.0, 2.0, 9.0, -5.0])  # rows of 4 and 2 tokens
    ends = torch.tensor([0.0, 0.0, 0.0, 1.0, -7.0, -6.0])
    scores = top_spans(starts, ends, torch.tensor([0, 4, 6]), k=3)
    assert scores.start_index.tolist() == [[1, 2, 3], [0, 1, -1]]
    assert scores.start_logit.tolist() == [[3.0, 3.0, 2.0], [9.0, -5.0, -math.inf]]
    assert scores.end_index.tolist() == [[3, 0, 1], [1, 0, -1]]
    assert scores.end_logit.tolist() == [[1.0, 0.0, 0.0], [-6.0, -7.0, -math.inf]]
    assert scores.null_start.tolist() == [1.0, 9.0]
    assert scores.null_end.tolist() == [0.0, -7.0]


def test_bf16_logits_become_float32() -> None:
    logits = torch.tensor([0.5, 1.5], dtype=torch.bfloat16, requires_grad=True)
    scores = top_spans(logits, logits, np.array([0, 2], dtype=np.int32), k=2)
    assert scores.start_logit.dtype == scores.null_end.dtype == np.float32
    assert scores.start_logit.tolist() == [[1.5, 0.5]]
    assert scores.start_index.dtype == np.int64


def test_minus_infinity_is_distinguished_from_padding() -> None:
    logits = torch.tensor([-math.inf, 1.0, 2.0, 3.0])  # rows of 2 and 2 tokens
    assert top_spans(logits, logits, np.array([0, 2, 4]), k=3).start_index.tolist() == [[1, 0, -1], [1, 0, -1]]


@given(st.lists(st.integers(1, 7), min_size=1, max_size=6), st.integers(1, 9), st.integers(0, 99), st.data())
def test_batches_do_not_change_the_scores(lengths: list[int], k: int, seed: int, data) -> None:
    cu_seqlens = np.cumsum([0, *lengths])
    logits = torch.from_numpy(np.random.default_rng(seed).integers(0, 3, size=(2, cu_seqlens[-1])).astype(np.float32))
    cut = data.draw(st.integers(0, len(lengths) - 1))
    token = cu_seqlens[cut]
    parts = [top_spans(logits[0, token:], logits[1, token:], cu_seqlens[cut:] - token, k)]
    if cut:
        parts.insert(0, top_spans(logits[0, :token], logits[1, :token], cu_seqlens[: cut + 1], k))
    joined = concat(parts)
    for name, column in vars(top_spans(logits[0], logits[1], cu_seqlens, k)).items():
        np.testing.assert_array_equal(getattr(joined, name), column, err_msg=name)
