"""whet's attention function inside transformers: one function serves every family through the AttentionInterface."""

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from whet.kernels.fused_attention import attend as attend_rows
from whet.kernels.place import Site
from whet.kernels.reference import AttentionSpec, Drop

NAME = "whet"
SITE = "whet_site"
"""Attribute of an attention module that holds its Site."""


def register() -> None:
    """Make `attn_implementation="whet"` known to transformers."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask)


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Return the attention output (B, T, H, K) for query, key and value (B, H, T, K).

    In a packed pass B is 1, T is all tokens of all rows, and each row sees itself alone. Outside of one (the model is
    called by somebody else) it is transformers' own SDPA attention.
    """
    site: Site | None = getattr(module, SITE, None)
    if site is None or site.place is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    p = options.get("dropout", 0.0)
    drop = Drop(p, site.place, site.use()) if p > 0.0 else None
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    place = site.place
    spec = AttentionSpec(place.row_starts, scale, drop=drop, longest=place.longest, kernel=site.placement.kernel)
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return attend_rows(q, k, v, spec)[None], None


def mask(*args: Any, attention_mask: Tensor | None = None, **options: Any) -> Tensor | None:
    """Return the mask for padded calls, and None for packed ones, whose rows the attention knows itself."""
    if attention_mask is None:
        return None
    return sdpa_mask(*args, attention_mask=attention_mask, **options)
