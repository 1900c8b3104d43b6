"""Packed batches of each decoder give the losses, logits and gradients of the untouched model's padded ones."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whet
from tiny import tiny_config
from tiny_decoders import DECODERS, Rows, collate, tiny_decoder, token_rows, trainer_of
from whet.kernels import matrix
from whet.kernels import packed_attention as packed
from whet.kernels.library import library
from whet.methods import fuse

# Logits are of size 1; each is rounded some dozen times in float32 on its way; seen: 2e-6.
FP32_TOLERANCE = 1e-5
# bf16 keeps 8 bits. The distance of transformers' own autocast from fp32 is the scale, see test_family_logits.
BF16_FACTOR = 2.0

families = pytest.mark.parametrize("family", DECODERS)
formats = pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
pytestmark = pytest.mark.usefixtures("operators")


def autocast(bf16: bool) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext()


def padded_results(family: str, rows: Rows, bf16: bool, **changes: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the untouched model's logits of real tokens, and the gradients of its loss."""
    model, batch = tiny_decoder(family, **changes).train(), collate(rows)
    with autocast(bf16):
        output = model(**batch)
    output.loss.backward()
    return output.logits.detach()[batch["attention_mask"].bool()].float(), _gradients(model)


def packed_results(
    folder: Path, family: str, rows: Rows, bf16: bool, **changes: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the same of a packed batch."""
    trainer = trainer_of(folder, tiny_decoder(family, **changes), rows)
    objective, model = trainer.objective, trainer.model
    batch = objective.batch(rows, range(len(rows)), 0)
    assert batch.columns is not None
    model.train()
    with autocast(bf16):
        loss = objective.loss_sum(objective.forward(batch, seed=0, step=0), batch)
    (loss / objective.count(batch)).backward()
    model.eval()
    with autocast(bf16), torch.no_grad():
        logits = objective.logits(objective.forward(batch, seed=0, step=0), batch)[0]
    return torch.from_numpy(logits)[collate(rows)["attention_mask"].bool()], _gradients(model)


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found: tuple[Tensor, dict[str, Tensor]], wanted: tuple[Tensor, dict[str, Tensor]]) -> None:
    """Logits and gradients are equal to rounding."""
    torch.testing.assert_close(found[0], wanted[0], rtol=0, atol=FP32_TOLERANCE)
    assert found[1].keys() == wanted[1].keys()
    for name, exact in wanted[1].items():  # seen: 3e-6 of the largest
        assert float((found[1][name] - exact).abs().max()) < 2e-5 * max(float(exact.abs().max()), 1e-3), name


@families
@pytest.mark.every_family
def test_decoder_packed_logits_and_gradients_equal_padded_in_fp32(tmp_path: Path, family: str) -> None:
    """Rows are longer than the windows of the families that have some."""
    rows = token_rows(8)
    wanted = padded_results(family, rows, bf16=False)
    assert float(wanted[0].max() - wanted[0].min()) > 0.5
    assert_same(packed_results(tmp_path, family, rows, bf16=False), wanted)


@families
def test_decoder_packed_logits_and_gradients_equal_padded_in_bf16(tmp_path: Path, family: str) -> None:
    """As near to fp32 as transformers' own autocast is.

    Each token uses all experts: between two that are as good, rounding would choose.
    """
    rows = token_rows(8)
    n_experts = getattr(tiny_config(family), "num_experts", None)
    changes = {} if n_experts is None else {"num_experts_per_tok": n_experts}
    exact = padded_results(family, rows, bf16=False, **changes)
    theirs = padded_results(family, rows, bf16=True, **changes)
    ours = packed_results(tmp_path, family, rows, bf16=True, **changes)
    assert _distance([ours[0]], [exact[0]]) < BF16_FACTOR * _distance([theirs[0]], [exact[0]])
    grads = [[one[1][name] for name in exact[1]] for one in (ours, theirs, exact)]
    assert _distance(grads[0], grads[2]) < BF16_FACTOR * _distance(grads[1], grads[2])


def _distance(found: list[Tensor], exact: list[Tensor]) -> float:
    """Return the root of the mean squared error."""
    errors = torch.cat([(one.float() - other).flatten() for one, other in zip(found, exact, strict=True)])
    return float(errors.square().mean().sqrt())


@families
def test_attention_in_bf16_is_native(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str) -> None:
    """A family's own rotation leaves queries in fp32 under autocast, with values in bf16: no operator takes both."""
    if library() is None:
        pytest.skip("these are the operators in plain torch")
    monkeypatch.setattr(packed, "plain", lambda *_: pytest.fail("the textbook's attention ran"))
    packed_results(tmp_path, family, token_rows(4), bf16=True)


@families
@formats
def test_changed_row_leaves_other_rows_of_a_decoder_unmoved(tmp_path: Path, family: str, bf16: bool) -> None:
    """Logits of the other rows and the gradient of a sum of them are bitwise the same: no path leads through row 2.

    Experts sum their gradients over the tokens that they got: among others, the same ones are summed in another order.
    """
    rows, changed = token_rows(6), token_rows(6)
    changed[2]["input_ids"] = changed[2]["input_ids"][::-1]  # the same words: the word table's gradient adds these rows
    found = [_of_others(tmp_path, family, one, 2, bf16) for one in (rows, changed)]
    assert torch.equal(found[0][0], found[1][0])
    assert any(gradient.count_nonzero() for gradient in found[0][1].values())
    for name, gradient in found[0][1].items():
        gap = float((gradient - found[1][1][name]).abs().max())
        rounding = (2e-2 if bf16 else 1e-5) * float(gradient.abs().max()) if ".experts." in name else 0.0
        assert gap <= rounding, name


@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=["autocast", "stored"])
@pytest.mark.parametrize("n_rows", [6, 24])
def test_token_is_rounded_alike_however_many_share_its_expert(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str, stored: torch.dtype, n_rows: int
) -> None:
    """Where bf16 is multiplied in fp32: the rows of one expert must not choose its library."""
    monkeypatch.setattr(matrix, "is_widened", lambda: True)
    rows, changed = token_rows(n_rows), token_rows(n_rows)
    changed[2]["input_ids"] = changed[2]["input_ids"][::-1]
    found = [_of_others(tmp_path, family, one, 2, True, stored) for one in (rows, changed)]
    assert torch.equal(found[0][0], found[1][0])
    for name, gradient in found[0][1].items():
        if ".experts." not in name:
            assert torch.equal(gradient, found[1][1][name]), name


