"""What methods say they cost is what is measured: bytes by the C library's count, operations by torch's counter."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import engine
from tiny import arguments, plain_torch, tiny_model, tiny_rows
from usage import counts_memory, in_use_bytes
from whet.config.methods import MethodSettings
from whet.kernels.int8 import has_vnni
from whet.kernels.library import library
from whet.methods import order
from whet.methods.seam import Cost
from whet.models.view import ModelView
from whet.objectives.choose import choose

ROWS, LENGTH, LAYERS = 8, 128, 4
TOLERANCE = 0.04
"""Of what is kept without the method: tensors outside of the blocks, and the allocator's own bytes for each tensor."""
FUSED = partial(MethodSettings, operators="auto", row_gradients=True)
native = pytest.mark.skipif(library() is None, reason="the native library is not built here (no compiler)")


def wide_model(family: str) -> Any:
    shape = {"hidden_size": 128, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "intermediate_size": 512}
    if family == "distilbert":
        shape = {"dim": 128, "n_layers": LAYERS, "n_heads": 4, "hidden_dim": 512}
    return tiny_model(family, dropout=0.1, max_position_embeddings=160, **shape).train()


def kept(family: str, settings: MethodSettings) -> float:
    """Return what a forward pass of the model leaves allocated for backward."""
    model = wide_model(family)
    spans: Any = choose(model, None, lambda rows: {})
    order.apply(ModelView(model), settings)
    batch = spans.batch(tiny_rows(ROWS, family, lengths=(LENGTH, LENGTH)), range(ROWS), 0)
    assert batch.n_computed == ROWS * LENGTH
    found = 0
    for _ in range(2):  # the first pass allocates what stays
        before = in_use_bytes()
        with torch.autocast("cpu", torch.bfloat16, enabled=settings.precision == "bf16"):
            loss = spans.loss_sum(spans.forward(batch, seed=1, step=1), batch)
        found = in_use_bytes() - before
        del loss
    return found


def claimed(family: str, settings: MethodSettings) -> Cost:
    model = wide_model(family)
    assert choose(model, None, lambda rows: {}).packed
    return order.cost(ModelView(model), settings)


def activations(cost: Cost) -> float:
    return cost.activation_bytes + ROWS * LENGTH * cost.activation_bytes_per_token


@native
@pytest.mark.skipif(not counts_memory(), reason="counts by glibc's mallinfo2")
@pytest.mark.parametrize("policy", ["blocks", "selective"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "family", ["bert", *(pytest.param(name, marks=pytest.mark.gate) for name in ("albert", "distilbert"))]
)
def test_checkpointing_saves_the_activations_that_it_says(family: str, precision: str, policy: Any) -> None:
    settings = partial(FUSED, precision=precision)
    without = kept(family, settings())
    saved = without - kept(family, settings(checkpointing=policy))
    said = activations(claimed(family, settings())) - activations(claimed(family, settings(checkpointing=policy)))
    assert said > 0
    assert saved == pytest.approx(said, abs=TOLERANCE * without)


@pytest.mark.skipif(not counts_memory(), reason="counts by glibc's mallinfo2")
@pytest.mark.parametrize("policy", ["blocks", "selective"])
def test_checkpointing_without_native_operators_saves_no_less_than_it_says(policy: Any) -> None:
    """torch's operators keep masks of dropout and probabilities of attention as well, which are not counted."""
    with plain_torch():
        said = -activations(claimed("bert", FUSED(checkpointing=policy)))
        assert kept("bert", FUSED()) - kept("bert", FUSED(checkpointing=policy)) >= said > 0


@native
@pytest.mark.skipif(not counts_memory(), reason="counts by glibc's mallinfo2")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["albert", "bert", "distilbert"])
def test_the_operators_keep_what_they_say(family: str, precision: str) -> None:
    plain = kept(family, MethodSettings(precision=precision))
    added = kept(family, FUSED(precision=precision)) - plain
    said = activations(claimed(family, FUSED(precision=precision)))
    assert added <= said + TOLERANCE * plain
    if family != "albert":  # its GELU is made of several operators of torch, each of which keeps its result
        assert added == pytest.approx(said, abs=TOLERANCE * plain)


class Products(TorchDispatchMode):
    """Counts operations of products with weights. torch's own counter hooks all modules, which changes how they run."""

    def __init__(self) -> None:
        super().__init__()
        self.flop = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.name().partition(".")[0] in ("aten::mm", "aten::addmm"):
            self.flop += 2 * out.numel() * args[-2].shape[-1]
        return out


@pytest.mark.parametrize("policy", ["blocks", "selective"])
@pytest.mark.parametrize("family", ["albert", "bert", "distilbert"])
def test_checkpointing_computes_the_products_that_it_says(operators: None, family: str, policy: Any) -> None:
    """To the operation."""

    def flop(settings: MethodSettings) -> tuple[int, int]:
        model = tiny_model(family, dropout=0.1).train()
        spans: Any = choose(model, None, lambda rows: {})
        order.apply(ModelView(model), settings)
        batch = spans.batch(tiny_rows(4, family), range(4), 0)
        with Products() as products:
            spans.loss_sum(spans.forward(batch, seed=1, step=1), batch).backward()
        return products.flop, batch.n_computed

    model = tiny_model(family)
    assert choose(model, None, lambda rows: {}).packed
    said = order.cost(ModelView(model), FUSED(checkpointing=policy)).flop_per_token
    (plain, n_tokens), (more, _) = flop(FUSED()), flop(FUSED(checkpointing=policy))
    assert (said > 0) == (policy == "blocks")
    assert more - plain == said * n_tokens


@native
@pytest.mark.skipif(library() is not None and not has_vnni(), reason="the processor has no fast products of 8 bits")
@pytest.mark.usefixtures("int8_anywhere")
def test_int8_packs_the_bytes_that_it_says(tmp_path: Path) -> None:
    """To the byte."""
    model = tiny_model("bert")
    args = arguments(tmp_path, precision="int8", max_steps=1)
    trainer = engine.Trainer(model=model, args=args, train_dataset=tiny_rows(8))
    trainer.train()
    packed = [pack for _, pack in cast("Any", trainer.precision.current)._step._packed.values()]
    measured = sum(tensor.nbytes for pack in packed for tensor in (pack.data, pack.scales))
    said = order.cost(ModelView(model), FUSED(precision="int8"))
    assert said.weights_bytes == measured


def test_costs_add_up() -> None:
    one = Cost(weights_bytes=3, flop_per_token=2.0)
    assert one + Cost(weights_bytes=-1, activation_bytes=5) == Cost(
        weights_bytes=2, activation_bytes=5, flop_per_token=2.0
    )
