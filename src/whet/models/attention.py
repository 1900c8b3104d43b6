"""whet's attention function inside transformers: one function serves every family through the AttentionInterface."""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from whet.card import Card
from whet.kernels.attention.packed import attend as attend_rows
from whet.kernels.batch_position import Site, running, running_position
from whet.kernels.specs import AttentionSpec, Drop, window_of
from whet.models.called_with import require_understood
from whet.models.fused.chosen import require_all
from whet.models.known import known
from whet.models.recomputation import came_later, require_no_other_pass, require_pass

CARD = Card(
    name="attention",
    asked_by="attn_implementation",
    does="Chooses the code that computes attention: whet's packed one, or one of transformers' padded ones.",
    improves="both",
    same_result="without dropout",
    hurts="Any choice but the default runs padded, except flash attention on a GPU.",
    source="Vaswani et al. 2017, equation 1; Dao et al. 2022, arXiv:2205.14135",
    page="attention.md",
)

NAME = "whet"
SITE = "whet_site"
"""Attribute of an attention module that holds its Site."""


def register() -> None:
    """Make `attn_implementation="whet"` known to transformers."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask)


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Return the attention output (B, T, H, K) for query, key and value (B, H, T, K).

    In a packed pass B is 1, T is all tokens of all rows, and each row sees itself alone. Outside of one (the model is
    called by somebody else) it is transformers' own: eager, with its weights, where the model had that, or else SDPA.
    """
    site: Site | None = getattr(module, SITE, None)
    position = None if site is None else site.position
    if site is None and running() is not None:
        raise came_later(module)
    if site is not None and position is None:
        require_no_other_pass(module, query.shape[0], query.shape[2])
        if attention_mask is None:
            require_pass(module, site, query)
    if site is None or position is None or not position.is_of(query.shape[0], query.shape[2]):
        return _outside(module, site)(module, query, key, value, attention_mask, **options)
    require_understood(module, attention_mask, options)
    require_all(module, query.shape[2], position)
    drop = Drop.at(site, options.get("dropout", 0.0), position)
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    spec = AttentionSpec(
        position.cu_seqlens,
        scale,
        causal=site.placement.causal,
        drop=drop,
        max_seqlen=position.max_seqlen,
        kernel=site.placement.kernel,
        key_counts=position.key_counts,
        window=window_of(options.get("sliding_window")),
    )
    # Under autocast a family's own rotation leaves queries and keys in fp32, and values are in bf16.
    q, k, v = (tensor[0].transpose(0, 1).to(value.dtype) for tensor in (query, key, value))
    return attend_rows(q, k, v, spec)[None], None


def _outside(module: nn.Module, site: Site | None) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Return the attention function that the model has outside of whet's passes."""
    if site is None or site.placement.attention_outside != "eager":
        return sdpa_attention_forward
    homes = (sys.modules[part.__module__] for part in type(module).__mro__)
    eager = next(home.eager_attention_forward for home in homes if hasattr(home, "eager_attention_forward"))
    return partial(_eager, eager)


def _eager(eager: Callable[..., Any], module: nn.Module, *qkv: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Run a family's eager attention with our mask, which is SDPA's: true where a key is seen.

    There is none for causal rows without padding or windows, where SDPA needs none; eager attention does.
    """
    query, key, value, seen = qkv
    if seen is None and query.shape[2] > 1 and getattr(module, "is_causal", False):
        n_queries, n_keys = query.shape[2], key.shape[2]
        seen = query.new_ones(n_queries, n_keys, dtype=torch.bool).tril(n_keys - n_queries)
    if seen is not None and seen.dtype == torch.bool:
        hidden = torch.finfo(query.dtype).min
        seen = torch.zeros_like(seen, dtype=query.dtype).masked_fill(~seen, hidden)
    return eager(module, query, key, value, seen, **options)


def mask(*args: Any, attention_mask: Tensor | None = None, **options: Any) -> Tensor | None:
    """Return the mask for padded calls, and None for packed ones, whose rows and windows the attention knows itself."""
    config = options.get("config")
    family = known().get(getattr(config, "model_type", ""))
    sees_all = getattr(config, "sliding_window", None) is None and not (family is not None and family.causal)
    if attention_mask is None and (sees_all or _is_packed(options)):
        return None
    made_by = eager_mask if family is not None and family.adds_masks else sdpa_mask
    return made_by(*args, attention_mask=attention_mask, **options)


def _is_packed(call: Mapping[str, Any]) -> bool:
    """Return whether a call for a mask belongs to a packed pass."""
    position = running_position()
    return position is not None and position.is_of(call["batch_size"], call["q_length"])
