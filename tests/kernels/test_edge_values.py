"""The ends of the number line: dropout that drops everything, and norms of numbers whose squares are too large."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from native_support import outputs_and_gradients, position_of
from torch.nn.functional import layer_norm

from tiny import plain_torch
from whet.kernels import embedding as fused_embedding
from whet.kernels.attention_spec import AttentionSpec
from whet.kernels.batch_position import Drop
from whet.kernels.dropout import dropout
from whet.kernels.embedding import Tables
from whet.kernels.library import library
from whet.kernels.norm import Norm, add_norm
from whet.kernels.packed_attention import attend

WIDTH, LENGTHS = 48, [3, 9]
N = sum(LENGTHS)


@pytest.fixture(params=["native", "plain-torch"], autouse=True)
def operators(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == "native" and library() is None:
        pytest.skip("the native operators are not built here (python -m whet.kernels.build)")
    with plain_torch() if request.param == "plain-torch" else nullcontext():
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_of_one_gives_zeros_and_no_gradient(dtype: torch.dtype) -> None:
    drop, x = Drop(1.0, position_of(LENGTHS), 2), torch.randn(N, WIDTH).to(dtype)
    out, gradient = outputs_and_gradients(lambda x: dropout(x, drop), [x])
    assert out.count_nonzero() == gradient.count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_of_one_leaves_the_residual_to_the_norm(dtype: torch.dtype) -> None:
    drop, norm = Drop(1.0, position_of(LENGTHS), 2), Norm(torch.ones(WIDTH), torch.zeros(WIDTH), 1e-5)
    x, residual = torch.randn(2, N, WIDTH).to(dtype)
    dropped = outputs_and_gradients(lambda x, r: add_norm(x, r, norm, drop=drop)[0], [x, residual])
    (alone, gradient) = outputs_and_gradients(lambda r: add_norm(r, None, norm)[0], [residual])
    assert torch.equal(dropped[0], alone)
    assert dropped[1].count_nonzero() == 0
    torch.testing.assert_close(dropped[2], gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_dropout_of_one_gives_zeros_and_no_gradient(dtype: torch.dtype) -> None:
    position = position_of(LENGTHS)
    spec = AttentionSpec(position.cu_seqlens, 0.3, drop=Drop(1.0, position, 2))
    results = outputs_and_gradients(lambda q, k, v: attend(q, k, v, spec), list(torch.randn(3, N, 4, 16).to(dtype)))
    assert [result.count_nonzero().item() for result in results] == [0, 0, 0, 0]


@pytest.mark.parametrize("large", [1e19, 1e25, 3e38, float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rms", [False, True])
def test_overflowing_norm_is_not_finite(large: float, dtype: torch.dtype, rms: bool) -> None:
    """torch gives NaN from about 1e20 on; below, where its sum of squares is infinite already, it gives the bias."""
    weight, bias = torch.ones(WIDTH), torch.full((WIDTH,), 0.5)
    x = torch.randn(N, WIDTH)
    x[4] *= large
    inputs = [x.to(dtype), torch.randn(N, WIDTH).to(dtype), weight, bias]
    run = lambda x, r, w, b: add_norm(x, r, Norm(w, b, 1e-5, rms))[0]  # noqa: E731
    out, *gradients = outputs_and_gradients(run, inputs)
    assert out[4].isnan().all()
    others = [row for row in range(N) if row != 4]
    assert out[others].isfinite().all()
    for gradient in gradients[:2]:
        assert gradient[4].isnan().all()
        assert gradient[others].isfinite().all()
    assert gradients[2].isnan().all(), "the weight's gradient is a sum over all rows"


def test_overflowing_embedding_norm_is_not_finite() -> None:
    table = torch.randn(20, WIDTH)
    table[7] *= 1e25
    ids = torch.arange(N)
    weight, bias = torch.ones(WIDTH), torch.full((WIDTH,), 0.5)

    def run(table: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return fused_embedding.embed([ids], Tables((table,), (None,)), Norm(weight, bias, 1e-5))

    out, of_table, of_weight = outputs_and_gradients(run, [table, weight])
    assert out[7].isnan().all()
    assert of_table[7].isnan().all()
    assert out[:7].isfinite().all()
    assert of_weight.isnan().all()


def test_large_numbers_without_overflow_match_torch() -> None:
    x = torch.randn(N, WIDTH) * 1e17
    weight, bias = torch.randn(2, WIDTH)
    found = add_norm(x, None, Norm(weight, bias, 1e-5))[0]
    torch.testing.assert_close(found, layer_norm(x, (WIDTH,), weight, bias), rtol=1e-5, atol=1e-5)
