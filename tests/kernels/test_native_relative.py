"""Attention with vectors by distance, forward and backward, against the textbook in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from native_support import (
    assert_near_float64,
    assert_same_on_two_threads,
    need_native,
    outputs_and_gradients,
    position_of,
    quick,
)

from whet.kernels import gpu_attention
from whet.kernels import packed_attention as fused_attention
from whet.kernels.attention_spec import AttentionSpec, Relative, attend_reference
from whet.kernels.batch_position import Drop

need_native()
LENGTHS = st.lists(st.integers(1, 200), min_size=1, max_size=4)
WIDTHS = st.sampled_from([7, 32, 64])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
ROUNDINGS = 6
"""Of gradients: the sums of three products, of weights that were computed from the sums of three products."""


def spec_of(lengths, *, p=0.0, causal=False, window=None, keys=None) -> AttentionSpec:
    position = position_of(lengths)
    counts = None if keys is None else torch.tensor(keys, dtype=torch.int32)
    drop = Drop(p, position, 5) if p else None
    return AttentionSpec(position.cu_seqlens, 0.2, causal, drop, key_counts=counts, window=window)


def tensors(lengths, heads, head_width, dtype=torch.float32, n_places=50):
    """Return the joined projections, and the two tables of vectors."""
    generator = torch.Generator().manual_seed(sum(lengths) + head_width)
    shapes = ((sum(lengths), 3, heads, head_width), (n_places, heads, head_width), (n_places, heads, head_width))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def places_of(lengths, n_places=50, more=0) -> torch.Tensor:
    """Return the places of all distances in rows of these lengths and `more`, near ones apart and far ones together."""
    reach = max(lengths) - 1 + more
    distance = torch.arange(-reach, reach + 1)
    near = distance.clamp(-15, 15)
    return (near + (distance - near) // 16 + n_places // 2).clamp(0, n_places - 1).int()


def by(attend: Any, spec, places, which="both") -> Any:
    def run(x, keys, queries):
        relative = Relative(keys if which != "queries" else None, queries if which != "keys" else None, places)
        found = attend(x[:, 0], x[:, 1], x[:, 2], spec, relative)
        return found + 0.0 * (keys.sum() + queries.sum()).to(found.dtype)  # an unused table has a gradient of 0

    return run


@quick
@given(lengths=LENGTHS, width=WIDTHS, dtype=DTYPES, more=st.sampled_from([0, 1, 90]), p=st.sampled_from([0.0, 0.2]))
def test_vectors_by_distance_match_the_reference(lengths, width, dtype, more, p):
    spec, places = spec_of(lengths, p=p), places_of(lengths, more=more)
    ours, exact = (by(attend, spec, places) for attend in (fused_attention.attend, attend_reference))
    assert_near_float64(ours, exact, tensors(lengths, 2, width, dtype), ROUNDINGS)


@pytest.mark.parametrize("which", ["keys", "queries"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_term_alone_matches_the_reference(which, dtype):
    lengths = [130, 1, 64, 37]
    spec, places = spec_of(lengths, p=0.1), places_of(lengths)
    ours, exact = (by(attend, spec, places, which) for attend in (fused_attention.attend, attend_reference))
    assert_near_float64(ours, exact, tensors(lengths, 2, 24, dtype), ROUNDINGS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_longer_than_every_block_match_the_reference(dtype):
    lengths = [1300, 3]
    spec, places = spec_of(lengths, p=0.1), places_of(lengths, 300)
    ours, exact = (by(attend, spec, places) for attend in (fused_attention.attend, attend_reference))
    assert_near_float64(ours, exact, tensors(lengths, 1, 16, dtype, 300), ROUNDINGS)


@quick
@given(lengths=LENGTHS, padding=st.integers(0, 90), window=st.sampled_from([None, 5, 70]), causal=st.booleans())
def test_windows_and_padding_tokens_match_the_reference(lengths, padding, window, causal):
    total = [n + padding // (i + 1) for i, n in enumerate(lengths)]
    spec = spec_of(total, p=0.1, window=window, causal=causal, keys=None if causal else lengths)
    ours, exact = (by(attend, spec, places_of(total)) for attend in (fused_attention.attend, attend_reference))
    assert_near_float64(ours, exact, tensors(total, 2, 32), ROUNDINGS)


@pytest.mark.parametrize("p", [0.0, 0.2])
def test_padded_attention_has_vectors_by_distance(p):
    lengths = [60, 33, 9]
    spec, places = spec_of(lengths, p=p, keys=[40, 33, 3]), places_of(lengths)
    ours, exact = (by(attend, spec, places) for attend in (gpu_attention.attend_padded, attend_reference))
    assert_near_float64(ours, exact, tensors(lengths, 2, 16), ROUNDINGS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_does_not_depend_on_the_rows_around_it(dtype):
    """Not on their length either, which makes the operator's own tables longer."""
    x, keys, queries = tensors([150, 90], 2, 32, dtype)
    found = by(fused_attention.attend, spec_of([150, 90]), places_of([150, 90]))(x, keys, queries)
    alone = by(fused_attention.attend, spec_of([90]), places_of([90]))(x[150:], keys, queries)
    assert torch.equal(found[150:], alone)


def test_gradients_do_not_depend_on_threads():
    lengths = [450, 90, 17, 230, 5, 8, 60, 70, 33, 21]
    run = by(fused_attention.attend, spec_of(lengths, p=0.1), places_of(lengths))
    inputs = tensors(lengths, 3, 32)
    assert_same_on_two_threads(lambda: outputs_and_gradients(run, inputs))


def test_vectors_of_other_lengths_in_views_are_read_in_place():
    """As a family passes them: halves of one product."""
    lengths = [70, 20]
    x, keys, queries = tensors(lengths, 2, 24)
    spec, places = spec_of(lengths), places_of(lengths)
    joined = torch.stack([keys, queries], dim=1)
    wanted = fused_attention.attend(*x.unbind(1), spec, Relative(keys, queries, places))
    found = fused_attention.attend_joined(x, spec, Relative(joined[:, 0], joined[:, 1], places))
    assert torch.equal(found, wanted)


def test_reference_passes_the_gradient_check():
    """In float64, by finite differences."""
    lengths = [9, 3]
    x, keys, queries = (t.double().requires_grad_() for t in tensors(lengths, 2, 4, n_places=12))
    run = by(attend_reference, spec_of(lengths), places_of(lengths, 12))
    assert torch.autograd.gradcheck(run, (x, keys, queries))
