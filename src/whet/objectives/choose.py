"""Whether the head of a model that runs packed by proof gives the same from packed rows as from padded ones.

The name of a head's class says what BERT's head of that name reads. Others average the tokens, or read the last one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from whet.config.fields import SpanLoss
from whet.data.batch import Batch, pack
from whet.data.columns import read_by
from whet.data.padding import NO_PADDING, Padding
from whet.errors import WhetError
from whet.kernels.batch_position import Kernel
from whet.log import logger
from whet.models import attention
from whet.models.adapters import passed_on, unwrapped, why_not_inside
from whet.models.known import verdict_on
from whet.models.loading.exported import gives_spans
from whet.models.packable import answers_questions, family_of, predicts_next_tokens
from whet.models.packed import PackedModel, prepare
from whet.objectives.base import Collate, Objective
from whet.objectives.span import PackedSpans, PaddedSpans

if TYPE_CHECKING:
    from whet.models.proof.trial import ProofRows
    from whet.objectives.heads import Reads

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
    from whet.models.proof.trial import gap, proof_rows, stand_in, untraced

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
    from whet.objectives import unpadding
    from whet.objectives.collated import collated
    from whet.objectives.packed_head import PackedHead

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


_TOKEN_COLUMNS = frozenset({"input_ids", "token_type_ids"})
_KERNELS: dict[str | None, Kernel] = {
    None: "auto",
    attention.NAME: "whet",
    attention.FLASH: "flash_attention_2",
}
"""What packed attention runs on a GPU, by `attn_implementation`; with another one, batches are padded."""


def choose(
    model: nn.Module,
    collate: Collate | None,
    default_collate: Collate,
    padding: Padding = NO_PADDING,
    attn: str | None = None,
    span_loss: SpanLoss = "independent",
) -> Objective:
    """Return how this model trains: without padding wherever its family and its head are known.

    The batches of a collator of the user's own are packed for the heads of `heads.py`; question answering models whose
    rows go through one run padded, with the model's own loss. `attn` is the code that is to compute attention: with
    transformers' eager or sdpa, batches are padded.
    """
    around = why_not_inside(model)
    spans = collate is None and (answers_questions(model) or gives_spans(model)) and around is None
    reads, why = None, around
    if not spans:
        from whet.objectives import heads

        reads = "tokens" if predicts_next_tokens(model) else heads.reads(model)
        why = heads.why_not_parts(model)
    can_pack = (spans or reads is not None) and attn in _KERNELS and family_of(model) is not None
    if can_pack and why is not None:
        logger.info("the complete %s is called, and not its parts: %s", type(model).__name__, why)
        can_pack = False
    if can_pack and attn == attention.FLASH:
        attention.require_flash_kernels(next(model.parameters()).device)
    read = _token_columns(model) if can_pack else frozenset[str]()
    if can_pack and (why := why_padded(model, reads or "spans", read)) is not None:
        logger.info("%s trains with its padding: %s", type(unwrapped(model)).__name__, why)
        can_pack = False
    packed = prepare(model, _KERNELS[attn]) if can_pack else None
    if packed is None and attn not in (None, attention.NAME):
        attention.use_theirs(unwrapped(model), attn)
    if attn == attention.NAME and packed is None:
        raise attention.not_known(model)
    if spans and packed is not None:
        return PackedSpans(packed, read, padding, span_loss)
    if spans:
        return PaddedSpans(model, default_collate, padding, span_loss)
    return _own_loss(model, packed, collate or default_collate, reads, read)


def _own_loss(
    model: nn.Module, packed: PackedModel | None, collate: Collate, reads: Reads | None, columns: frozenset[str]
) -> Objective:
    """Return the objective of a model that learns by its own loss."""
    if packed is None:
        from whet.objectives import own_loss, padded_tokens

        own = padded_tokens.PaddedNextTokens if padded_tokens.takes(model) else own_loss.OwnLoss
        return own(model, collate)
    if predicts_next_tokens(model):
        from whet.objectives.next_tokens import PackedNextTokens

        return PackedNextTokens(model, packed, collate, columns)
    from whet.objectives.packed_head import PackedHead

    assert reads is not None
    return PackedHead(model, packed, collate, reads, columns)


def _token_columns(model: nn.Module) -> frozenset[str]:
    """Return which columns of tokens reach the model's encoder."""
    return passed_on(model, (read_by(unwrapped(model)) or _TOKEN_COLUMNS) & _TOKEN_COLUMNS)
