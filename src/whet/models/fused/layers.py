"""Fused pieces that block forwards are written with: products without their bias, residual norms, dropout, activations.

A forward of a family (`Part.forward`) is a chain of these. A product leaves its bias to the operator behind it. A
submodule that is more than its class, by a hook or an adapter for example, is called; each forward pass asks again.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from whet.kernels.activation import bias_act
from whet.kernels.batch_position import BatchPosition, Drop, Site, running, running_position
from whet.kernels.dropout import device_dropout, dropout
from whet.kernels.embedding import TAKES_THE_REST, RowGradient, Tables, embed
from whet.kernels.linear import LowRank, is_joined, linear, low_rank_linear
from whet.kernels.norm import Norm, add_norm
from whet.kernels.operator import wide
from whet.models.family import Slots
from whet.models.forwards import home_of, instance_forward
from whet.models.fused.limits import came_later, require_no_other_pass, require_pass
from whet.models.standard import (
    ACTIVATIONS,
    LAYER_NORMS,
    has_hooks,
    is_as_in_source,
    is_unchanged,
    rms_norm_of,
    why_called,
)

PLACEMENT = "whet_placement"
"""Attribute of a module that runs a fused forward: the Placement of its model."""
Product = tuple[Tensor, Tensor | None]
"""A product, and the bias that is still to be added."""


class PlacedDropout(nn.Dropout):
    """Dropout whose mask is a function of (seed, step, site, row, position, channel); plain dropout outside of whet.

    Only the class of a dropout module changes, so it keeps its hooks and its place in the model.
    """

    site: Site

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return input
        position = self.site.placement.now
        if position is None:
            require_pass(self, self.site, input)
        if position is None or not position.has(math.prod(input.shape[:-1])):
            return nn.functional.dropout(input, self.p)
        drop = Drop.at(self.site, self.p, position)
        if drop is None:
            return input
        by_device = input.device.type == "cuda" and self.site.placement.kernel != "whet"
        return device_dropout(input, drop) if by_device and not torch.compiler.is_compiling() else dropout(input, drop)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, site={self.site.number}"


PlacedDropout.__name__ = nn.Dropout.__name__  # by which snippets for Monte Carlo dropout look for dropouts


def drop_of(module: PlacedDropout) -> Drop | None:
    """Return the dropout of this use of the module; None if nothing is dropped."""
    if not module.training or module.p == 0.0:
        return None
    position = module.site.placement.now
    if position is None:  # its owner runs in a pass
        raise came_later(module)
    return Drop.at(module.site, module.p, position)


@dataclass(frozen=True)
class Ending:
    """What comes behind a block's last product, which a checkpoint may leave out of its block.

    Left out, the norm keeps its own sum for backward, and backward need not compute the block's last product again:
    nobody reads it. The next block's input is the norm of that sum, so that no more is kept than without.
    """

    linear_bias: Tensor | None
    norm: Norm
    drop: Drop | None

    def finish(self, product: Tensor, residual: Tensor) -> Tensor:
        """Return LayerNorm(residual + dropout(product + bias))."""
        product = product.to(residual.dtype)
        return add_norm(product, residual, self.norm, linear_bias=self.linear_bias, drop=self.drop)[0]


_TAKEN: ContextVar[tuple[list[tuple[Ending, Tensor]], object] | None] = ContextVar("whet_taken_endings", default=None)
"""Where the end of the running block and its residual go, and the pass that the block belongs to."""


def without_end(run: Callable[..., Tensor], found: list[Ending]) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Return the block `run` without its end: it gives the last product and the residual; the end goes to `found`.

    A block that keeps its end, because one of its modules must be called, gives its result and None.
    """

    def part(*args: object, **options: object) -> tuple[Tensor, Tensor | None]:
        taken: list[tuple[Ending, Tensor]] = []
        token = _TAKEN.set((taken, running()))
        try:
            product = run(*args, **options)
        finally:
            _TAKEN.reset(token)
        found[:] = [ending for ending, _ in taken]
        return product, taken[0][1] if taken else None

    return part


Unfinished = tuple[Tensor, Tensor, Ending] | Tensor
"""A product, its residual and what follows; or the result, if a norm had to be called."""


def pass_position(module: Any, x: Tensor) -> BatchPosition | None:
    """Return the position of the running pass of whet; None if the class's own forward must run on x (B, T, ...).

    Raises ConfigError if x is of a pass of another model: the module came into that one after whet had prepared it.
    """
    placement = module.__dict__.get(PLACEMENT)
    position = placement.now if placement is not None and is_unchanged(module) else None
    if position is None and placement is not None and placement.now is None:
        require_no_other_pass(module, *x.shape[:2])
    return position if position is not None and position.is_of(*x.shape[:2]) else None


