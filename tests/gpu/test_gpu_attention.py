"""Packed attention on a real GPU: what its kernels compute, which masks they draw, what memory they take."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from whet.kernels import gpu_attention
from whet.kernels.attention_spec import AttentionSpec, attend_reference
from whet.kernels.batch_position import BatchPosition, Drop

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
GPU = torch.device("cuda", 0)
LENGTHS = [384, 1, 17, 200, 63, 384]
# Relative norm of the error against float64: inputs and outputs are rounded at 2^-9 (bf16) or 2^-12 (fp16), and so are
# the weights and the gradients of the scores inside of the kernel.
TOLERANCE = {torch.bfloat16: 2**-7, torch.float16: 2**-10}


@pytest.fixture(params=["torch", "package"])
def package(request) -> bool:
    """Whether the flash-attn package computes; each skips where this machine does not have it."""
    have = gpu_attention.have(GPU)
    if not getattr(have, request.param):
        pytest.skip(f"this GPU has no flash kernels of {request.param}: {have}")
    return request.param == "package"


def spec_of(lengths=LENGTHS, *, p=0.0, causal=False, step=5, first_slot=7, device=GPU):
    lengths_of = torch.tensor(lengths)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths_of.cumsum(0)]).int().to(device)
    row_slots = torch.arange(first_slot, first_slot + len(lengths), dtype=torch.int32)
    slots = row_slots.repeat_interleave(lengths_of).to(device)
    positions = torch.cat([torch.arange(n, dtype=torch.int32) for n in lengths]).to(device)
    max_seqlen = lengths_of.max()
    position = BatchPosition(3, step, slots, positions, starts, row_slots, max_seqlen=max_seqlen)
    return AttentionSpec(starts, 0.125, causal, Drop(p, position, 5) if p else None, max_seqlen)


def inputs(dtype, *, lengths=LENGTHS, heads=4, key_heads=4, width=64):
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(lengths), n, width) for n in (heads, key_heads, key_heads)]
    return [torch.randn(shape, generator=generator).to(GPU, dtype) for shape in shapes]


def outputs_and_gradients(run, tensors):
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    out = run(*leaves)
    wave = torch.sin(1.0 + torch.arange(out.numel(), device=out.device) * 0.7).view(out.shape).bfloat16()
    return [out.detach(), *torch.autograd.grad(out, leaves, wave.to(out.dtype))]


def relative(found, exact):
    return float((found.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("causal", "key_heads", "width"), [(False, 4, 64), (True, 2, 32), (False, 4, 8)])
def test_flash_is_the_textbook(package, dtype, causal, key_heads, width):
    spec, tensors = spec_of(causal=causal), inputs(dtype, key_heads=key_heads, width=width)
    found = outputs_and_gradients(lambda *x: gpu_attention.attend_flash(*x, spec, package=package), tensors)
    exact = outputs_and_gradients(lambda *x: attend_reference(*x, spec), [t.double() for t in tensors])
    assert [relative(one, other) < TOLERANCE[dtype] for one, other in zip(found, exact, strict=True)] == [True] * 4


def test_flash_reads_views_of_joined_projections(package):
    joined = torch.stack(inputs(torch.bfloat16), dim=1).requires_grad_()
    spec = spec_of()
    out = gpu_attention.attend_flash(*joined.unbind(1), spec, package=package)
    apart = gpu_attention.attend_flash(*(t.contiguous() for t in joined.detach().unbind(1)), spec, package=package)
    assert torch.equal(out, apart)
    (gradient,) = torch.autograd.grad(out.float().square().sum(), joined)
    assert gradient.shape == joined.shape
    assert torch.isfinite(gradient).all()


def test_one_place_has_one_mask_whatever_else_was_drawn(package):
    tensors = inputs(torch.bfloat16)
    first = gpu_attention.attend_flash(*tensors, spec_of(p=0.2), package=package)
    torch.rand(1000, device=GPU)
    before = torch.cuda.get_rng_state(GPU)
    assert torch.equal(gpu_attention.attend_flash(*tensors, spec_of(p=0.2), package=package), first)
    assert torch.equal(torch.cuda.get_rng_state(GPU), before)
    for other in (spec_of(p=0.2, step=6), spec_of(p=0.2, first_slot=13), spec_of()):
        assert relative(gpu_attention.attend_flash(*tensors, other, package=package), first) > 0.05


def test_a_recomputation_meets_the_mask_of_its_first_pass(package):
    """Gradients of the queries are summed in any order: equal to rounding. Another mask would be far away."""
    tensors, spec = inputs(torch.bfloat16), spec_of(p=0.2)

    def plain(*x):
        return gpu_attention.attend_flash(*x, spec, package=package)

    kept = outputs_and_gradients(plain, tensors)
    again = outputs_and_gradients(lambda *x: checkpoint(plain, *x, use_reentrant=False), tensors)
    other = outputs_and_gradients(
        lambda *x: gpu_attention.attend_flash(*x, spec_of(p=0.2, step=6), package=package), tensors
    )
    assert torch.equal(kept[0], again[0])
    assert [relative(one, two) < 2**-7 for one, two in zip(again, kept, strict=True)] == [True] * 4
    assert [relative(one, two) > 0.05 for one, two in zip(other, kept, strict=True)] == [True] * 4


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_the_kept_share_and_the_mask_in_backward(package, p):
    """With equal scores and v one-hot, the output is the mask; the gradient of v sums it over the queries."""
    n, heads, rows = 64, 4, 16
    q = torch.zeros(rows * n, heads, n, device=GPU, dtype=torch.float16)
    v = torch.eye(n, device=GPU, dtype=torch.float16).repeat(rows, 1)[:, None].expand(-1, heads, -1).contiguous()
    v.requires_grad_()
    out = gpu_attention.attend_flash(q, torch.zeros_like(q), v, spec_of([n] * rows, p=p), package=package)
    kept = (out.detach() * n * (1 - p)).unflatten(0, (rows, n))  # rows, queries, heads, keys
    assert ((kept - kept.round()).abs() < 0.01).all()
    n_weights = kept.numel()
    # the kernel compares a byte: up to 1/256 beside 1 - p; and four deviations of a binomial share
    assert abs(float(kept.float().mean()) - (1 - p)) < 1 / 256 + 4 * (p * (1 - p) / n_weights) ** 0.5
    assert relative(kept[0], kept[1]) > 0.1  # rows have masks of their own
    (gradient,) = torch.autograd.grad(out.float().sum(), v)
    wanted = out.detach().float().unflatten(0, (rows, n)).sum(1).transpose(1, 2).flatten(0, 1)  # (rows keys, heads)
    torch.testing.assert_close(gradient.float(), wanted[..., None].expand(-1, -1, n), rtol=2**-8, atol=2**-8)


def test_memory_is_linear_in_the_tokens(package):
    """One row of 8192 tokens: its weights alone would take 2 bytes x 12 heads x 8192^2 = 1.6 GB."""
    lengths = [8192]
    tensors = [t.requires_grad_() for t in inputs(torch.bfloat16, lengths=lengths, heads=12, key_heads=12)]
    torch.cuda.reset_peak_memory_stats(GPU)
    before = torch.cuda.memory_allocated(GPU)
    out = gpu_attention.attend_flash(*tensors, spec_of(lengths, p=0.1), package=package)
    torch.autograd.grad(out, tensors, torch.ones_like(out))
    assert torch.cuda.max_memory_allocated(GPU) - before < 16 * out.numel() * out.element_size()


@pytest.mark.parametrize("p", [0.0, 0.2])
@pytest.mark.parametrize("kernel", ["auto", "whet"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nothing_is_read_back_from_the_gpu(dtype, kernel, p):
    spec, tensors = replace(spec_of(p=p), kernel=kernel), [t.requires_grad_() for t in inputs(dtype)]
    out = gpu_attention.attend(*tensors, spec)  # the first call may set things up
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = gpu_attention.attend(*tensors, spec)
        torch.autograd.grad(out, tensors, torch.ones_like(out))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("p", [0.0, 0.2])
def test_padded_rows_have_the_masks_of_the_cpu(p):
    tensors = inputs(torch.float32)
    found = outputs_and_gradients(lambda *x: gpu_attention.attend_padded(*x, spec_of(p=p)), tensors)
    on_cpu = spec_of(p=p, device=torch.device("cpu"))
    exact = outputs_and_gradients(lambda *x: attend_reference(*x, on_cpu), [t.cpu().double() for t in tensors])
    for one, other in zip(found, exact, strict=True):
        assert relative(one.cpu(), other) < 1e-4  # a GPU's kernels make products of float32 from several of TF32


def test_autocast_sends_float32_to_the_flash_kernels(package):
    tensors, spec = inputs(torch.float32), spec_of()
    with torch.autocast("cuda", torch.bfloat16):
        out = gpu_attention.attend(*tensors, spec)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, gpu_attention.attend(*(t.bfloat16() for t in tensors), spec))
