"""Linear layers of a model whose frozen weights are kept in 8 or 4 bits, and which layers of a model can be."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from whet.errors import ConfigError
from whet.kernels.weight_only import Codes, Codes4, Codes8, linear, rounded, rounded_4
from whet.models.experts.layer import has_experts
from whet.models.standard import why_called
from whet.models.view import ModelView, Named

FLAGS = {8: "--load_in_8bit", 4: "--load_in_4bit"}
"""What asks for weights of so many bits."""


class QuantisedLinear(nn.Linear):
    """A linear layer whose weight (M, K) is frozen: codes of 8 bits and a scale for each row, or as in `Codes4`."""

    def __init__(self, weight: Tensor, bias: nn.Parameter | None, n_bits: int = 8) -> None:
        nn.Module.__init__(self)  # that of nn.Linear would make a weight in float32
        self.out_features, self.in_features = weight.shape
        self.n_bits = n_bits
        stored = rounded(weight) if n_bits == 8 else rounded_4(weight)
        self.codes = nn.Parameter(stored.codes, requires_grad=False)
        self.scales: Tensor
        self.register_buffer("scales", stored.scales)
        self.register_parameter("bias", bias)

    @property
    def weight(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The dequantised weight (M, K) in float32, computed at each read."""
        return self._stored.rows(0, self.out_features, torch.float32)

    def forward(self, input: Tensor) -> Tensor:
        """Return input (..., K) @ weight transposed + bias; the gradient of input goes through the same weight."""
        return linear(input, self._stored, self.bias)

    @property
    def n_weights_in_codes(self) -> int:
        """How many weights the codes stand for."""
        return self.out_features * self.in_features

    @property
    def stored_bytes(self) -> int:
        """The bytes of codes and scales."""
        return sum(one.numel() * one.element_size() for one in (self.codes, self.scales))

    @property
    def _stored(self) -> Codes:
        if self.n_bits == 8:
            return Codes8(self.codes, self.scales)
        return Codes4(self.codes, self.scales, self.in_features)


@dataclass(frozen=True)
class Quantised:
    """What `quantise` did to a model."""

    n_bits: int
    n_layers: int
    before_bytes: int
    """Of the weights of these layers, in float32."""
    after_bytes: int
    """Of the same weights now, scales included."""

    def __str__(self) -> str:
        sizes = f"{self.after_bytes / 1e6:,.4g} MB instead of {self.before_bytes / 1e6:,.4g} MB"
        return f"frozen weights of {self.n_layers} linear layers in {self.n_bits} bits: {sizes}"


def quantise(model: nn.Module, n_bits: int = 8) -> Quantised:
    """Replace the frozen linear layers of the model, its head left out, by ones of 8 or 4 bits, and return what it did.

    Layers that a hook, a parametrization or another quantisation has changed stay as they are, and so do weights that
    another module shares. Raises ConfigError if no layer is left, or if the model has experts.
    """
    found = _frozen(model)
    if (why := _why_not(model, found)) is not None:
        raise ConfigError(
            what=f"the frozen weights cannot be kept in {n_bits} bits",
            got=type(ModelView(model).model).__name__,
            why=why,
            fix=f"leave {FLAGS[n_bits]} out; --gradient_checkpointing saves memory with any model",
        )
    inside, before, after = ModelView(model).model, 0, 0
    for name, layer in found:
        own: Any = layer
        weight: Tensor = own.weight.t() if isinstance(layer, Conv1D) else own.weight
        new = QuantisedLinear(weight, own.bias, n_bits).train(layer.training)
        before, after = before + weight.numel() * weight.element_size(), after + new.stored_bytes
        inside.set_submodule(name, new)
    return Quantised(n_bits, len(found), before, after)


def _frozen(model: nn.Module) -> list[Named]:
    """Return the plain linear layers outside of the head whose weights are frozen and theirs alone."""
    view = ModelView(model)
    heads = tuple(f"{name}." for name, _ in view.head())
    holders = Counter(id(own) for module in model.modules() for own in module._parameters.values())

    def can_be(layer: Any) -> bool:
        if type(layer) not in (nn.Linear, Conv1D) or why_called(layer, type(layer)) is not None:
            return False
        return not layer.weight.requires_grad and holders[id(layer.weight)] == 1

    return [one for one in view.linears() if not f"{one.name}.".startswith(heads) and can_be(one.module)]


def _why_not(model: nn.Module, found: list[Named]) -> str | None:
    if has_experts(model):
        return "it has experts, whose weights whet keeps in float32: most of the model"
    return None if found else "it has no frozen linear layers outside of its head"
