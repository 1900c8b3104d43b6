"""Encoders of curated-transformers, which spaCy's transformer pipelines train, without their padding.

They are no models of transformers: their attention is a module of its own, and everything else treats each token alone.
So the encoder's own forward runs on packed tokens, with attention within sequences and positions that restart.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from whet.errors import ConfigError
from whet.kernels.attention_spec import AttentionSpec
from whet.kernels.batch_position import Placement, Site
from whet.kernels.library import library
from whet.kernels.packed_attention import attend
from whet.log import logger
from whet.methods.unpad.layout import computing_in, layout_of, scattered
from whet.models import record
from whet.models.forwards import bind
from whet.models.fused import parts
from whet.models.fused.layers import PLACEMENT, PlacedDropout
from whet.on_host import on_host

_HOME = "curated_transformers.models."
_ENCODERS = {f"{_HOME}{kind}.encoder.{kind.capitalize()}Encoder" for kind in ("albert", "bert", "roberta")}
_ATTENTION = f"{_HOME}attention.ScaledDotProductAttention"
_RECORD = "curated"


@dataclass(frozen=True)
class Changed:
    """What is kept about an encoder that runs without padding."""

    placement: Placement
    dtype: torch.dtype | None
    fused: dict[str, int]
    dropouts: int
    told: set[str] = field(default_factory=set)


def is_encoder(module: nn.Module) -> bool:
    """Return whether the module is an encoder of curated-transformers 0.1, which spaCy 3 trains."""
    attentions = [part for part in module.modules() if type(part).__name__ == "ScaledDotProductAttention"]
    known = bool(attentions) and all(_name(part) == _ATTENTION for part in attentions)
    return _name(module) in _ENCODERS and known


def is_of_library(module: nn.Module) -> bool:
    """Return whether the module's class is one of curated-transformers, of any version."""
    return type(module).__module__.startswith(_HOME)


def changed(encoder: nn.Module) -> Changed | None:
    """Return what `apply` changed; None for an encoder as it came."""
    return record.read(encoder, _RECORD)


def apply(encoder: Any, dtype: torch.dtype | None, padding: str) -> None:
    """Let the encoder run without padding; hidden states of padding tokens are zeros, as spaCy cuts them off."""
    if padding not in ("auto", "none"):
        raise ConfigError(
            what="an encoder of curated-transformers has no states of padding tokens",
            got=f"padding={padding!r}",
            why="spaCy cuts them off, so whet.optimize does not compute them",
            fix="use padding='none', or leave padding out",
        )
    restore(encoder)
    placement = Placement()
    dropouts = [part for part in encoder.modules() if type(part) is nn.Dropout and "forward" not in part.__dict__]
    for number, part in enumerate(dropouts):
        part.__class__ = PlacedDropout
        setattr(part, "site", Site(placement, number, len(dropouts)))  # noqa: B010
    for part in encoder.modules():
        if _name(part) == _ATTENTION:
            part.__dict__[PLACEMENT] = placement
            part.forward = bind(_attention, part)
    encoder.embeddings.__dict__[PLACEMENT] = placement
    encoder.embeddings.__dict__["_get_position_ids"] = bind(_position_ids, encoder.embeddings)
    fused = parts.put_generic(encoder, placement) if library() is not None else {}
    record.keep(encoder, _RECORD, Changed(placement, dtype, fused, len(dropouts)))
    encoder.forward = bind(_forward, encoder)


def restore(encoder: Any) -> None:
    """Undo `apply`, exactly."""
    if record.take(encoder, _RECORD) is None:
        return
    parts.take_generic(encoder)
    encoder.__dict__.pop("forward", None)
    encoder.embeddings.__dict__.pop("_get_position_ids", None)
    for part in encoder.modules():
        if isinstance(part, PlacedDropout):
            del part.site
            part.__class__ = nn.Dropout  # pyright: ignore[reportAttributeAccessIssue]
        if part.__dict__.pop(PLACEMENT, None) is not None:
            part.__dict__.pop("forward", None)


def _name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__name__}"


def _forward(self: Any, input_ids: Tensor, attention_mask: Any = None, token_type_ids: Tensor | None = None) -> Any:
    """Stand in for the forward of an encoder (B, T) -> the states of every layer, each (B, T, D)."""
    state: Changed = record.read(self, _RECORD)
    mask = self._create_attention_mask(input_ids) if attention_mask is None else attention_mask
    real = on_host(mask.bool_mask)
    why = _why_padded(self, input_ids, real)
    if why is not None:
        if why not in state.told:
            state.told.add(why)
            logger.warning("whet.optimize: with their padding run %s", why)
        with state.placement.outside(), computing_in(state.dtype, input_ids.device):
            return type(self).forward(self, input_ids, mask, token_type_ids)
    layout = layout_of(real, "none").on(input_ids.device)
    ids = layout.packed(input_ids)
    types = None if token_type_ids is None else layout.packed(token_type_ids)
    everything = type(mask)(torch.ones_like(ids, dtype=torch.bool))
    with state.placement.at(layout.position()), computing_in(state.dtype, input_ids.device):
        out = type(self).forward(self, ids, everything, types)
    first, *rest = (scattered(_wide(states[0]), real) for states in out.all_outputs)
    return type(out)(embedding_output=first, layer_hidden_states=rest)


def _why_padded(self: Any, input_ids: Tensor, real: Tensor) -> str | None:
    """Return what the packed pass cannot reproduce; None for rows of tokens with padding on their right."""
    if real.shape != input_ids.shape or not bool(real[:, 0].all()) or bool((real[:, 1:] & ~real[:, :-1]).any()):
        return "rows whose padding is not on their right"
    counts_padding = type(self.embeddings).__name__ == "RobertaEmbeddings"
    if counts_padding and not torch.equal(real, on_host(input_ids).ne(self.padding_idx)):
        return "rows with padding tokens that the mask counts as tokens"
    return None


def _wide(states: Tensor) -> Tensor:
    """Return states in 16 bits as float32."""
    return states.float() if states.dtype in (torch.bfloat16, torch.float16) else states


def _attention(self: Any, k: Tensor, q: Tensor, v: Tensor, attn_mask: Any) -> Tensor:
    """Return the attention (B, H, T, K); curated-transformers drops parts of the result, not of the weights."""
    placement: Placement = self.__dict__[PLACEMENT]
    position = placement.now
    if position is None or not position.is_of(q.shape[0], q.shape[2]):
        return type(self).forward(self, k, q, v, attn_mask)
    spec = AttentionSpec(
        position.cu_seqlens,
        q.shape[-1] ** -0.5,
        max_seqlen=position.max_seqlen,
        kernel=placement.kernel,
        key_counts=position.key_counts,
    )
    found = attend(q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1), spec)
    dropped = self.dropout(found.flatten(1)[None])
    return dropped.view(found.shape).transpose(0, 1)[None]


def _position_ids(self: Any, x: Tensor) -> Tensor:
    """Return position ids that restart in each sequence; RoBERTa's begin after its padding token."""
    position = self.__dict__[PLACEMENT].now
    if position is None or not position.is_of(*x.shape):
        return type(self)._get_position_ids(self, x)
    first = self.padding_idx + 1 if type(self).__name__ == "RobertaEmbeddings" else 0
    return position.positions.long()[None] + first
