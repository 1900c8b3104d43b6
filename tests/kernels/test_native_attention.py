"""Packed attention, forward and backward, against the textbook in float64."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

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
    relative,
)

from whet.kernels import packed_attention as fused_attention
from whet.kernels.attention_spec import AttentionSpec, attend_reference
from whet.kernels.batch_position import Drop

need_native()
HERE = Path(__file__).parent
LENGTHS = st.lists(st.integers(1, 130), min_size=1, max_size=4)
LONGER = st.lists(st.integers(3, 130), min_size=1, max_size=4)  # one key alone: queries have no gradient but noise
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


def joined(lengths, heads, head_width, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(lengths) + head_width)
    return torch.randn(sum(lengths), 3, heads, head_width, generator=generator).to(dtype)


def spec_of(lengths, *, p=0.0, causal=False, scale=0.3):
    position = position_of(lengths)
    return AttentionSpec(position.cu_seqlens, scale, causal, Drop(p, position, 5) if p else None)


@quick
@given(
    lengths=LENGTHS,
    heads=st.integers(1, 3),
    head_width=st.sampled_from([1, 7, 16, 32, 40, 64, 128]),
    dtype=DTYPES,
    causal=st.booleans(),
    p=st.sampled_from([0.0, 0.2]),
)
def test_joined_projections_match_the_reference(lengths, heads, head_width, dtype, causal, p):
    spec = spec_of(lengths, p=p, causal=causal)
    assert_near_float64(
        lambda x: fused_attention.attend_joined(x, spec),
        lambda x: attend_reference(*x.unbind(1), spec),
        [joined(lengths, heads, head_width, dtype)],
        n_roundings=3,  # of a gradient in bf16: the output that backward reads, its sum with the gradient, the result
    )


@quick
@given(lengths=LONGER, group=st.integers(1, 3), causal=st.booleans(), p=st.sampled_from([0.0, 0.2]))
def test_query_heads_share_keys(lengths, group, causal, p):
    spec = spec_of(lengths, p=p, causal=causal)
    q, k, v = joined(lengths, 2 * group, 24).unbind(1)
    inputs = [q, k[:, ::group], v[:, ::group]]
    assert_near_float64(lambda *x: fused_attention.attend(*x, spec), lambda *x: attend_reference(*x, spec), inputs)


@pytest.mark.parametrize("causal", [False, True])
def test_rows_longer_than_a_block_match_the_reference(causal):
    spec = spec_of([1100, 3], p=0.1, causal=causal)
    assert_near_float64(
        lambda x: fused_attention.attend_joined(x, spec),
        lambda x: attend_reference(*x.unbind(1), spec),
        [joined([1100, 3], 1, 16)],
    )


@quick
@given(
    lengths=LONGER,
    padding=st.integers(0, 140),
    dtype=DTYPES,
    p=st.sampled_from([0.0, 0.2]),
    head_width=st.sampled_from([7, 32, 64]),
)
def test_tokens_after_the_keys_are_only_queries(lengths, padding, dtype, p, head_width):
    total = [n + padding // (i + 1) for i, n in enumerate(lengths)]
    spec = replace(spec_of(total, p=p), key_counts=torch.tensor(lengths, dtype=torch.int32))
    x = joined(total, 2, head_width, dtype)
    assert_near_float64(
        lambda x: fused_attention.attend_joined(x, spec), lambda x: attend_reference(*x.unbind(1), spec), [x]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_without_keys_do_not_change_other_tokens(dtype):
    """Their own keys and values are not read, and get gradients of 0."""
    spec = replace(spec_of([70, 40], p=0.1), key_counts=torch.tensor([50, 40], dtype=torch.int32))
    real = torch.tensor([*range(50), *range(70, 110)])
    x = joined([70, 40], 2, 32, dtype)
    x[50:70, 1:] = torch.nan
    out, gradient = outputs_and_gradients(lambda x: fused_attention.attend_joined(x, spec), [x])
    assert out.isfinite().all()
    assert (gradient[50:70, 1:] == 0).all()
    assert torch.equal(out[real], fused_attention.attend_joined(x[real], spec_of([50, 40], p=0.1)))


def test_large_scores_do_not_overflow():
    lengths, spec = [600], spec_of([600], scale=200.0)
    x = joined(lengths, 1, 16)
    exact = attend_reference(*x.double().unbind(1), spec)
    found = fused_attention.attend_joined(x, spec)
    assert torch.isfinite(found).all()
    assert relative(found, exact) < 2e-3  # scores reach 5000, where one ulp is 5e-4


def test_strided_views_are_read_in_place():
    """Heads before tokens, as models of the Transformers library hold them."""
    spec = spec_of([40, 25])
    q, k, v = (t.transpose(0, 1).contiguous().transpose(0, 1) for t in joined([40, 25], 3, 32).unbind(1))
    assert not q.is_contiguous()
    straight = [t.contiguous() for t in (q, k, v)]
    found = outputs_and_gradients(lambda *x: fused_attention.attend(*x, spec), [q, k, v])
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            found, outputs_and_gradients(lambda *x: fused_attention.attend(*x, spec), straight), strict=True
        )
    )


def test_row_attends_only_to_itself():
    x = joined([50, 30], 2, 16)
    alone = fused_attention.attend_joined(x[50:], spec_of([30]))
    assert torch.equal(fused_attention.attend_joined(x, spec_of([50, 30]))[50:], alone)


def test_results_do_not_depend_on_threads():
    lengths = [450, 90, 17]
    spec = spec_of(lengths, p=0.1)
    x = joined(lengths, 2, 32)
    assert_same_on_two_threads(lambda: outputs_and_gradients(lambda a: fused_attention.attend_joined(a, spec), [x]))


def test_bf16_results_do_not_depend_on_threads():
    lengths = [1250, 91, 1]
    spec = spec_of(lengths, p=0.1, causal=True)
    x = joined(lengths, 2, 32, torch.bfloat16)
    assert_same_on_two_threads(lambda: outputs_and_gradients(lambda a: fused_attention.attend_joined(a, spec), [x]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_is_not_hidden_by_attention(dtype):
    """A diverged row shows, and leaves the others alone."""
    x, spec = joined([70, 33], 2, 32, dtype), spec_of([70, 33], p=0.1)
    clean = fused_attention.attend_joined(x, spec)
    x[40, 1, 0, 5] = torch.nan  # a key of the first row's first head
    found = fused_attention.attend_joined(x, spec)
    assert found[:70, 0].isnan().all()
    assert torch.equal(found[:70, 1], clean[:70, 1])
    assert torch.equal(found[70:], clean[70:])


_PROBE = """
import torch
from test_native_attention import joined, spec_of
from native_support import TOLERANCE, outputs_and_gradients, relative
from whet.kernels import packed_attention as fused_attention
from whet.kernels.attention_spec import attend_reference
for dtype in TOLERANCE:
    for causal in (False, True):
        x, spec = joined([75, 600, 2], 2, 40, dtype), spec_of([75, 600, 2], p=0.2, causal=causal)
        found = outputs_and_gradients(lambda a: fused_attention.attend_joined(a, spec), [x])
        exact = outputs_and_gradients(lambda a: attend_reference(*a.unbind(1), spec), [x.double()])
        assert all(relative(a, b) < TOLERANCE[dtype] for a, b in zip(found, exact, strict=True)), (dtype, causal)
"""


@pytest.mark.parametrize("level", ["v4", "v3", "baseline"])
def test_smaller_instruction_set_gives_correct_attention(level):
    """v4 is without the dot product of bf16."""
    subprocess.run([sys.executable, "-c", _PROBE], env={**os.environ, "WHET_ISA": level}, cwd=HERE, check=True)
