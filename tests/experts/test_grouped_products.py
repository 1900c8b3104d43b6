"""Products of sorted tokens, and the order of tokens: against one product a token."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from tiny import plain_torch
from whet.kernels.grouped import grouped_linear
from whet.kernels.library import library
from whet.models.experts.routing import by_expert, chosen, within_capacity

ENDS = [300, 300, 700, 1000]
"""The second expert has no token; the last rows belong to none."""
N_ROWS = 1024


def tensors(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    made = torch.randn(N_ROWS, 96), torch.randn(4, 160, 96) / 10, torch.randn(4, 160)
    return tuple(one.to(dtype).requires_grad_() for one in made)  # pyright: ignore[reportReturnType]


def singly(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Each expert's rows with torch's own product."""
    found, first = [], 0
    for expert, end in enumerate(ENDS):
        of_expert = None if bias is None else bias[expert]
        found.append(torch.nn.functional.linear(x[first:end], weight[expert], of_expert))
        first = end
    return torch.cat([*found, x.new_zeros(len(x) - first, weight.shape[1])])


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_grouped_product_has_the_results_and_gradients_of_single_ones(native: bool, has_bias: bool) -> None:
    if native and library() is None:
        pytest.skip("the native operators are not built here (python -m whet.kernels.build)")
    with nullcontext() if native else plain_torch():
        x, weight, bias = tensors()
        given = bias if has_bias else None
        found, wanted = grouped_linear(x, weight, given, ENDS), singly(x, weight, given)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        grad = torch.randn_like(found)
        trained = [x, weight, bias] if has_bias else [x, weight]
        ours, theirs = torch.autograd.grad(found, trained, grad), torch.autograd.grad(wanted, trained, grad)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert float(ours[1][1].abs().max()) == 0.0


def test_grouped_product_runs_in_the_format_of_autocast() -> None:
    x, weight, bias = tensors()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, wanted = grouped_linear(x, weight, bias, ENDS), singly(x, weight, bias)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), wanted.float(), rtol=2e-2, atol=2e-2)
    found.sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32


def test_weights_of_experts_sum_to_one_and_teach_the_router() -> None:
    logits = torch.randn(64, 8, requires_grad=True)
    for top_k in (1, 2):
        experts, weights = chosen(logits, top_k)
        torch.testing.assert_close(weights.sum(-1), torch.ones(64))
        assert experts.equal(logits.topk(top_k).indices)
        (grad,) = torch.autograd.grad((weights * torch.randn_like(weights)).sum(), logits)
        assert float(grad.abs().max()) > 0


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("factor", [0.5, 1.0, 1.25])
def test_capacity_counts_each_sequence_for_itself(top_k: int, factor: float) -> None:
    """Against a count by hand: first choices first, and tokens in their order."""
    numbers, n_experts = torch.Generator().manual_seed(3), 4
    lengths = [1, 9, 30, 7]
    rows = torch.arange(4).repeat_interleave(torch.tensor(lengths))
    experts = torch.rand(len(rows), n_experts, generator=numbers).topk(top_k).indices
    taken: dict[tuple[int, int], int] = {}
    wanted = torch.zeros_like(experts, dtype=torch.bool)
    for rank in range(top_k):
        for token, row in enumerate(rows.tolist()):
            place = row, int(experts[token, rank])
            taken[place] = taken.get(place, 0) + 1
            wanted[token, rank] = taken[place] <= -(-factor * top_k * lengths[row] // n_experts)
    assert within_capacity(experts, rows, factor, n_experts).equal(wanted)


def test_tokens_lie_in_the_order_of_their_experts() -> None:
    experts = torch.tensor([[2, 0], [0, 1], [2, 1]])
    kept = torch.tensor([[True, True], [True, False], [True, True]])
    order = by_expert(experts, 4, kept)
    assert order.ends == [2, 3, 5, 5]
    assert order.tokens[:5].tolist() == [0, 1, 2, 0, 2]
    assert order.uses[order.places].tolist() == list(range(6))
