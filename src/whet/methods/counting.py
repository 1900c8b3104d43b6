"""What one block of a model keeps and computes, counted from its layers: the numbers behind the methods' costs.

Exact for packed encoders with native operators (`tests/methods/test_cost.py` measures them). Without these, and for
other models, what is kept is a lower bound: torch's operators keep masks of dropout and more results as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from torch import nn

from whet.config.methods import MethodSettings
from whet.kernels.matrix import is_widened
from whet.models.packed import packed_model
from whet.models.view import ModelView, Named

_FLOAT = 4
_HALF = ("bf16", "fp16")
_STATISTICS = 2 * _FLOAT
"""Mean and variance of one token, which a norm keeps."""


@dataclass(frozen=True)
class Block:
    """The sizes of one block, in numbers, for one token where nothing else is said."""

    uses: int
    """How many times a forward pass runs the block."""
    width: int
    """Its hidden states."""
    inputs: int
    """The inputs of its linear layers; the projections of attention share theirs."""
    outputs: int
    """The outputs of its linear layers."""
    attention: int
    """The result of attention, which the layer behind it reads."""
    heads: int
    norms: int
    weights: int
    """Weights of its linear layers, in all."""
    projections: int
    """Weights of the projections of attention, which whet's operators join, in all."""
    products: tuple[tuple[int, int], ...]
    """Inputs and outputs of each product; whet's operators join the projections of attention to one."""
    last: int
    """Weights of its last linear layer."""


def blocks(view: ModelView) -> list[Block]:
    """Return the sizes of the model's blocks; none for a model without."""
    found = view.blocks()
    layers = getattr(getattr(view.model, "config", None), "num_hidden_layers", 0) or 0
    uses = layers // len(found) if packed_model(view.model) is not None and found else 1
    return [_block(view, named, max(1, uses)) for named in found]


@dataclass(frozen=True)
class Kept:
    """Bytes that the blocks keep from the forward pass for backward."""

    per_token: int
    fixed: int
    """Whatever the batch: copies of weights that products read."""


def kept(view: ModelView, settings: MethodSettings, *, operators: bool) -> Kept:
    """Return what the blocks of this model keep if it runs with these settings, on native operators or torch's."""
    keeping, found = _Keeping(settings, operators), blocks(view)
    return Kept(
        sum(block.uses * keeping.of_a_token(block) for block in found),
        sum(keeping.of_weights(block) for block in found),
    )


@dataclass(frozen=True)
class _Keeping:
    """What one use of a block keeps."""

    settings: MethodSettings
    operators: bool
    """Whether native operators run."""

    @property
    def number_bytes(self) -> int:
        """The size of a number that products read and write."""
        return _FLOAT // 2 if self.settings.precision in _HALF else _FLOAT

    @property
    def _multiplies_fp32(self) -> bool:
        """Whether native operators read weights as they are under bf16: where the processor is faster in fp32."""
        return self.operators and self.settings.precision == "bf16" and is_widened()

    def of_a_token(self, block: Block) -> int:
        """Return the bytes of one token."""
        statistics = block.norms * _STATISTICS + block.heads * _FLOAT
        if self.settings.checkpointing == "blocks":
            return self.number_bytes * block.width + _STATISTICS if self.operators else _FLOAT * block.width
        if self.settings.checkpointing == "selective":
            if self.operators:
                return self.number_bytes * (block.outputs + block.attention) + statistics
            return self.number_bytes * block.outputs + _FLOAT * block.width
        sums = 0 if self.operators or self.number_bytes == _FLOAT else block.norms * _FLOAT * block.width
        return self.number_bytes * (block.inputs + block.outputs) + statistics + sums

    def of_weights(self, block: Block) -> int:
        """Return the bytes of the copies of weights: those in half precision, and joined projections."""
        if self.settings.checkpointing is not None:
            return 0
        if self.number_bytes < _FLOAT and not self._multiplies_fp32:
            return self.number_bytes * block.weights
        return _FLOAT * block.projections * block.uses if self.operators else 0


def _block(view: ModelView, named: Named, uses: int) -> Block:
    inside: list[Any] = [linear.module for linear in view.linears() if _is_in(linear, named)]
    sizes = [(prod(size), *size) for size in map(features, inside)]
    joined = [layer for part in _attentions(view, named.module) for layer in _linears(part)[:3]]
    shared = [features(layer) for layer in joined]
    return Block(
        uses=uses,
        width=sizes[-1][2] if sizes else 0,
        inputs=sum(n_in for _, n_in, _ in sizes) - sum(n_in for n_in, _ in shared) * 2 // 3,
        outputs=sum(n_out for _, _, n_out in sizes),
        attention=sum(n_out for _, n_out in shared) // 3,
        heads=getattr(getattr(view.model, "config", None), "num_attention_heads", 0) if joined else 0,
        norms=sum(_is_in(norm, named) for norm in view.norms()),
        weights=sum(n_weights for n_weights, _, _ in sizes),
        projections=sum(prod(features(layer)) for layer in joined),
        products=_products(inside, joined),
        last=sizes[-1][0] if sizes else 0,
    )


def _products(layers: list[Any], joined: list[Any]) -> tuple[tuple[int, int], ...]:
    own = [features(layer) for layer in layers if not any(layer is one for one in joined)]
    thirds = [joined[first : first + 3] for first in range(0, len(joined), 3)]
    together = [(features(third[0])[0], sum(features(layer)[1] for layer in third)) for third in thirds]
    return (*together, *own)


def _is_in(part: Named, block: Named) -> bool:
    return part.name.startswith(f"{block.name}.")


def features(layer: Any) -> tuple[int, int]:
    """Return the sizes of a linear layer's input and output; Conv1D has its weight the other way round."""
    if isinstance(layer, nn.Linear):  # one of 8 bits computes its weight at each read
        return layer.in_features, layer.out_features
    n_in, n_out = layer.weight.shape
    return n_in, n_out


def _attentions(view: ModelView, block: nn.Module) -> list[nn.Module]:
    """Return the modules that hold a block's projections to queries, keys and values, in a packed model."""
    packed = packed_model(view.model)
    return [] if packed is None else [part for part in block.modules() if packed.family.is_attention(part)]


def _linears(part: nn.Module) -> list[Any]:
    return [module for module in part.modules() if isinstance(module, nn.Linear)]
