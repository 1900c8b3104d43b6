"""Eager execution and compiled graphs call the same pure functions: results and gradients are bitwise equal."""

from collections.abc import Callable, Iterator

import pytest
import torch
from native_support import need_native, position_of
from torch import Tensor

from whet.kernels import graph
from whet.kernels.activation import bias_act
from whet.kernels.attention_spec import AttentionSpec, Relative
from whet.kernels.batch_position import Drop, KeyedPosition
from whet.kernels.dropout import dropout
from whet.kernels.norm import Norm, add_norm
from whet.kernels.packed_attention import attend, attend_joined

need_native()

LENGTHS = [37, 5, 64, 1]
N, WIDTH, HEADS = sum(LENGTHS), 48, 2
Run = Callable[..., Tensor]


def _dropout(drop: Drop) -> tuple[Run, list[tuple[int, ...]]]:
    return lambda x: dropout(x, drop), [(N, WIDTH)]


def _add_norm(drop: Drop, *, rms: bool = False) -> tuple[Run, list[tuple[int, ...]]]:
    def run(x: Tensor, residual: Tensor, linear_bias: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y, total = add_norm(x, residual, Norm(weight, bias, 1e-5, rms), linear_bias=linear_bias, drop=drop)
        return y + 2 * total

    return run, [(N, WIDTH), (N, WIDTH), (WIDTH,), (WIDTH,), (WIDTH,)]


def _add_norm_without_biases(drop: Drop) -> tuple[Run, list[tuple[int, ...]]]:
    return lambda x, r, weight: add_norm(x, r, Norm(weight, None, 1e-5, True))[0], [(N, WIDTH), (N, WIDTH), (WIDTH,)]


def _bias_act(drop: Drop) -> tuple[Run, list[tuple[int, ...]]]:
    return lambda x, bias: bias_act(x, bias, "gelu"), [(N, WIDTH), (WIDTH,)]


def _attend(drop: Drop) -> tuple[Run, list[tuple[int, ...]]]:
    spec = AttentionSpec(drop.position.cu_seqlens, 0.2, causal=True, drop=drop)
    return lambda q, k, v: attend(q, k, v, spec), [(N, HEADS, 24), (N, 1, 24), (N, 1, 24)]


def _attend_joined(drop: Drop) -> tuple[Run, list[tuple[int, ...]]]:
    spec = AttentionSpec(drop.position.cu_seqlens, 0.2, drop=drop)
    return lambda qkv: attend_joined(qkv, spec), [(N, 3, HEADS, 24)]


def _attend_in_a_window_with_a_bias(drop: Drop) -> tuple[Run, list[tuple[int, ...]]]:
    spec = AttentionSpec(drop.position.cu_seqlens, 0.2, drop=drop, window=9)
    return lambda qkv, bias: attend_joined(qkv, spec, bias), [(N, 3, HEADS, 24), (HEADS, 2 * max(LENGTHS) + 1)]


def _attend_with_vectors_by_distance(drop: Drop) -> tuple[Run, list[tuple[int, ...]]]:
    spec = AttentionSpec(drop.position.cu_seqlens, 0.2, drop=drop)
    places = torch.arange(2 * max(LENGTHS) - 1, dtype=torch.int32) // 4
    tables = (int(places[-1]) + 1, HEADS, 24)

    def run(qkv: Tensor, keys: Tensor, queries: Tensor) -> Tensor:
        return attend_joined(qkv, spec, Relative(keys, queries, places))

    return run, [(N, 3, HEADS, 24), tables, tables]


@pytest.fixture
def _graphs_hold_operators(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    graph.register()
    monkeypatch.setattr(graph.Traced, "operators", True)
    monkeypatch.setattr(graph.Traced, "native", True)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _outputs(run: Run, tensors: list[Tensor]) -> list[Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    y = run(*leaves)
    return [y, *torch.autograd.grad(y, leaves, torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y))]


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "make",
    [
        _dropout,
        _add_norm,
        _add_norm_without_biases,
        _bias_act,
        _attend,
        _attend_joined,
        _attend_in_a_window_with_a_bias,
        _attend_with_vectors_by_distance,
    ],
    ids=lambda one: one.__name__,
)
@pytest.mark.usefixtures("_graphs_hold_operators")
def test_compiled_and_eager_operators_agree(make: Callable[..., tuple[Run, list]], dtype: torch.dtype) -> None:
    at = position_of(LENGTHS)
    keys = torch.tensor([at.key(0)], dtype=torch.int64)
    slots = torch.nn.functional.pad(at.row_slots, (0, 1))
    keyed = KeyedPosition(0, 0, at.slots, at.positions, at.cu_seqlens, slots, keys)
    eager, shapes = make(Drop(0.1, at, 0))
    compiled = torch.compile(make(Drop(0.1, keyed, 0))[0], backend="aot_eager", dynamic=True, fullgraph=True)
    torch.manual_seed(0)
    tensors = [torch.randn(shape).to(dtype) for shape in shapes]
    for ours, theirs in zip(_outputs(compiled, tensors), _outputs(eager, tensors), strict=True):
        assert torch.equal(ours, theirs)
