"""Packed attention in a window and with a bias by distance, forward and backward, against the textbook in float64."""

from __future__ import annotations

from dataclasses import replace
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
from whet.kernels.attention_spec import AttentionSpec, attend_reference
from whet.kernels.batch_position import Drop

need_native()
LENGTHS = st.lists(st.integers(3, 200), min_size=1, max_size=4)
WINDOWS = st.sampled_from([None, 1, 5, 63, 64, 70, 500])
ROUNDINGS = 5
"""Of a bias's gradient in bf16: terms that add up to 0 for each query, from an output that was rounded."""
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


def spec_of(lengths, *, p=0.0, causal=False, window=None, keys=None) -> AttentionSpec:
    position = position_of(lengths)
    counts = None if keys is None else torch.tensor(keys, dtype=torch.int32)
    drop = Drop(p, position, 5) if p else None
    return AttentionSpec(position.cu_seqlens, 0.3, causal, drop, key_counts=counts, window=window)


def tensors(lengths, heads, head_width, dtype=torch.float32, more=0):
    """Return the joined projections, and a bias of distances up to the longest row and `more`."""
    generator = torch.Generator().manual_seed(sum(lengths) + head_width)
    x = torch.randn(sum(lengths), 3, heads, head_width, generator=generator).to(dtype)
    return [x, torch.randn(heads, 2 * (max(lengths) + more) - 1, generator=generator)]


def twin(spec) -> Any:
    return lambda x, bias=None: attend_reference(x[:, 0], x[:, 1], x[:, 2], spec, bias)


def native(spec) -> Any:
    return lambda x, bias=None: fused_attention.attend_joined(x, spec, bias)


@quick
@given(lengths=LENGTHS, window=WINDOWS, dtype=DTYPES, causal=st.booleans(), p=st.sampled_from([0.0, 0.2]))
def test_windows_match_the_reference(lengths, window, dtype, causal, p):
    spec = spec_of(lengths, p=p, causal=causal, window=window)
    assert_near_float64(native(spec), twin(spec), tensors(lengths, 2, 32, dtype)[:1], n_roundings=3)


@quick
@given(lengths=LENGTHS, window=WINDOWS, group=st.integers(1, 4), dtype=DTYPES, p=st.sampled_from([0.0, 0.2]))
def test_grouped_heads_in_a_causal_window_match_the_reference(lengths, window, group, dtype, p):
    """As decoders have them: several query heads share a key and a value head."""
    spec = spec_of(lengths, p=p, causal=True, window=window)
    q, k, v = tensors(lengths, 2 * group, 32, dtype)[0].unbind(1)
    inputs = [q, k[:, ::group], v[:, ::group]]
    run, textbook = (lambda *x: fused_attention.attend(*x, spec)), (lambda *x: attend_reference(*x, spec))
    assert_near_float64(run, textbook, inputs, n_roundings=3 * group)  # keys' gradients are sums over their heads


@quick
@given(
    lengths=LENGTHS,
    window=WINDOWS,
    head_width=st.sampled_from([7, 64]),
    causal=st.booleans(),
    p=st.sampled_from([0.0, 0.2]),
    more=st.sampled_from([0, 1, 100]),
)
def test_biases_match_the_reference(lengths, window, head_width, causal, p, more):
    spec = spec_of(lengths, p=p, causal=causal, window=window)
    assert_near_float64(native(spec), twin(spec), tensors(lengths, 2, head_width, more=more))


@quick
@given(lengths=LENGTHS, window=WINDOWS, p=st.sampled_from([0.0, 0.2]))
def test_biases_match_the_reference_in_bf16(lengths, window, p):
    """The bias and its gradient stay in float32: only what is read and written of the tokens is rounded."""
    spec = spec_of(lengths, p=p, window=window)
    assert_near_float64(native(spec), twin(spec), tensors(lengths, 2, 32, torch.bfloat16), ROUNDINGS)


@pytest.mark.parametrize("window", [None, 3, 64, 600])
def test_rows_longer_than_every_block_match_the_reference(window):
    spec = spec_of([1300, 3], p=0.1, window=window)
    assert_near_float64(native(spec), twin(spec), tensors([1300, 3], 1, 16))