def _of_others(
    folder: Path, family: str, rows: Rows, row: int, bf16: bool, stored: torch.dtype = torch.float32
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the logits of all rows but one, with dropout off, and the gradients of a sum of them."""
    trainer = trainer_of(folder, tiny_decoder(family).to(stored), rows)
    objective = trainer.objective
    trainer.model.eval()
    batch = objective.batch(rows, range(len(rows)), 0)
    with autocast(bf16):
        logits = objective.forward(batch, seed=0, step=0)["logits"][0]
    kept = torch.ones(len(logits), dtype=torch.bool)
    kept[batch.cu_seqlens[row] : batch.cu_seqlens[row + 1]] = False
    logits[kept].float().square().sum().backward()
    return logits[kept].detach(), _gradients(trainer.model)


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_capped_logits_of_a_decoder_equal_padded(tmp_path: Path, family: str) -> None:
    rows = token_rows(8)
    wanted = padded_results(family, rows, bf16=False, final_logit_softcapping=0.5)
    assert float(wanted[0].abs().max()) < 0.5
    assert_same(packed_results(tmp_path, family, rows, bf16=False, final_logit_softcapping=0.5), wanted)


def test_every_part_of_a_decoder_runs_fused(tmp_path: Path) -> None:
    for family in DECODERS:
        trainer = trainer_of(tmp_path, tiny_decoder(family), token_rows(4))
        changed = fuse.changed_in(trainer.model)
        if changed is not None:
            assert fuse.called(trainer.objective.packed_model) == {}
            sparse = {"Qwen3MoeMLP"}  # in one of the two blocks experts take its place
            assert all(count == (1 if name in sparse else 2) for name, count in changed.items())


@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3_text"])
def test_norms_that_are_stored_in_bf16_keep_their_digits(family: str) -> None:
    """Gemma's weights are distances from 1, next to which bf16 has 7 bits; transformers adds the 1 in fp32."""
    batch, found = collate(token_rows(5)), []
    for optimise in (False, True):
        model = tiny_decoder(family, use_cache=False).train()
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.data = weight.data.bfloat16()
        model = whet.optimize(model) if optimise else model
        output = model(**batch)
        output.loss.backward()
        found.append((output.logits.detach()[batch["attention_mask"].bool()], _gradients(model)))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=0, atol=FP32_TOLERANCE)
    for name, exact in found[0][1].items():  # those of the norms are rounded to bf16 once, to either side
        torch.testing.assert_close(found[1][1][name], exact, rtol=2**-7 if "norm" in name else 0, atol=1e-4)
