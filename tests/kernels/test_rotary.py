"""Rotary positions of joined projections: the formula of transformers, and its gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.modernbert.modeling_modernbert import apply_rotary_pos_emb

from whet.kernels.rotary import rotate, rotate_joined

N, HEADS, WIDTH = 40, 3, 16


def angles() -> tuple[Tensor, Tensor]:
    """Return cosines and sines (N, K) whose halves differ, which no model has so far."""
    found = torch.arange(N)[:, None] * torch.linspace(0.01, 1.0, WIDTH)
    return found.cos(), found.sin()


def by_transformers(qkv: Tensor) -> Tensor:
    q, k, v = qkv.transpose(1, 2).permute(2, 1, 0, 3).unsqueeze(1)  # each (1, H, N, K)
    cos, sin = angles()
    q, k = apply_rotary_pos_emb(q, k, cos[None], sin[None])
    return torch.stack([one[0].transpose(0, 1) for one in (q, k, v)], dim=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_and_its_gradient_equal_transformers(dtype: torch.dtype) -> None:
    x = torch.randn(N, 3, HEADS, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    found, expected = rotate_joined(ours, *angles()), by_transformers(theirs)
    wave = torch.sin(torch.arange(found.numel()).float()).view(found.shape).to(dtype)
    found.backward(wave)
    expected.backward(wave)
    assert ours.grad is not None
    assert theirs.grad is not None
    ulp = 1e-6 if dtype == torch.float32 else 2**-7  # sums of two products of size up to 4
    torch.testing.assert_close(found, expected, rtol=ulp, atol=ulp)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=ulp, atol=ulp)
    assert torch.equal(found[:, 2], x[:, 2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("angles_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("n", "heads", "width", "turned"), [(0, 2, 8, 8), (1, 1, 2, 2), (9, 3, 70, 70), (33, 2, 80, 20)]
)
def test_heads_of_any_size_are_rotated_as_in_float64(
    dtype: torch.dtype, angles_dtype: torch.dtype, n: int, heads: int, width: int, turned: int
) -> None:
    torch.manual_seed(0)
    x = torch.randn(n, heads + 2, width + 3).to(dtype)[:, 1 : 1 + heads, :width]  # a view, as of joined projections
    cos, sin = (torch.rand(n, 2 * turned)[:, ::2].to(angles_dtype) for _ in range(2))
    ours, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    found, expected = rotate(x, cos, sin), rotate(exact, cos.double(), sin.double())
    wave = torch.sin(torch.arange(found.numel()).float()).view(found.shape).to(dtype)
    rotate(ours, cos, sin).backward(wave)
    expected.backward(wave.double())
    assert ours.grad is not None
    assert exact.grad is not None
    ulp = 1e-6 if dtype == torch.float32 else 2**-7  # sums of two products of size up to 4
    torch.testing.assert_close(found.double(), expected, rtol=ulp, atol=ulp)
    torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=ulp, atol=ulp)
    assert torch.equal(found[..., turned:], x[..., turned:])
    assert found.is_contiguous()


def test_heads_that_are_not_contiguous_are_rotated_too() -> None:
    x = torch.randn(5, 8, 3, generator=torch.Generator().manual_seed(0)).transpose(1, 2)
    cos, sin = (torch.rand(5, 8, generator=torch.Generator().manual_seed(n)) for n in (1, 2))
    assert torch.equal(rotate(x, cos, sin), rotate(x.contiguous(), cos, sin))


def test_gradient_passes_the_check_by_differences() -> None:
    x = torch.randn(5, 3, 2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    cos, sin = (torch.rand(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in (1, 2))
    assert torch.autograd.gradcheck(rotate_joined, (x, cos, sin))
