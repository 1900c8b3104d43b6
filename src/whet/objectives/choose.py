"""Which objective a model trains with: chosen by its head, its family, and what the user asked for."""

from __future__ import annotations

from torch import nn

from whet.config.fields import SpanLoss
from whet.data.columns import read_by
from whet.data.padding import NO_PADDING, Padding
from whet.kernels.batch_position import Kernel
from whet.log import logger
from whet.models import attention
from whet.models.adapters import passed_on, unwrapped, why_not_inside
from whet.models.packable import answers_questions, family_of, predicts_next_tokens
from whet.models.packed import prepare
from whet.objectives import head_proof, heads, padded_tokens
from whet.objectives.base import Collate, Objective
from whet.objectives.next_tokens import PackedNextTokens
from whet.objectives.own_loss import OwnLoss
from whet.objectives.packed_head import PackedHead
from whet.objectives.padded_tokens import PaddedNextTokens
from whet.objectives.span import PackedSpans, PaddedSpans

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
    spans = collate is None and answers_questions(model) and around is None
    next_tokens = predicts_next_tokens(model)
    reads = "tokens" if next_tokens else None if spans else heads.reads(model)
    can_pack = (spans or reads is not None) and attn in _KERNELS and family_of(model) is not None
    why = around if spans else heads.why_not_parts(model)
    if can_pack and why is not None:
        logger.info("the complete %s is called, and not its parts: %s", type(model).__name__, why)
        can_pack = False
    if can_pack and attn == attention.FLASH:
        attention.require_flash_kernels(next(model.parameters()).device)
    read = _token_columns(model) if can_pack else frozenset[str]()
    if can_pack and (why := head_proof.why_padded(model, reads or "spans", read)) is not None:
        logger.info("%s trains with its padding: %s", type(unwrapped(model)).__name__, why)
        can_pack = False
    packed = prepare(model, _KERNELS[attn]) if can_pack else None
    if packed is None and attn not in (None, attention.NAME):
        attention.use_theirs(unwrapped(model), attn)
    if attn == attention.NAME and packed is None:
        raise attention.not_known(model)
    if packed is not None:
        if next_tokens:
            return PackedNextTokens(model, packed, collate or default_collate, read)
        if reads is not None:
            return PackedHead(model, packed, collate or default_collate, reads, read)
        return PackedSpans(packed, read, padding, span_loss)
    if spans:
        return PaddedSpans(model, default_collate, padding, span_loss)
    own = PaddedNextTokens if padded_tokens.takes(model) else OwnLoss
    return own(model, collate or default_collate)


def _token_columns(model: nn.Module) -> frozenset[str]:
    """Return which columns of tokens reach the model's encoder."""
    return passed_on(model, (read_by(unwrapped(model)) or _TOKEN_COLUMNS) & _TOKEN_COLUMNS)
