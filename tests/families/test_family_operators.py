"""The fused forwards of each family: they serve every part they declare, and compute what the unfused modules do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
import whet
from tiny import FAMILIES, arguments, losses, tiny_model, tiny_rows
from whet.config.methods import MethodSettings
from whet.data.batch import Batch
from whet.kernels.library import library
from whet.methods import fuse
from whet.models.known import known
from whet.models.packed import PackedModel, prepare
from whet.models.view import ModelView
from whet.objectives.span import PackedSpans

families = pytest.mark.parametrize("family", FAMILIES)
pytestmark = pytest.mark.skipif(library() is None, reason="the native library is not built here (no compiler)")

Change = Callable[[PackedModel], object]
OPTIONAL = ("token_type_embeddings", "pos_key_proj", "pos_query_proj", "pos_proj", "pos_q_proj")
"""Submodules that some configurations of a family do without."""


def _fused(packed: PackedModel) -> None:
    assert fuse.apply(ModelView(packed.module), MethodSettings(operators="auto", row_gradients=True))


def _results(family: str, change: Change, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    """Return logits and gradients of one packed pass with dropout."""
    packed = prepare(tiny_model(family, dropout=0.1).train())
    assert packed is not None
    change(packed)
    batch: Batch = PackedSpans(packed, ["input_ids", "token_type_ids"]).batch(tiny_rows(6, family), range(6), 0)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        output: Any = packed(batch, seed=3, step=5)
    logits = torch.stack([output.start_logits, output.end_logits]).float()
    logits.square().sum().backward()
    weights = packed.module.named_parameters()
    return logits.detach(), {name: p.grad for name, p in weights if p.grad is not None}


def _unfused(_: PackedModel) -> None:
    """Leave the model as `prepare` left it."""


@families
def test_fused_equals_unfused_in_fp32(family: str) -> None:
    """With dropout: both draw the same masks. A different mask moves logits by more than 1e-2."""
    logits, gradients = _results(family, _fused, torch.float32)
    expected_logits, expected = _results(family, _unfused, torch.float32)
    torch.testing.assert_close(logits, expected_logits, rtol=0, atol=5e-6)  # a dozen roundings of numbers of size 1
    assert gradients.keys() == expected.keys()
    for name, exact in expected.items():
        assert float((gradients[name] - exact).abs().max()) < 1e-5 * max(float(exact.abs().max()), 1.0), name


@families
def test_fused_equals_unfused_in_bf16(family: str) -> None:
    """Each is as far from fp32 as the other: both round to 8 bits, at different places."""
    exact, _ = _results(family, _unfused, torch.float32)
    ours, theirs = (_results(family, change, torch.bfloat16)[0] for change in (_fused, _unfused))
    assert float((ours - exact).square().mean().sqrt()) < 2 * float((theirs - exact).square().mean().sqrt())


@families
def test_every_declared_part_is_fused(family: str) -> None:
    """A misspelt class name would leave a part unfused without a word."""
    model = whet.optimize(tiny_model(family))
    classes = {type(module).__name__ for module in model.modules()}
    declared = known()[family]
    assert set(declared.parts) == set(whet.changes(model).fused)
    assert {*declared.attention, *declared.blocks} <= classes
    assert whet.changes(model).called == {}
    slots = [(module, path) for module in model.modules() for path in _slots(family, module)]
    assert slots
    for module, path in slots:
        assert hasattr(module, path.split(".")[0]) or path in OPTIONAL


def _slots(family: str, module: nn.Module) -> list[str]:
    part = known()[family].parts.get(type(module).__name__)
    return [] if part is None else list(part.slots)


@families
@pytest.mark.parametrize("policy", ["blocks", "selective"])
def test_checkpointing_leaves_losses_and_weights_unchanged(tmp_path: Path, family: str, policy: str) -> None:
    def trained(**changes: Any) -> tuple[list[float], list[Tensor]]:
        args = arguments(tmp_path, max_steps=3, **changes)
        model = tiny_model(family, dropout=0.1)
        trainer = engine.Trainer(model=model, args=args, train_dataset=tiny_rows(12, family))
        trainer.train()
        return losses(trainer), [parameter.detach() for parameter in model.parameters()]

    plain = trained()
    again = trained(gradient_checkpointing=True, checkpointing_policy=policy)
    assert again[0] == plain[0]
    assert all(torch.equal(one, other) for one, other in zip(again[1], plain[1], strict=True))


@families
def test_every_block_has_one_end(family: str) -> None:
    """A checkpoint leaves the end out of its block; a family whose blocks are not fused to the end declares none."""
    ends = [name for name, part in known()[family].parts.items() if part.ends_block]
    modules = list(tiny_model(family).modules())
    blocks = [module for module in modules if known()[family].is_block(module)]
    assert len([module for module in modules if type(module).__name__ in ends]) == (len(blocks) if ends else 0)