def require_prepared(attention: nn.Module) -> None:
    """Raise ConfigError if an attention that cannot run packed as its class has it is not prepared."""
    if PLACEMENT not in attention.__dict__:
        raise came_later(attention)


def product(x: Tensor, dense: nn.Linear) -> Product:
    """Return the product, and the bias that is still to be added; a layer that must be called adds its own."""
    if why_called(dense, nn.Linear) is not None:
        return result_of(x, dense), None
    return linear(x, dense.weight), dense.bias


def with_bias(x: Tensor, dense: nn.Linear) -> Tensor:
    """Return dense(x)."""
    if why_called(dense, nn.Linear) is not None:
        return result_of(x, dense)
    return linear(x, dense.weight, dense.bias)


def inner(x: Tensor, dense: nn.Linear, activation: Any) -> Tensor:
    """Return activation(dense(x))."""
    result, bias = product(x, dense)
    if not isinstance(activation, nn.Module) or why_called(activation) is not None:
        return activation(_plus(result, bias))
    return bias_act(result, bias, ACTIVATIONS[type(activation)])


def layer_norm_of(norm: Any) -> Norm | None:
    """Return the parameters of a LayerNorm or a family's RMSNorm, for an operator; None if it must be called."""
    epsilon = LAYER_NORMS.get(type(norm))
    rms = rms_norm_of(norm) if epsilon is None else None
    if (epsilon is None and rms is None) or why_called(norm, type(norm)) is not None:
        return None
    if rms is None:
        return Norm(norm.weight, norm.bias, getattr(norm, epsilon or ""))
    # In fp32, as transformers adds them: in bf16, 1 + weight would lose most digits of a weight near 0.
    weight = wide(norm.weight) + rms.weight_offset if rms.weight_offset else norm.weight
    return Norm(weight, None, getattr(norm, rms.epsilon), rms=True)


def residual_norm(found: Product, residual: Tensor, norm: nn.Module, dropout: nn.Module | None) -> Unfinished:
    """Return what `finished` makes into LayerNorm(residual + dropout(product + bias)).

    A norm that must be called is, and the result is a tensor.
    """
    result, bias = found
    residual = residual_for(result, residual)
    called = dropout is not None and why_called(dropout, PlacedDropout) is not None
    settings = layer_norm_of(norm)
    if dropout is not None and (called or settings is None):
        result, bias = dropout(_plus(result, bias)), None
    if settings is None:
        return norm(_plus(result, bias) + residual)
    drop = drop_of(dropout) if isinstance(dropout, PlacedDropout) and not called else None
    return result, residual, Ending(bias, settings, drop)


def normalised(x: Tensor, norm: nn.Module) -> Tensor:
    """Return norm(x)."""
    settings = layer_norm_of(norm)
    return norm(x) if settings is None else add_norm(x, None, settings)[0]


def residual_and_norm(found: Product, residual: Tensor, norm: nn.Module, dropout: nn.Module) -> tuple[Tensor, Tensor]:
    """Return LayerNorm(s) and s = residual + dropout(product + bias); a dropout may be an Identity."""
    result, bias = found
    residual = residual_for(result, residual)
    dropped = isinstance(dropout, PlacedDropout) and why_called(dropout, PlacedDropout) is None
    settings = layer_norm_of(norm)
    if settings is None or not (dropped or type(dropout) is nn.Identity):
        total = residual + dropout(_plus(result, bias))
        return norm(total), total
    drop = drop_of(dropout) if isinstance(dropout, PlacedDropout) else None
    return add_norm(result.to(residual.dtype), residual, settings, linear_bias=bias, drop=drop)


def residual_for(result: Tensor, residual: Tensor) -> Tensor:
    """Return the residual (1, N, D) for the tokens that `result` holds: (1, N, D), or (1, M, D) of the chosen ones."""
    if torch.compiler.is_compiling() or result.shape[1] == residual.shape[1]:
        return residual
    position = running_position()
    assert position is not None
    assert position.chosen is not None
    return residual.index_select(1, position.chosen.tokens)


def finished(found: Unfinished) -> Tensor:
    """Return the norm's result."""
    if isinstance(found, Tensor):
        return found
    result, residual, ending = found
    return ending.finish(result, residual)


