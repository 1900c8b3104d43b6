"""Rows padded for one call of torch, against the textbook row by row in float64: what a GPU computes in float32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from native_support import assert_near_float64, outputs_and_gradients, position_of, quick, relative

from whet.kernels import gpu_attention
from whet.kernels.attention_spec import AttentionSpec, attend_reference
from whet.kernels.batch_position import Drop
from whet.kernels.random import attention_bits, attention_bits_of_rows

LENGTHS = st.lists(st.integers(3, 130), min_size=1, max_size=5)


def spec_of(lengths, *, p=0.0, causal=False, counted=False):
    position = position_of(lengths)
    max_seqlen = torch.tensor(max(lengths)) if counted else None
    return AttentionSpec(position.cu_seqlens, 0.3, causal, Drop(p, position, 5) if p else None, max_seqlen)


def tensors(lengths, heads, key_heads, width, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(lengths) + width)
    return [torch.randn(sum(lengths), n, width, generator=generator).to(dtype) for n in (heads, key_heads, key_heads)]


@quick
@given(
    lengths=LENGTHS,
    group=st.integers(1, 3),
    width=st.sampled_from([7, 16, 64]),
    causal=st.booleans(),
    p=st.sampled_from([0.0, 0.2]),
    counted=st.booleans(),
)
def test_padded_attention_matches_the_textbook(lengths, group, width, causal, p, counted):
    spec = spec_of(lengths, p=p, causal=causal, counted=counted)
    assert_near_float64(
        lambda *x: gpu_attention.attend_padded(*x, spec),
        lambda *x: attend_reference(*x, spec),
        tensors(lengths, 2 * group, 2, width),
    )


@pytest.mark.parametrize("p", [0.0, 0.2])
def test_padded_tokens_after_the_keys_are_only_queries(p):
    lengths = [60, 33, 9]
    spec = replace(spec_of(lengths, p=p), key_counts=torch.tensor([40, 33, 3], dtype=torch.int32))
    assert_near_float64(
        lambda *x: gpu_attention.attend_padded(*x, spec),
        lambda *x: attend_reference(*x, spec),
        tensors(lengths, 2, 2, 16),
    )


@pytest.mark.parametrize("p", [0.0, 0.2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_padded_attention_works_in_half_precision(dtype, p):
    lengths = [100, 3, 50]
    spec, inputs = spec_of(lengths, p=p, causal=True), tensors(lengths, 4, 2, 16, dtype)
    found = outputs_and_gradients(lambda *x: gpu_attention.attend_padded(*x, spec), inputs)
    exact = outputs_and_gradients(lambda *x: attend_reference(*x, spec), [t.double() for t in inputs])
    for ours, theirs in zip(found, exact, strict=True):
        # torch rounds weights and the gradients of scores too, each at 2^-9 in bf16; seen: 1.6 times 2^-8
        assert relative(ours, theirs) < 2**-7


def test_row_of_one_token_and_row_groups_match_the_textbook(monkeypatch):
    lengths = [1, 40, 17, 2, 33]
    spec, inputs = spec_of(lengths, p=0.3), tensors(lengths, 2, 2, 16)
    at_once = outputs_and_gradients(lambda *x: gpu_attention.attend_padded(*x, spec), inputs)
    monkeypatch.setattr(gpu_attention, "_MOST_WEIGHTS", 2 * 2 * 40 * 40)
    in_parts = outputs_and_gradients(lambda *x: gpu_attention.attend_padded(*x, spec), inputs)
    for one, other in zip(at_once, in_parts, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)  # a product of another size sums in another order


@pytest.mark.parametrize("p", [0.0, 0.2])
def test_other_rows_change_nothing(p):
    lengths = [50, 30]
    inputs, spec = tensors(lengths, 2, 2, 16), spec_of(lengths, p=p)
    changed = [torch.cat([t[:50], 100 * t[50:]]) for t in inputs]
    assert torch.equal(
        gpu_attention.attend_padded(*inputs, spec)[:50], gpu_attention.attend_padded(*changed, spec)[:50]
    )


def test_random_bits_of_rows_equal_those_of_each_row():
    slots, key = torch.tensor([3, 900, 7], dtype=torch.int32), (17, 2**31)
    together = attention_bits_of_rows(key, slots, 2, 30, 90)
    for row, slot in zip(together, slots.tolist(), strict=True):
        assert torch.equal(row[:, :20, :70], attention_bits(key, slot, 2, 20, 70, device=slots.device))


def test_autocast_does_not_round_the_scores():
    lengths = [60]
    inputs, spec = [2 * t for t in tensors(lengths, 2, 2, 32)], spec_of(lengths, p=0.2)
    alone = gpu_attention.attend_padded(*inputs, spec)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(gpu_attention.attend_padded(*inputs, spec), alone)
