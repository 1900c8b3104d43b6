"""AdamW and the gradient norm over many tensors, against the textbook in float64 and against torch."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from native_support import assert_same_on_two_threads, need_native, quick

from whet.kernels import adamw as fused_optimizer
from whet.kernels.adamw import AdamWStep, AdamWTensors, adamw_reference, squared_norm_reference

need_native()
SIZES = st.lists(st.integers(1, 70_000), min_size=1, max_size=4)
N_STEPS = 4


def random(sizes, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def zeros(sizes):
    return [torch.zeros(size) for size in sizes]


def train(sizes, dtype, masters):
    """Return parameters, masters and the float64 truth after a few steps."""
    params, rates = random(sizes, 1, dtype), [(1e-2 / (i + 1), 0.1 * i) for i in range(len(sizes))]
    fp32 = [param.float() for param in params] if masters else None
    tensors = AdamWTensors(params, zeros(sizes), zeros(sizes), fp32)
    exact = [param.double() for param in params]
    moments = [[torch.zeros(size, dtype=torch.float64) for size in sizes] for _ in range(2)]
    for number in range(1, N_STEPS + 1):
        grads = random(sizes, 10 + number, dtype)
        step = AdamWStep(0.9, 0.999, 1e-8, number, grad_scale=0.5)
        tensors.update(grads, rates, step)
        wide = [grad.double() for grad in grads]
        adamw_reference(list(zip(exact, wide, *moments, strict=True)), rates, step)
    return params, fp32, exact


@quick
@given(sizes=SIZES)
def test_fp32_parameters_match_the_reference(sizes):
    params, _, exact = train(sizes, torch.float32, masters=False)
    for param, truth in zip(params, exact, strict=True):
        assert float((param - truth).abs().max()) < N_STEPS * 5e-7  # one ulp of 4, the largest value, each step


@quick
@given(sizes=SIZES)
def test_bf16_parameters_with_fp32_masters_match_the_reference(sizes):
    params, masters, exact = train(sizes, torch.bfloat16, masters=True)
    for param, master, truth in zip(params, masters, exact, strict=True):
        assert float((master - truth).abs().max()) < N_STEPS * 5e-7
        assert torch.equal(param, master.bfloat16())


def test_native_adamw_equals_torchs():
    start, grad = random([5000], 1)[0], random([5000], 2)[0]
    theirs = start.clone().requires_grad_()
    theirs.grad = grad
    optimizer = torch.optim.AdamW([theirs], lr=1e-3, weight_decay=0.1, betas=(0.9, 0.98), eps=1e-6)
    ours = AdamWTensors([start], zeros([5000]), zeros([5000]))
    for number in range(1, N_STEPS + 1):
        optimizer.step()
        ours.update([grad], [(1e-3, 0.1)], AdamWStep(0.9, 0.98, 1e-6, number))
    torch.testing.assert_close(start, theirs.detach())


@quick
@given(sizes=SIZES, dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_squared_norm_matches_the_reference(sizes, dtype):
    tensors = random(sizes, 3, dtype)
    exact = squared_norm_reference(tensors)
    assert math.isclose(fused_optimizer.squared_norm(tensors), exact, rel_tol=1e-6)  # fp32 sums of at most 128 squares


def test_nan_reaches_the_norm():
    tensors = random([40_000, 7], 3)
    tensors[0][39_999] = torch.nan
    assert math.isnan(fused_optimizer.squared_norm(tensors))


def test_optimizer_does_not_depend_on_threads():
    sizes = [70_000, 33_000, 5]

    def run():
        params, _, _ = train(sizes, torch.float32, masters=False)
        norm = fused_optimizer.squared_norm(params)
        return [*params, torch.tensor(norm, dtype=torch.float64)]

    assert_same_on_two_threads(run)