@quick
@given(lengths=LENGTHS, padding=st.integers(0, 140), window=WINDOWS, dtype=DTYPES, p=st.sampled_from([0.0, 0.2]))
def test_padding_tokens_see_the_keys_in_their_window(lengths, padding, window, dtype, p):
    total = [n + padding // (i + 1) for i, n in enumerate(lengths)]
    spec = spec_of(total, p=p, window=window, keys=lengths)
    assert_near_float64(native(spec), twin(spec), tensors(total, 2, 32, dtype), ROUNDINGS)


def test_tokens_that_see_no_key_give_zero_as_torch_does():
    spec = spec_of([100], window=4, keys=[30])
    x, bias = tensors([100], 2, 32)
    x[30:, 1:] = torch.nan
    out, gradient, dbias = outputs_and_gradients(native(spec), [x, bias])
    assert (out[34:] == 0).all()
    assert (gradient[34:] == 0).all()
    assert dbias.isfinite().all()
    q, k, v = x[:, 0], x[:30, 1], x[:30, 2]
    seen = (torch.arange(30) - torch.arange(100)[:, None]).abs() <= 4
    heads_first = [t.transpose(0, 1)[None] for t in (q, k, v)]
    torchs = torch.nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=seen, scale=0.3)
    assert torch.allclose(torchs[0].transpose(0, 1), fused_attention.attend_joined(x, spec), atol=1e-6)


def test_window_of_zero_sees_the_token_itself():
    """Alone, a key gets a weight of 1; its score has no gradient but noise."""
    x, bias = tensors([70, 20], 2, 32)
    assert torch.allclose(fused_attention.attend_joined(x, spec_of([70, 20], window=0), bias), x[:, 2], atol=1e-6)


def test_window_wider_than_the_row_changes_no_bit():
    x, bias = tensors([130, 40], 2, 32)
    for p in (0.0, 0.1):
        wide, none = (native(spec_of([130, 40], p=p, window=window)) for window in (130, None))
        assert torch.equal(wide(x, bias), none(x, bias))


@quick
@given(window=WINDOWS, p=st.sampled_from([0.0, 0.2]))
def test_padded_attention_has_windows_and_biases(window, p):
    lengths = [60, 33, 9]
    spec = spec_of(lengths, p=p, window=window, keys=[40, 33, 3])
    assert_near_float64(
        lambda x, bias: gpu_attention.attend_padded(x[:, 0], x[:, 1], x[:, 2], spec, bias),
        twin(spec),
        tensors(lengths, 2, 16),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_does_not_depend_on_the_rows_around_it(dtype):
    x, bias = tensors([150, 90], 2, 32, dtype)
    found = fused_attention.attend_joined(x, spec_of([150, 90], window=20), bias)
    alone = fused_attention.attend_joined(x[150:], spec_of([90], window=20), bias)
    assert torch.equal(found[150:], alone)


@pytest.mark.parametrize("window", [None, 33])
def test_gradients_do_not_depend_on_threads(window):
    lengths = [450, 90, 17, 230]
    spec = spec_of(lengths, p=0.1, window=window)
    inputs = tensors(lengths, 3, 32)
    assert_same_on_two_threads(lambda: outputs_and_gradients(native(spec), inputs))


def test_query_heads_that_share_keys_have_biases_of_their_own():
    spec = spec_of([70, 20], p=0.1, window=30)
    x, bias = tensors([70, 20], 4, 24)
    q, k, v = x.unbind(1)
    inputs = [q, k[:, ::2], v[:, ::2], bias]
    assert_near_float64(
        lambda q, k, v, b: fused_attention.attend(q, k, v, spec, b),
        lambda q, k, v, b: attend_reference(q, k, v, spec, b),
        inputs,
    )


def test_bias_without_a_gradient_gets_none():
    x, bias = tensors([50], 2, 16)
    x.requires_grad_()
    fused_attention.attend_joined(x, spec_of([50]), bias).sum().backward()
    assert bias.grad is None
    bias.requires_grad_()
    again = fused_attention.attend_joined(x.detach(), spec_of([50]), bias)
    again.sum().backward()
    assert bias.grad is not None


@pytest.mark.parametrize("window", [None, 8])
def test_reference_passes_the_gradient_check(window):
    """In float64, by finite differences; a row is longer than the window."""
    spec = replace(spec_of([12, 3], window=window), key_counts=None)
    x, bias = (t.double().requires_grad_() for t in tensors([12, 3], 2, 4))
    assert torch.autograd.gradcheck(twin(spec), (x, bias))
