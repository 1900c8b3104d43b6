"""Whether the head of a model that runs packed by proof gives the same from packed rows as from padded ones.

The name of a head's class says what BERT's head of that name reads. Others average the tokens, or read the last one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from whet.data.batch import Batch, pack
from whet.data.columns import read_by
from whet.errors import WhetError
from whet.models.adapters import unwrapped
from whet.models.known import verdict_on
from whet.models.packed import PackedModel, prepare
from whet.models.proof.trial import ProofRows, gap, proof_rows, stand_in, untraced
from whet.objectives import unpadding
from whet.objectives.collated import collated
from whet.objectives.heads import Reads
from whet.objectives.packed_head import PackedHead
from whet.objectives.span import PackedSpans

_UNDERSTOOD = frozenset(
    {
        "input_ids",
        "attention_mask",
        "token_type_ids",
        "position_ids",
        "inputs_embeds",
        "start_positions",
        "end_positions",
        "head_mask",
        "labels",
        "label",
        "label_ids",
        "kwargs",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
    }
)
"""Columns and options of a question answering head that a packed batch serves or can do without."""
_LARGEST = 1e-3
"""Largest difference of gradients, as a share of the largest: rounding, which grows with depth."""


def why_padded(model: nn.Module, reads: Reads | Literal["spans"], columns: frozenset[str]) -> str | None:
    """Return why the head needs its padding; None if logits and gradients of packed rows are those of padded ones.

    Known families need no proof.
    """
    base = unwrapped(model)
    verdict = verdict_on(base)
    if verdict is None or verdict.family is None:
        return None
    more = (read_by(base) or frozenset()) - _UNDERSTOOD if reads == "spans" else None
    if more:
        return f"its head may read {', '.join(sorted(more))}, which packed rows do not have"
    try:
        with untraced():
            copied, weights = stand_in(base)
            rows = proof_rows(copied.base_model)
            padded = _gradients(copied(**_shaped(copied, rows.padded())), rows, reads, weights)
            packed = prepare(copied, family=verdict.family)
            assert packed is not None
            found = _gradients(_run_packed(packed, rows, reads, columns), rows, reads, weights, is_packed=True)
    except WhetError as error:
        return error.problems[0].what
    except Exception as error:
        return f"a trial of its head with packed rows failed: {type(error).__name__}: {error}"
    gaps = {name: gap(found[name], wanted) for name, wanted in padded.items()}
    wrong = [f"{name} ({off:.1e} off)" for name, off in gaps.items() if not off < _LARGEST]  # NaN is wrong too
    return f"a trial of its head with packed rows gave other {', '.join(wrong[:2])}" if wrong else None


def _run_packed(packed: PackedModel, rows: ProofRows, reads: str, columns: frozenset[str]) -> Any:
    """Return the model's output for the rows, run as training runs them."""
    if reads == "spans":
        batch = pack(rows.store, first_slot=0, position_offset=packed.position_offset, unnumbered=packed.unnumbered)
        return PackedSpans(packed, columns).forward(batch, seed=0, step=0)
    head = PackedHead(packed.module, packed, _stacked, "tokens" if reads == "tokens" else "first tokens", columns)
    batch: Batch = collated(lambda _: _shaped(packed.module, rows.padded()), [{}] * len(rows.store), 0, ())
    return head.forward(unpadding.without_padding(batch, causal=False), seed=0, step=0)


def _gradients(
    output: Any, rows: ProofRows, reads: str, weights: Mapping[str, nn.Parameter], *, is_packed: bool = False
) -> dict[str, Tensor]:
    """Return the head's logits and the gradients of a fixed sum of them."""
    real = rows.real()
    sides = [output.start_logits, output.end_logits] if reads == "spans" else [output.logits]
    if reads != "first tokens":
        sides = [side[0, : int(real.sum())] if is_packed else side[real] for side in sides]
    logits = torch.cat([side.flatten() for side in sides])
    factors = torch.randn(len(logits), generator=torch.Generator().manual_seed(0))
    found = torch.autograd.grad((logits * factors).sum(), list(weights.values()), allow_unused=True)
    largest = max(float(grad.abs().max()) for grad in found if grad is not None)
    kept = {name: grad for name, grad in zip(weights, found, strict=True) if grad is not None}
    telling = {name: grad for name, grad in kept.items() if float(grad.abs().max()) > largest * 1e-4}
    return {"logits": logits.detach(), **telling}


def _shaped(model: nn.Module, columns: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the columns as the head takes them: for multiple choice, all rows are the choices of one example."""
    choices = type(model).__name__.endswith("ForMultipleChoice")
    return {name: column[None] for name, column in columns.items()} if choices else columns


def _stacked(_: list[Any]) -> Mapping[str, Any]:
    raise AssertionError("the batch of a proof is made already")
