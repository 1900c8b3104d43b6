"""Parameters with weight decay, and those without: biases and normalisation parameters."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _BatchNorm)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the trainable parameters in two groups, with weight decay and without, for any torch optimizer.

    As in transformers: no decay for names that contain "bias", nor for the parameters of normalisation layers.
    """
    spared = set(_spared(model))
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for name, p in trainable if name not in spared], "weight_decay": weight_decay},
        {"params": [p for name, p in trainable if name in spared], "weight_decay": 0.0},
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


def _spared(model: nn.Module) -> Iterator[str]:
    for prefix, module in model.named_modules():
        # The end of the class name identifies the norms of model families, such as LlamaRMSNorm.
        is_norm = isinstance(module, _NORMS) or type(module).__name__.endswith("Norm")
        for name, _ in module.named_parameters(prefix=prefix, recurse=False):
            if is_norm or "bias" in name.lower():
                yield name
