"""Bias, dropout, residual and normalisation in one pass, against the textbook in float64."""

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
from torch.nn import functional

from whet.kernels.batch_position import Drop
from whet.kernels.norm import Norm, add_norm, add_norm_reference

need_native()
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


def inputs_of(n, width, dtype):
    """Return x, residual in dtype and weight, bias, linear bias in fp32."""
    generator = torch.Generator().manual_seed(n * 1000 + width)
    shapes = [(n, width), (n, width), (width,), (width,), (width,)]
    x, residual, *params = (torch.randn(shape, generator=generator) for shape in shapes)
    return [x.to(dtype), residual.to(dtype), *params]


@quick
@given(n=st.integers(1, 90), width=st.integers(8, 150), dtype=DTYPES, rms=st.booleans(), p=st.sampled_from([0.0, 0.2]))
def test_norm_with_all_inputs_matches_the_reference(n, width, dtype, rms, p):
    drop = Drop(p, position_of([n]), 2)

    def run_by(way):
        def run(x, residual, weight, bias, linear_bias):
            norm = Norm(weight, bias, 1e-5, rms)
            y, total = way(x, residual, norm, linear_bias=linear_bias, drop=drop)
            return y + total  # both results are used, as in blocks that normalise first

        return run

    assert_near_float64(run_by(add_norm), run_by(add_norm_reference), inputs_of(n, width, dtype))


@quick
@given(n=st.integers(1, 40), width=st.integers(8, 150), dtype=DTYPES, rms=st.booleans(), biased=st.booleans())
def test_norm_without_residual_matches_the_reference(n, width, dtype, rms, biased):
    x, _, weight, bias, _ = inputs_of(n, width, dtype)

    def run_by(way):
        return lambda x, w, b=None: way(x, None, Norm(w, b, 1e-5, rms))[0]

    assert_near_float64(run_by(add_norm), run_by(add_norm_reference), [x, weight, bias] if biased else [x, weight])


def test_norm_equals_layer_norm_of_torch():
    x, residual, weight, bias, _ = inputs_of(20, 96, torch.float32)
    y, total = add_norm(x, residual, Norm(weight, bias, 1e-12))
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(y, functional.layer_norm(x + residual, (96,), weight, bias, 1e-12))


def test_large_mean_does_not_affect_the_variance():
    x = torch.randn(4, 256) + 1000.0
    y, _ = add_norm(x, None, Norm(torch.ones(256), None, 1e-5))
    exact = functional.layer_norm(x.double(), (256,), eps=1e-5)
    assert float((y - exact).abs().max()) < 1e-3  # one ulp of 1000 is 6e-5, and variance is 1


@pytest.mark.parametrize("used", [0, 1])
def test_norm_with_one_used_result_has_correct_gradients(used):
    def run(x, residual, weight, bias, linear_bias):
        return add_norm(x, residual, Norm(weight, bias, 1e-5), linear_bias=linear_bias)[used]

    x, residual, weight, bias, linear_bias = (t.requires_grad_() for t in inputs_of(6, 32, torch.float32))
    grads = torch.autograd.grad(run(x, residual, weight, bias, linear_bias).sum(), [x, residual], allow_unused=True)
    assert all(torch.isfinite(grad).all() for grad in grads)
    if used == 1:
        assert all(torch.equal(grad, torch.ones(6, 32)) for grad in grads)


def test_sums_do_not_depend_on_threads():
    drop = Drop(0.1, position_of([700]), 2)

    def run(x, residual, weight, bias, linear_bias):
        return add_norm(x, residual, Norm(weight, bias, 1e-5), linear_bias=linear_bias, drop=drop)[0]

    assert_same_on_two_threads(lambda: outputs_and_gradients(run, inputs_of(700, 130, torch.float32)))
