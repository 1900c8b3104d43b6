"""Gemma 3, and Gemma 2 without caps: norms before and after each part, windows in most blocks.

Gemma's first generation has Llama's blocks, and is in `llama.py`. Gemma 2 has no norms of heads.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from whet.models.families import llama
from whet.models.family import WINDOWS_BY_LAYER, Family, Part, RmsNorm, Slots
from whet.models.fused import decoder
from whet.models.fused.layers import is_plain, normalised, with_bias
from whet.models.fused.limits import cap_of, require_understood

_NORMS = (
    *("input_layernorm", "post_attention_layernorm"),
    *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
)


def block(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: Any = None,
    attention_mask: Any = None,
    position_ids: Any = None,
    *more: Any,
    **options: Any,
) -> Tensor:
    """Return the block's result (B, T, D): its input plus normalised attention plus normalised feed-forward."""
    placed = (position_embeddings, attention_mask, position_ids)
    if more or not llama.in_training_pass(self, hidden_states, position_embeddings, options):
        return type(self).forward(self, hidden_states, *placed, *more, **options)
    x, attn = normalised(hidden_states, self.input_layernorm), self.self_attn
    if is_plain(attn):
        require_understood(attn, attention_mask, options)
        found = decoder.attended(attn, x, position_embeddings, attn.sliding_window)
        found = with_bias(found, attn.o_proj)
    else:
        found = attn(x, position_embeddings, attention_mask, position_ids=position_ids, **options)[0]
    total = hidden_states + normalised(found, self.post_attention_layernorm)
    x = normalised(total, self.pre_feedforward_layernorm)
    return total + normalised(self.mlp(x), self.post_feedforward_layernorm)


def _parts_of(name: str) -> dict[str, Part]:
    """Return the parts of a family whose classes begin with this name."""
    norms: Slots = dict.fromkeys(_NORMS, f"{name}RMSNorm")
    slots: Slots = {"self_attn.o_proj": nn.Linear, **norms}
    return llama.parts_of(name) | {f"{name}DecoderLayer": Part(block, slots)}


def why_padded(model: Any) -> str | None:
    """Return why a model needs its padding: capped scores are not in whet's attention.

    Each attention has the cap that the configuration had when it was made.
    """
    caps = (cap_of(module) for module in model.modules())
    if (cap := next((cap for cap in caps if cap is not None), None)) is not None:
        return f"its attention caps its scores (attn_logit_softcapping {cap})"
    return decoder.why_padded(model)


_TINY = {
    **llama.TINY,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 8,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}


def _gemma(model_type: str, prefix: str, package: str) -> Family:
    return llama.like_llama(
        model_type,
        prefix,
        package=package,
        parts=_parts_of(prefix),
        rms_norms={f"{prefix}RMSNorm": RmsNorm("eps", weight_offset=1.0)},
        why_padded=why_padded,
        windows=WINDOWS_BY_LAYER,
        tiny=_TINY,
    )


PACKAGES = ("transformers.models.gemma2", "transformers.models.gemma3")
FAMILIES = (
    _gemma("gemma2", "Gemma2", PACKAGES[0]),
    _gemma("gemma3_text", "Gemma3", PACKAGES[1]),
)
