"""What a model hands to the AttentionInterface: which modules call it, and with what."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from whet.models.fused.limits import NO_EFFECT

_NAME = "whet_observed"
_UNDERSTOOD = NO_EFFECT - {"sliding_window"} | {"is_causal"}


@dataclass(frozen=True)
class AttentionCall:
    """One call of the AttentionInterface."""

    module: type[nn.Module]
    shapes: tuple[tuple[int, ...], ...]
    """Of query, key and value (B, H, T, K)."""
    causal: bool
    biased: bool
    """Whether its mask holds other numbers than those that hide a key."""
    options: tuple[str, ...]
    """Names of options that packed attention does not know."""

    @property
    def is_self_attention(self) -> bool:
        """Whether keys and values are of the same tokens and widths as queries."""
        query, *others = self.shapes
        return all((one[0], one[2], one[3]) == (query[0], query[2], query[3]) for one in others)


_CALLS: ContextVar[list[AttentionCall] | None] = ContextVar("whet_observed_calls", default=None)


def attention_calls(model: Any, inputs: dict[str, Tensor]) -> list[AttentionCall]:
    """Run the model, which is a copy, and return its calls of the AttentionInterface."""
    AttentionInterface.register(_NAME, _attend)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    before, calls = model.config._attn_implementation, []
    model.set_attn_implementation(_NAME)
    token = _CALLS.set(calls)
    try:
        with torch.no_grad():
            model(**inputs)
    finally:
        _CALLS.reset(token)
        model.set_attn_implementation(before)
    return calls


def why_not_packed(calls: list[AttentionCall]) -> str | None:
    """Return what about these calls packed attention would not honour; None: nothing is known."""
    name = calls[0].module.__name__
    if any(call.causal for call in calls):
        return f"its attention ({name}) is causal"
    if any(call.biased for call in calls):
        return f"its attention ({name}) adds a bias of its own to the scores"
    options = sorted({option for call in calls for option in call.options})
    return f"its attention ({name}) asks for {', '.join(options)}" if options else None


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    calls = _CALLS.get()
    asked = tuple(name for name, value in options.items() if value is not None and name not in _UNDERSTOOD)
    if calls is not None:
        shapes = tuple(tuple(tensor.shape) for tensor in (query, key, value))
        causal = bool(options.get("is_causal") or getattr(module, "is_causal", False))
        calls.append(AttentionCall(type(module), shapes, causal, _is_bias(attention_mask), asked))
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)[0], None


def _is_bias(mask: Tensor | None) -> bool:
    if mask is None or not mask.is_floating_point():
        return False
    return bool(((mask != 0) & (mask > torch.finfo(mask.dtype).min / 2)).any())
