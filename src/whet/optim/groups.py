"""Parameters with weight decay, and those without: biases and normalisation parameters."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from transformers.trainer_pt_utils import get_parameter_names

_SPARED = ["bias", "layernorm", "rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
"""Names without decay, of parameters and modules above them, as in transformers' Trainer.get_decay_parameter_names."""


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the trainable parameters in two groups, with weight decay and without, for any torch optimizer.

    As in transformers: no decay for the parameters of nn.LayerNorm, nor for names that say bias or norm. So all
    parameters of a model whose own name says layernorm go without.
    """
    decayed = set(decayed_names(model))
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for name, p in trainable if name in decayed], "weight_decay": weight_decay},
        {"params": [p for name, p in trainable if name not in decayed], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def with_rates(
    groups: Sequence[dict[str, Any]], learning_rate: float, rates: Mapping[int, float] | None
) -> list[dict[str, Any]]:
    """Return the groups, split into groups with a learning rate of their own, the highest rate first.

    `rates` has the share of `learning_rate` of each parameter by its id; None: the groups stay as they are.
    """
    if rates is None:
        return list(groups)
    split = [
        {**group, "params": [one for one in group["params"] if rates[id(one)] == rate], "lr": learning_rate * rate}
        for rate in sorted({*rates.values()}, reverse=True)
        for group in groups
    ]
    return [group for group in split if group["params"]]


def decayed_names(model: nn.Module) -> list[str]:
    """Return the names of the parameters that weight decay is for."""
    return get_parameter_names(model, [nn.LayerNorm], _SPARED)
