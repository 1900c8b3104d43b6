"""The native masks are those of plain torch, bit for bit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from native_support import assert_same_on_two_threads, need_native, position_of, quick

from whet.kernels import packed_attention as fused_attention
from whet.kernels.attention_spec import AttentionSpec, attend_reference
from whet.kernels.batch_position import Drop
from whet.kernels.dropout import dropout, dropout_reference

need_native()


@quick
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    width=st.integers(1, 200),
    p=st.floats(0.0, 0.99),
    seed=st.integers(0, 2**64 - 1),
    site=st.integers(0, 2**63),
)
def test_hidden_masks_equal_those_of_plain_torch(lengths, width, p, seed, site):
    position = position_of(lengths, seed=seed, first_slot=2**31 - 100)
    x = torch.ones(sum(lengths), width)
    found = dropout(x, Drop(p, position, site))
    assert torch.equal(found, dropout_reference(x, Drop(p, position, site)))


@quick
@given(length=st.integers(1, 150), heads=st.integers(1, 3), p=st.floats(0.1, 0.9), causal=st.booleans())
def test_attention_masks_equal_those_of_plain_torch(length, heads, p, causal):
    """With the unit vectors as values, attention returns its own weights: their zeros are the mask."""
    position = position_of([length, 1])
    n = length + 1
    q, v = torch.zeros(n, heads, n), torch.eye(n)[:, None].expand(n, heads, n)
    spec = AttentionSpec(position.cu_seqlens, 1.0, causal, Drop(p, position, 9))
    found, exact = fused_attention.attend(q, q, v, spec), attend_reference(q.double(), q.double(), v.double(), spec)
    assert torch.equal(found == 0, exact == 0)


def test_mask_depends_only_on_slot_and_position():
    x = torch.ones(30, 70)
    both, second = position_of([20, 10]), position_of([10], first_slot=8)
    packed = dropout(x, Drop(0.5, both, 1))
    assert torch.equal(packed[20:], dropout(x[20:], Drop(0.5, second, 1)))
    assert not torch.equal(packed[:10], packed[20:])


def test_every_site_and_step_has_its_own_mask():
    x = torch.ones(20, 64)
    position, later = position_of([20]), position_of([20], step=6)
    masks = [dropout(x, drop) for drop in (Drop(0.5, position, 1), Drop(0.5, position, 2), Drop(0.5, later, 1))]
    assert len({tuple(mask.flatten().tolist()) for mask in masks}) == len(masks)


def test_dropout_keeps_the_mean():
    position = position_of([2000])
    kept = dropout(torch.ones(2000, 512), Drop(0.1, position, 3))
    assert abs(float(kept.mean()) - 1.0) < 2e-3  # six standard deviations of a mean of a million draws


def test_backward_uses_the_mask_of_forward():
    x = torch.ones(30, 100, dtype=torch.bfloat16, requires_grad=True)
    y = dropout(x, Drop(0.3, position_of([30]), 4))
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad, y)


_ROUNDING = """
import torch
from native_support import position_of
from whet.kernels.batch_position import Drop
from whet.kernels.dropout import dropout, dropout_reference
bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
x = bits.view(torch.bfloat16).reshape(256, 256)
x = torch.where(x.abs().float() < 2.0**-125, 1.0, x)
drop = Drop(0.3, position_of([256]), 4)
found, exact = dropout(x, drop), dropout_reference(x, drop)
exact[x.isnan() & (found == 0)] = 0  # dropped: the reference multiplies by 0 instead
assert found.isnan().any() and found.isinf().any()
assert torch.equal(found.isnan(), exact.isnan())
assert torch.equal(found.nan_to_num(), exact.nan_to_num())
"""


@pytest.mark.parametrize("level", ["", "v4", "v3", "baseline"])
def test_every_bf16_is_rounded_as_in_torch(level):
    """All 65,536 of them but the smallest, which some processors take for zero; "" is the best set that is here."""
    env = {**os.environ, "WHET_ISA": level}
    subprocess.run([sys.executable, "-c", _ROUNDING], env=env, cwd=Path(__file__).parent, check=True)


def test_masks_do_not_depend_on_threads():
    drop = Drop(0.3, position_of([70, 31]), 4)
    assert_same_on_two_threads(lambda: [dropout(torch.ones(101, 77), drop)])
