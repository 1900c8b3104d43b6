"""The very calls of the flash kernels, without a GPU: torch checks arguments, shapes, formats and devices as well.

What the kernels compute is checked on a GPU, in tests/gpu.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from native_support import position_of
from torch._subclasses.fake_tensor import FakeTensorMode

from tiny import tiny_model, tiny_rows
from whet.data.batch import pack
from whet.data.padding import Padding
from whet.kernels import dropout, gpu_attention
from whet.kernels.attention_spec import AttentionSpec, attend_reference
from whet.kernels.batch_position import Drop
from whet.models.packed import prepare

LENGTHS = [40, 7, 53]


@pytest.fixture
def generator(monkeypatch):
    """A generator in the place of the GPU's, whose three methods are the same."""
    found = torch.Generator().manual_seed(1)
    monkeypatch.setattr(dropout, "generator_of", lambda device: found)
    return found


def spec_of(p=0.0, **changes):
    position = position_of(LENGTHS)
    drop = Drop(p, position, 5) if p else None
    return AttentionSpec(position.cu_seqlens, 0.3, drop=drop, max_seqlen=torch.tensor(max(LENGTHS)), **changes)


def meta(*, heads=4, key_heads=4, width=64, dtype=torch.bfloat16):
    shapes = [(sum(LENGTHS), n, width) for n in (heads, key_heads, key_heads)]
    return [torch.empty(shape, dtype=dtype, device="meta", requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("p", "causal", "key_heads"), [(0.0, False, 4), (0.1, False, 4), (0.1, True, 2)])
def test_flash_operator_of_torch_runs_forward_and_backward(generator, dtype, p, causal, key_heads):
    inputs = meta(key_heads=key_heads, dtype=dtype)
    out = gpu_attention.attend_flash(*inputs, spec_of(p, causal=causal))
    assert (out.shape, out.dtype) == (inputs[0].shape, dtype)
    for gradient, tensor in zip(torch.autograd.grad(out, inputs, torch.empty_like(out)), inputs, strict=True):
        assert (gradient.shape, gradient.dtype) == (tensor.shape, dtype)


def test_flash_attention_accepts_strided_views(generator):
    joined = torch.empty(sum(LENGTHS), 3, 4, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    out = gpu_attention.attend_flash(*joined.unbind(1), spec_of(0.1))
    assert torch.autograd.grad(out, joined, torch.empty_like(out))[0].shape == joined.shape
    turned = [t.detach().transpose(0, 2).contiguous().transpose(0, 2) for t in meta()]
    assert turned[0].stride(-1) != 1
    assert gpu_attention.attend_flash(*turned, spec_of(0.1)).shape == turned[0].shape


def test_both_operators_keep_everything_on_the_gpu(generator):
    """torch without CUDA has no autograd for its tensors: the two operators one by one."""
    on_host = spec_of(0.1)
    with FakeTensorMode(), torch.no_grad():
        q, k, v = (torch.empty(100, 4, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3))
        starts = torch.empty(4, dtype=torch.int32, device="cuda")
        by_torch = gpu_attention._by_torch(q, k, v, gpu_attention._FlashRows(starts, starts, 53, 0.1), on_host)
        assert (by_torch.device.type, by_torch.shape) == ("cuda", q.shape)
        rows = (starts, starts, 53, 53, 0.1, False)
        out, lse, rng, unused, _ = torch.ops.aten._flash_attention_forward(q, k, v, *rows, False, scale=0.3)
        assert lse.dtype == torch.float32
        backward = torch.ops.aten._flash_attention_backward
        found = backward(out, q, k, v, out, lse, *rows, rng, unused, scale=0.3)
        assert [t.device.type for t in found] == ["cuda"] * 3


@pytest.mark.parametrize("known", [True, False], ids=["counts of the host", "counts of the GPU alone"])
def test_padding_tokens_are_no_keys(generator, monkeypatch, known):
    counts = torch.tensor([30, 7, 50], dtype=torch.int32)
    starts = spec_of().cu_seqlens
    if not known:
        monkeypatch.setattr(gpu_attention, "_is_on_host", lambda _: False)
    keys = gpu_attention._Keys.of(starts, counts, sum(LENGTHS))
    real = [*range(30), *range(40, 47), *range(47, 97)]
    assert keys.places[:87].tolist() == real
    assert len(keys.places) == (87 if known else sum(LENGTHS))
    assert keys.starts.tolist() == [0, 30, 37, 87]
    k, v = (torch.randn(sum(LENGTHS), 3, 4, generator=generator).requires_grad_() for _ in range(2))
    found = gpu_attention._KeysAlone.apply(k, v, keys)
    assert torch.equal(found[0][:87], k[real])
    assert torch.equal(found[1][:87], v[real])
    given = [torch.randn(one.shape, generator=generator) for one in found]
    for one in given:
        one[87:] = torch.nan  # what a kernel leaves unwritten
    gradients = torch.autograd.grad(found, (k, v), given)
    for one, other in zip(gradients, given, strict=True):
        wanted = torch.zeros_like(one)
        wanted[real] = other[:87]
        assert torch.equal(one, wanted)


@pytest.mark.parametrize("amount", ["none", "sampled"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("have", [gpu_attention.Have(torch=True), gpu_attention.Have()])
def test_model_reads_nothing_back_from_the_gpu(generator, monkeypatch, have, dropout, amount):
    """A tensor on the device meta has no numbers: a pass that asked one for a length would fail."""
    paths = []
    monkeypatch.setattr(gpu_attention, "have", lambda device: have)
    monkeypatch.setattr(gpu_attention, "tell", lambda path, **_: paths.append(path))
    batch = pack(tiny_rows(6), first_slot=0, position_offset=0, padding=Padding(amount))
    with torch.device("meta"):
        model = tiny_model("bert", dropout=dropout).bfloat16().train()
    packed = prepare(model)
    assert packed is not None
    logits = packed(batch.to(torch.device("meta")), seed=1, step=2).start_logits
    torch.autograd.backward(logits, torch.empty_like(logits))
    assert model.bert.encoder.layer[0].attention.self.query.weight.grad.is_meta
    assert logits.shape == (1, batch.n_computed)
    assert paths == ["torch" if have.torch else "padded"] * 2


def test_call_has_one_mask_and_restores_the_generator(generator):
    drop = spec_of(0.1).drop
    before = generator.get_state()
    with dropout.drawing_from(drop, torch.device("meta")):
        first = torch.rand(4, generator=generator)
    assert torch.equal(generator.get_state(), before)
    torch.rand(9, generator=generator)  # what others draw in between
    with dropout.drawing_from(drop, torch.device("meta")):
        assert torch.equal(torch.rand(4, generator=generator), first)
    seeds = [
        dropout.call_seed(drop),
        dropout.call_seed(replace(drop, site=6)),
        dropout.call_seed(replace(drop, position=replace(drop.position, step=6))),
        dropout.call_seed(replace(drop, position=replace(drop.position, seed=4))),
        dropout.call_seed(replace(drop, position=position_of(LENGTHS, first_slot=8))),
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_kernel_error_restores_the_generator(generator):
    before = generator.get_state()
    with (
        pytest.raises(RuntimeError, match="kernel"),
        dropout.drawing_from(spec_of(0.1).drop, torch.device("meta")),
    ):
        raise RuntimeError("kernel")
    assert torch.equal(generator.get_state(), before)


def test_package_is_called_by_its_signature(monkeypatch):
    """Arguments by the names and places of flash-attn 2.4 to 2.8; the result is what the textbook computes."""

    def flash_attn_varlen_func(q, k, v, *lengths, **options):
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = lengths
        assert cu_seqlens_q is cu_seqlens_k
        assert cu_seqlens_q.dtype == torch.int32
        assert max_seqlen_q == max_seqlen_k == max(LENGTHS)
        shape = {"causal": True, "window_size": (-1, -1)}  # no window
        assert options == shape | {"dropout_p": 0.0, "softmax_scale": 0.3, "deterministic": False}
        return attend_reference(q, k, v, AttentionSpec(cu_seqlens_q, options["softmax_scale"], options["causal"]))

    module = ModuleType("flash_attn")
    module.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(sum(LENGTHS), n, 16, generator=generator).bfloat16() for n in (4, 2, 2))
    spec = spec_of(causal=True)
    assert torch.equal(gpu_attention.attend_flash(q, k, v, spec, package=True), attend_reference(q, k, v, spec))
