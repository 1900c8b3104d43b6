"""Bias with activation, and gated activations, against the textbook in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from native_support import (
    assert_near_float64,
    assert_same_on_two_threads,
    need_native,
    outputs_and_gradients,
    quick,
    relative,
)

from whet.kernels.activation import bias_act, bias_act_reference, gated_act, gated_act_joined, gated_act_reference

need_native()
KINDS = ["gelu", "gelu_tanh", "silu"]
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


def random(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype) * 3


@quick
@given(n=st.integers(1, 70), width=st.integers(1, 150), dtype=DTYPES, kind=st.sampled_from(KINDS))
def test_bias_and_activation_match_the_reference(n, width, dtype, kind):
    inputs = [random(n, width, dtype=dtype), random(width)]
    assert_near_float64(lambda x, b: bias_act(x, b, kind), lambda x, b: bias_act_reference(x, b, kind), inputs)


@quick
@given(n=st.integers(1, 70), width=st.integers(1, 150), dtype=DTYPES, kind=st.sampled_from(KINDS))
def test_gated_activation_matches_the_reference(n, width, dtype, kind):
    x = random(n, 2 * width, dtype=dtype)

    def textbook(joined):
        return gated_act_reference(*joined.chunk(2, dim=-1), kind)

    assert_near_float64(lambda joined: gated_act_joined(joined, kind), textbook, [x])
    assert_near_float64(lambda joined: gated_act(*joined.chunk(2, dim=-1), kind), textbook, [x])


@pytest.mark.parametrize("kind", KINDS)
def test_each_activation_value_is_exact(kind):
    """Every value within 8 ulp where it is not tiny, and no more than 1e-6 off anywhere; slopes within 3e-6."""
    x = torch.linspace(-14, 14, 200_001).view(1, -1)
    found = outputs_and_gradients(lambda a: bias_act(a, None, kind), [x])
    exact = outputs_and_gradients(lambda a: bias_act_reference(a, None, kind), [x.double()])
    error = (found[0] - exact[0]).abs()
    plain = x.abs() > 1e-3
    assert float((error / exact[0].abs())[plain & (x > -2)].max()) < 8 * 2**-23
    assert float(error.max()) < 2e-6  # two ulp of 14
    assert float((found[1] - exact[1]).abs().max()) < 3e-6


@pytest.mark.parametrize("kind", KINDS)
def test_extreme_inputs_match_the_reference(kind):
    x = torch.tensor([[torch.nan, -1e30, -100.0, -0.0, 0.0, 100.0, 1e30, torch.inf]])
    y = bias_act(x, None, kind)[0]
    assert torch.isnan(y[0])
    assert torch.equal(y[1:5].abs() < 1e-30, torch.ones(4, dtype=torch.bool))
    assert torch.equal(y[5:], x[0, 5:])


def test_bias_gradient_does_not_depend_on_threads():
    inputs = [random(500, 100), random(100)]
    assert_same_on_two_threads(lambda: outputs_and_gradients(lambda x, b: bias_act(x, b, "gelu"), inputs))


def test_leading_dimensions_are_kept():
    x = random(3, 5, 14)
    assert gated_act_joined(x, "silu").shape == (3, 5, 7)
    assert relative(bias_act(x, None, "gelu"), torch.nn.functional.gelu(x.double())) < 1e-6