def block_end(module: nn.Module, found: Unfinished) -> Tensor:
    """Return what `finished` does; a checkpoint may leave it out of its block, unless a hook looks at the result."""
    if (
        isinstance(found, Tensor) or has_hooks(module) or torch.compiler.is_compiling()
    ):  # compiled blocks have their ends
        return finished(found)
    product, residual, ending = found
    taken = _TAKEN.get()
    if taken is None or taken[1] is not running():  # a hook in the block may have started a pass of another model
        return ending.finish(product, residual)
    taken[0].append((ending, residual))
    return product


def is_plain(module: nn.Module) -> bool:
    """Return whether a block may do the work of this submodule itself, without calling it."""
    own = instance_forward(module)
    ours = own is None or home_of(own).startswith("whet.models.families.")
    return is_unchanged(module) and ours and not has_hooks(module)


def as_products_are(x: Tensor) -> Tensor:
    """Return x in bf16 if the CPU's products are: what lies between blocks then needs no copies in two formats.

    The norms' own arithmetic stays in fp32. fp16, whose numbers end at 65,504, keeps its sums in fp32.
    """
    if x.device.type != "cpu" or not torch.is_autocast_enabled("cpu"):
        return x
    return x.to(torch.bfloat16) if torch.get_autocast_dtype("cpu") is torch.bfloat16 else x


def _plus(result: Tensor, bias: Tensor | None) -> Tensor:
    return result if bias is None else result + bias.to(result.dtype)


_HOME = "peft.tuners.lora.layer"


@dataclass(frozen=True)
class LowRankLayer:
    """What peft's layer computes: weight (M, K) and bias (M,) of its base, the pair, and the pair's dropout.

    peft's layer is called wherever it does more than x W' + s (x A') B': several adapters at a time, DoRA and other
    variants, biases of the pair, merged or disabled adapters, hooks.
    """

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


# ---- embeddings: the sum of the tables, its norm and its dropout, as one operator ----

GRADIENT = "whet_gradient"
"""Attribute of an embedding table that holds its RowGradient."""
_TABLES = ("word_embeddings", "position_embeddings", "token_type_embeddings")
TABLE_SLOTS: Slots = {**dict.fromkeys(_TABLES, nn.Embedding), "LayerNorm": nn.LayerNorm, "dropout": PlacedDropout}
"""What `embeddings` reads."""


@dataclass(frozen=True)
class EmbeddingNames:
    """The names of an embedding module's parts; tables of words, positions and segments, in this order."""

    tables: tuple[str, ...] = _TABLES
    norm: str = "LayerNorm"
    dropout: str = "dropout"


def embeddings(
    module: Any,
    input_ids: Tensor,
    position_ids: Tensor | None,
    token_type_ids: Tensor | None,
    names: EmbeddingNames = EmbeddingNames(),
) -> Tensor | None:
    """Return the normalised sum (1, N, D) of the embeddings of ids (1, N).

    None if a submodule must be called, or the module has another one with weights: it computes more than this sum.
    """
    columns = zip(names.tables, (input_ids, position_ids, token_type_ids), strict=False)
    given = [(table, ids) for name, ids in columns if (table := getattr(module, name, None)) is not None]
    tables = [table for table, _ in given]
    layer, dropout = getattr(module, names.norm), getattr(module, names.dropout)
    called = [why_called(table, nn.Embedding) for table in tables]
    norm = layer_norm_of(layer)
    if norm is None or why_called(dropout, PlacedDropout) is not None or any(called) or _has_more(module, names):
        return None
    ids = [torch.zeros_like(input_ids[0]) if one is None else one[0] for _, one in given]
    norm = replace(norm, bias=torch.zeros_like(norm.weight) if norm.bias is None else norm.bias)
    summed = Tables(tuple(table.weight for table in tables), tuple(table.padding_idx for table in tables))
    gradients = [_row_gradient(table) for table in tables]
    return as_products_are(embed(ids, summed, norm, drop=drop_of(dropout), gradients=gradients))[None]


def _has_more(module: nn.Module, names: EmbeddingNames) -> bool:
    """Return whether the module has weights that the sum does not read, such as a table of a kind of its own."""
    read = (*names.tables, names.norm, names.dropout)
    others = [one for name, one in module._modules.items() if name not in read and one is not None]
    return bool(module._parameters) or any(True for one in others for _ in one.parameters())


def _row_gradient(table: nn.Embedding) -> RowGradient | None:
    """Return what keeps the table's gradient between steps, unless somebody watches that gradient arrive."""
    found: RowGradient | None = table.__dict__.get(GRADIENT)
    if found is None or found.table is not table.weight or table.weight._backward_hooks:
        return None
    hooks = getattr(table.weight, "_post_accumulate_grad_hooks", None) or {}
    return found if all(hasattr(hook, TAKES_THE_REST) for hook in hooks.values()) else None
