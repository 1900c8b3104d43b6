"""Which parameters decay: weights do, biases and normalisation parameters do not."""

from collections.abc import Iterator
from typing import Any

from torch import nn

_NORMS = ("norm", "layernorm", "rmsnorm")


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the trainable parameters in two groups, with decay and without, for any torch optimizer.

    As the guides do it: no decay on biases and on the parameters of normalisation layers.
    """
    spared = set(_spared(model))
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for name, p in trainable if name not in spared], "weight_decay": weight_decay},
        {"params": [p for name, p in trainable if name in spared], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _spared(model: nn.Module) -> Iterator[str]:
    for prefix, module in model.named_modules():
        is_norm = any(word in type(module).__name__.lower() for word in _NORMS)
        for name, _ in module.named_parameters(recurse=False):
            if is_norm or name.endswith("bias"):
                yield f"{prefix}.{name}" if prefix else name
