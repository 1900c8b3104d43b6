"""Linear layers under LoRA: peft's own layer, computed with its low-rank pair as one product.

peft's layer is called wherever it does more than x W' + s (x A') B': several adapters at a time, DoRA and other
variants, biases of the pair, merged or disabled adapters, hooks.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from whet.kernels.linear import LowRank, is_joined, low_rank_linear
from whet.models.standard import has_hooks, is_as_in_source, why_called

_HOME = "peft.tuners.lora.layer"


@dataclass(frozen=True)
class LowRankLayer:
    """What peft's layer computes: weight (M, K) and bias (M,) of its base, the pair, and the pair's dropout."""

    weight: Tensor
    bias: Tensor | None
    pair: LowRank
    dropout: Any


def result_of(x: Tensor, dense: Any) -> Tensor:
    """Return dense(x) of a layer that is more than its class; with the pair of a LoRA layer in the same product."""
    layer = layer_of(dense)
    if layer is None or not is_joined(x) or not _in_one_format(x, layer):
        return dense(x)
    dropped = layer.dropout(x)
    return low_rank_linear(x, None if dropped is x else dropped, layer.weight, layer.bias, layer.pair)


def layer_of(dense: Any) -> LowRankLayer | None:
    """Return what the module computes if it is peft's LoRA layer with one plain pair, and nothing more; else None."""
    home = sys.modules.get(_HOME)
    if home is None or type(dense) is not home.Linear or "forward" in dense.__dict__ or has_hooks(dense):
        return None
    if not is_as_in_source(type(dense)) or dense.disable_adapters or dense.merged:
        return None
    active = [name for name in dense.active_adapters if name in dense.lora_A]
    if len(active) != 1 or active[0] in dense.lora_variant:
        return None
    base, down, up = dense.base_layer, dense.lora_A[active[0]], dense.lora_B[active[0]]
    kind = Conv1D if type(base) is Conv1D else nn.Linear
    if any(why_called(one, of) is not None for one, of in ((base, kind), (down, nn.Linear), (up, nn.Linear))):
        return None
    if down.bias is not None or up.bias is not None:
        return None
    weight = base.weight.t() if kind is Conv1D else base.weight
    pair = LowRank(down.weight, up.weight, dense.scaling[active[0]])
    return LowRankLayer(weight, base.bias, pair, dense.lora_dropout[active[0]])


def _in_one_format(x: Tensor, layer: LowRankLayer) -> bool:
    """Return whether peft would convert nothing, or autocast everything."""
    if torch.is_autocast_enabled("cpu"):
        return True
    return x.dtype == layer.weight.dtype == layer.pair.down.dtype == layer.pair.up.dtype
