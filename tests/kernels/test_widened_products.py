"""Products of bf16 where the processor is faster in fp32: what is multiplied is widened, the result rounded once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from native_support import layer_inputs, need_native, position_of
from native_support import result_and_gradients as run
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from whet.hardware.cpu import features, vendor
from whet.kernels import cross_entropy as fused_loss
from whet.kernels import linear as layer
from whet.kernels import matrix
from whet.kernels.batch_position import Placement
from whet.kernels.grouped import grouped_linear
from whet.methods import checkpoint_blocks

need_native()
ROWS, WIDTH, OUT = 37, 45, 29
HALF_BIT = 2.0**-8
"""Rounding to bf16 moves a number by at most this part of it."""


@pytest.fixture(autouse=True)
def _widened(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Widen on any processor: elsewhere this way is slower, and the same."""
    for module in (matrix, fused_loss, layer):
        monkeypatch.setattr(module, "is_widened", lambda: True)
    monkeypatch.setattr(matrix, "_least_rows", lambda: 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield


class Operators(TorchDispatchMode):
    """Records the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name().partition(".")[0])
        return func(*args, **(kwargs or {}))


def leaves(dtype: torch.dtype = torch.float32, n_rows: int = ROWS) -> list[Tensor]:
    return layer_inputs(dtype, n_rows, WIDTH, OUT)


def in_double(given: list[Tensor], way: Callable[..., Tensor] = functional.linear) -> tuple[Tensor, list[Tensor]]:
    """Return result and gradients of the rounded input and the weight as it is, in double precision."""
    x, *rest = (one.detach() for one in given)
    doubles = [one.double().requires_grad_() for one in (x.bfloat16(), *rest)]
    with torch.autocast("cpu", enabled=False):
        y = way(*doubles)
        wave = torch.sin(torch.arange(y.numel()).float()).view(y.shape).bfloat16().double()
        return y, list(torch.autograd.grad(y, doubles, wave))


def shapes_of_widened(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Return a list that receives the shape of each result that is multiplied in fp32 from now on."""
    shapes: list[torch.Size] = []

    def counted(result: Tensor, *factors: Tensor | None, **options: Any) -> Tensor:
        shapes.append(result.shape)
        return by_whet(result, *factors, **options)

    by_whet = matrix.widened_product_into
    for module in (matrix, fused_loss):
        monkeypatch.setattr(module, "widened_product_into", counted)
    return shapes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("at_a_time", [2048, 5])
def test_only_input_and_result_are_rounded(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, with_bias: bool, at_a_time: int
) -> None:
    monkeypatch.setattr(matrix, "_WIDENED_ROWS", at_a_time)
    given = leaves(dtype)[: 3 if with_bias else 2]
    y, grads = run(layer.linear, given)
    exact, (exact_dx, *exact_rest) = in_double(given)
    assert type(y.grad_fn).__name__ == "_WidenedLinearBackward"
    assert y.dtype == torch.bfloat16
    assert [one.dtype for one in grads] == [one.dtype for one in given]
    # sums of 45 and 37 products in fp32, then one rounding; what is close to zero has an error of the sums
    torch.testing.assert_close(y.double(), exact, rtol=HALF_BIT, atol=1e-5)
    torch.testing.assert_close(grads[0].double(), exact_dx, rtol=HALF_BIT, atol=1e-5)
    for found, expected in zip(grads[1:], exact_rest, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_gradient_of_a_weight_in_bf16_is_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of experts and of low-rank pairs have such gradients."""
    widened = shapes_of_widened(monkeypatch)
    torch.manual_seed(0)
    grad, x = torch.randn(ROWS, 80).bfloat16(), torch.randn(ROWS, WIDTH).bfloat16()
    dweight, _ = matrix.weight_gradient(grad, x, bias=False)
    assert widened == [(80, WIDTH)]
    torch.testing.assert_close(dweight.double(), grad.double().t() @ x.double(), rtol=HALF_BIT, atol=1e-5)


@pytest.mark.parametrize(("n_rows", "n_widened"), [(320, 3), (120, 0)])
def test_experts_with_a_weight_in_bf16_are_all_widened_or_none(
    monkeypatch: pytest.MonkeyPatch, n_rows: int, n_widened: int
) -> None:
    """The batch chooses, not the rows that an expert got: 1, all but 3, and 2 of them."""
    widened = shapes_of_widened(monkeypatch)
    torch.manual_seed(0)
    x, weight = torch.randn(n_rows, WIDTH).bfloat16().requires_grad_(), torch.randn(3, OUT, WIDTH).bfloat16()
    y = grouped_linear(x, weight, None, [1, n_rows - 2, n_rows])
    assert len(widened) == n_widened
    y.float().sum().backward()
    assert len(widened) == 2 * n_widened


def test_weights_of_experts_are_multiplied_as_they_are() -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(ROWS, WIDTH), torch.randn(2, OUT, WIDTH), torch.randn(2, OUT)
    given = [one.requires_grad_() for one in (x, weight, bias)]
    y, grads = run(lambda *leaves_of: grouped_linear(*leaves_of, [1, ROWS]), given)
    exact, (exact_dx, *exact_rest) = in_double(given, by_two_experts)
    assert y.dtype == torch.bfloat16
    assert [one.dtype for one in grads] == [torch.float32] * 3
    torch.testing.assert_close(y.double(), exact, rtol=HALF_BIT, atol=1e-5)
    torch.testing.assert_close(grads[0].double(), exact_dx, rtol=HALF_BIT, atol=1e-5)
    for found, expected in zip(grads[1:], exact_rest, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def by_two_experts(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Multiply the first row by the first weight, the others by the second."""
    return torch.cat([functional.linear(x[:1], weight[0], bias[0]), functional.linear(x[1:], weight[1], bias[1])])


def test_passes_without_gradients_are_widened_too() -> None:
    x, weight, bias = leaves()
    with torch.no_grad():
        y = layer.linear(x, weight, bias)
    exact, _ = in_double([x, weight, bias])
    torch.testing.assert_close(y.double(), exact, rtol=HALF_BIT, atol=1e-5)


def test_frozen_parts_get_no_gradient() -> None:
    x, weight, bias = leaves()
    layer.linear(x.detach(), weight, bias).float().sum().backward()
    assert x.grad is None
    assert weight.grad is not None
    assert bias.grad is not None
    frozen = weight.detach()
    layer.linear(x, frozen, bias).float().sum().backward()
    assert frozen.grad is None
    assert x.grad is not None


@pytest.mark.parametrize("way", ["widened", "fp32"])
def test_frozen_layer_keeps_no_input_and_sums_no_bias(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Below an adapter most layers are frozen: what only their gradients need is neither kept nor computed."""
    monkeypatch.setattr(layer, "suits_onednn", lambda *_: way == "fp32")
    x, weight, bias = leaves()
    saved: list[torch.Size] = []
    with saved_tensors_hooks(lambda one: saved.append(one.shape) or one, lambda one: one):
        y = layer.linear(x, weight.detach(), bias.detach())
    assert saved == [weight.shape]
    with Operators() as seen:
        y.backward(torch.ones_like(y))
    assert x.grad is not None
    assert "aten::sum" not in seen.names


def test_selective_checkpointing_keeps_results_in_bf16() -> None:
    keeping, giving = checkpoint_blocks.product_contexts()
    x, weight, bias = leaves()
    with keeping:
        y = layer.linear(x, weight, bias)
    assert [kept.result.dtype for kept in keeping._kept] == [torch.bfloat16]
    with giving:
        assert torch.equal(layer.linear(x, weight, bias), y)


def test_large_weight_in_bf16_is_widened_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = (one.detach().bfloat16() for one in leaves(n_rows=80))
    found = []
    for numbers in (1 << 24, 4 * WIDTH):
        monkeypatch.setattr(matrix, "_WIDENED_NUMBERS", numbers)
        found.append(matrix.widened_product(x[0], weight, bias))
    exact = x[0].double() @ weight.double().t() + bias.double()
    for one in found:
        torch.testing.assert_close(one.double(), exact, rtol=HALF_BIT, atol=1e-5)


def test_low_rank_pair_and_its_layer_are_multiplied_as_they_are() -> None:
    torch.manual_seed(0)
    x, weight, down, up = (
        torch.randn(1, ROWS, WIDTH),
        torch.randn(OUT, WIDTH),
        torch.randn(4, WIDTH),
        torch.zeros(OUT, 4),
    )
    y = layer.low_rank_linear(x, None, weight, None, layer.LowRank(down, up, 2.0))
    exact = x.bfloat16().double() @ weight.double().t()
    torch.testing.assert_close(y.double(), exact, rtol=HALF_BIT, atol=1e-5)


def test_one_vector_is_multiplied() -> None:
    _, weight, bias = leaves()
    x = torch.randn(WIDTH, requires_grad=True)
    y = layer.linear(x, weight, bias)
    y.float().sum().backward()
    assert y.shape == (OUT,)
    assert x.grad is not None
    assert x.grad.shape == (WIDTH,)


def test_experts_of_mixed_formats_without_autocast_are_refused_as_by_torch() -> None:
    x, weight = torch.randn(ROWS, WIDTH).bfloat16(), torch.randn(2, OUT, WIDTH)
    with torch.autocast("cpu", enabled=False):
        for one, other in ((x, weight), (x.float(), weight.bfloat16())):
            with pytest.raises(RuntimeError, match="same dtype"):
                grouped_linear(one, other, None, [1, ROWS])


def test_widened_experts_are_all_multiplied_in_one_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000 rows on average are enough for oneDNN; an expert that got three goes there too."""
    in_onednn: list[int] = []
    monkeypatch.setattr(matrix, "by_onednn", lambda: True)
    monkeypatch.setattr(matrix, "times_transposed", lambda a, b, bias: in_onednn.append(len(a)) or a @ b.t())
    x, weight = torch.randn(2000, WIDTH).bfloat16(), torch.randn(2, OUT, WIDTH)
    grouped_linear(x, weight, None, [3, 2000])
    assert in_onednn == [3, 1997]


def test_other_formats_are_left_to_torch() -> None:
    x, weight, _ = leaves()
    with torch.autocast("cpu", enabled=False):
        assert layer.linear(x, weight).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.float16):
        assert layer.linear(x, weight).dtype == torch.float16
    assert layer.linear(x.double(), weight.double()).dtype == functional.linear(x.double(), weight.double()).dtype


@pytest.mark.parametrize("enabled", [True, False])
def test_model_in_bf16_is_widened_but_for_few_rows(enabled: bool) -> None:
    """transformers loads many decoders in bf16; a token at a time is faster without."""
    given = [one.detach().bfloat16().requires_grad_() for one in leaves(n_rows=80)]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
        y, grads = run(layer.linear, given)
        few = layer.linear(given[0][:, :3], given[1])
    exact, exact_grads = in_double(given)
    assert type(y.grad_fn).__name__ == "_WidenedLinearBackward"
    assert type(few.grad_fn).__name__ != "_WidenedLinearBackward"
    assert {one.dtype for one in (y, few, *grads)} == {torch.bfloat16}
    for found, expected in zip([y, *grads], [exact, *exact_grads], strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=HALF_BIT, atol=1e-5)


def test_mixed_formats_without_autocast_are_refused_as_by_torch() -> None:
    x, weight, _ = leaves(torch.bfloat16)
    with torch.autocast("cpu", enabled=False), pytest.raises(RuntimeError, match="same dtype"):
        layer.linear(x, weight)


def test_weight_that_changes_before_backward_is_refused() -> None:
    """As in fp32: the gradient of the input needs the weight that forward had."""
    x, weight, _ = leaves()
    loss = layer.linear(x, weight).float().sum()
    with torch.no_grad():
        weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_no_rows_give_zeros() -> None:
    _, weight, bias = leaves()
    y = layer.linear(torch.randn(1, 0, WIDTH), weight, bias)
    y.float().sum().backward()
    assert y.shape == (1, 0, OUT)
    assert weight.grad is not None
    assert not weight.grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n_rows", [7, 1000])
def test_head_of_a_vocabulary_sums_in_fp32(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, n_rows: int) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(30, 24).to(dtype), torch.randn(200, 24)
    labels = torch.randint(200, (30,))
    monkeypatch.setattr(fused_loss, "chunk_rows", lambda _: n_rows)
    x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = fused_loss.linear_cross_entropy(x, w, labels)
    loss.backward()
    doubles = [hidden.bfloat16().double().requires_grad_(), weight.double().requires_grad_()]
    with torch.autocast("cpu", enabled=False):
        exact = functional.cross_entropy(doubles[0] @ doubles[1].T, labels, reduction="sum")
    exact.backward()
    assert (x.dtype, w.grad is not None and w.grad.dtype) == (dtype, torch.float32)
    # logits of up to 20, and their gradients, are rounded to 8 bits
    for ours, theirs in ((loss, exact), (x.grad, doubles[0].grad), (w.grad, doubles[1].grad)):
        assert ours is not None
        assert theirs is not None
        ours, theirs = ours.detach().double(), theirs.detach()
        assert float((ours - theirs).norm() / theirs.norm()) < 0.01


@pytest.mark.parametrize("n_rows", [90, 1000])
def test_head_in_bf16_has_a_gradient_by_fp32(monkeypatch: pytest.MonkeyPatch, n_rows: int) -> None:
    """transformers loads many decoders in bf16; chunks of 90 rows are added up."""
    widened = shapes_of_widened(monkeypatch)
    monkeypatch.setattr(fused_loss, "chunk_rows", lambda _: n_rows)
    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, 24).bfloat16().requires_grad_() for n in (180, 200))
    labels = torch.randint(200, (180,))
    fused_loss.linear_cross_entropy(hidden, weight, labels).backward()
    assert widened.count(weight.shape) == (0 if n_rows == 90 else 1)  # several are added up by whet's own operator
    doubles = [one.detach().double().requires_grad_() for one in (hidden, weight)]
    with torch.autocast("cpu", enabled=False):
        functional.cross_entropy(doubles[0] @ doubles[1].T, labels, reduction="sum").backward()
    for ours, theirs in zip((hidden.grad, weight.grad), (one.grad for one in doubles), strict=True):
        assert ours is not None
        assert theirs is not None
        # logits of up to 20 and their gradients are rounded to 8 bits, and so are the sums of two chunks
        assert float((ours.double() - theirs).norm() / theirs.norm()) < 0.01


def test_repeated_pass_gives_the_same_bits() -> None:
    """The choice depends on the processor alone, so a run that is repeated gives the same bits."""
    found = []
    for _ in range(2):
        with Placement().at(position_of([ROWS])):
            y, grads = run(layer.linear, leaves())
        found.append([y, *grads])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


_CHOICES = "from whet.kernels import matrix as m; print(m.by_pairs(), m.is_widened())"


@pytest.mark.parametrize("level", ["", "v4_bf16", "v4", "v3", "baseline"])
def test_choice_follows_processor_and_instruction_set(level: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _CHOICES], env=os.environ | {"WHET_ISA": level}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    here = features()
    slow_pairs = vendor() == "GenuineIntel" and "avx512_fp16" in here
    pairs = "avx512_bf16" in here and (level == "v4_bf16" or (level == "" and not slow_pairs))
    amx = "amx_bf16" in here
    assert done.stdout.split() == [str(pairs and not amx), str(not pairs and not here & {"amx_bf16", "bf16"})]
