"""The sparse feed-forward part of a block: a router, and experts of which each token uses one or two."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from whet.errors import ConfigError
from whet.kernels.activation import bias_act, gated_act_joined
from whet.kernels.batch_position import running_position
from whet.kernels.grouped import grouped_linear
from whet.models.experts.routing import Routes, Sorted, by_expert, chosen, note, within_capacity
from whet.models.experts.settings import ExpertSettings
from whet.models.standard import ACTIVATIONS, why_called


@dataclass(frozen=True, kw_only=True)
class ExpertShape:
    """The sizes of one expert, which are those of the dense part that it comes from."""

    width: int
    inner: int
    gated: bool
    bias: bool
    dtype: torch.dtype = torch.float32


class Router(nn.Module):
    """A logit of each token for each expert, in float32 in runs of any precision (Fedus et al. 2021, section 2.4)."""

    def __init__(self, n_experts: int, width: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_experts, width, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (N, X) of tokens x (N, D)."""
        with torch.autocast(x.device.type, enabled=False):
            return nn.functional.linear(x.float(), self.weight.float())


class SparseFeedForward(nn.Module):
    """Takes the place of a dense feed-forward part. Weights of all experts lie in one tensor, the expert first."""

    def __init__(
        self, shape: ExpertShape, settings: ExpertSettings, activation: nn.Module, dropout: nn.Module | None
    ) -> None:
        super().__init__()
        n, self.gated = settings.experts, shape.gated
        self.top_k, self.capacity_factor, self.n_experts = settings.top_k, settings.capacity_factor, n
        rows = shape.inner * (2 if shape.gated else 1)
        empty = partial(torch.empty, dtype=shape.dtype)
        self.router = Router(n, shape.width, shape.dtype)
        self.up_proj = nn.Parameter(empty(n, rows, shape.width))
        self.down_proj = nn.Parameter(empty(n, shape.width, shape.inner))
        self.up_bias = nn.Parameter(empty(n, rows)) if shape.bias else None
        self.down_bias = nn.Parameter(empty(n, shape.width)) if shape.bias else None
        self.activation, self.dropout = activation, dropout
        self.padded_rows: Tensor | None = None
        """The row of each token (B T,) of the padded batch that trains, -1 for padding; kept for a recomputation."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return the experts' results (B, T, D) for hidden states (B, T, D)."""
        x = hidden_states.flatten(0, -2)
        routes = self._routes(x)
        note(routes)
        order = by_expert(routes.experts, self.n_experts, routes.kept)
        inner = self._activated(grouped_linear(in_order_of_experts(x, order), self.up_proj, self.up_bias, order.ends))
        found = grouped_linear(inner, self.down_proj, self.down_bias, order.ends)
        found = in_order_of_tokens(found, order).unflatten(0, (-1, self.top_k))
        result = (found * routes.weights.to(found.dtype)[..., None]).sum(1).view(hidden_states.shape)
        return result if self.dropout is None else self.dropout(result)

    def _routes(self, x: Tensor) -> Routes:
        logits = self.router(x)
        experts, weights = chosen(logits, self.top_k)
        rows = self._rows(len(x)) if self.training and self.capacity_factor is not None else None
        if rows is None or self.capacity_factor is None:
            return Routes(logits, experts, weights)
        return Routes(logits, experts, weights, within_capacity(experts, rows, self.capacity_factor, self.n_experts))

    def _rows(self, n_tokens: int) -> Tensor | None:
        """Return the row of each token (N,), -1 for padding; None in a pass that trains nothing and has no rows."""
        position = running_position()
        if position is not None and len(position.slots) == n_tokens:
            return (position.slots - position.slots[0]).long()
        if position is None and self.padded_rows is not None and len(self.padded_rows) == n_tokens:
            return self.padded_rows
        if torch.is_grad_enabled():
            raise _no_rows(self.capacity_factor)
        return None

    def _activated(self, x: Tensor) -> Tensor:
        plain = isinstance(self.activation, nn.Module) and why_called(self.activation) is None
        kind = ACTIVATIONS[type(self.activation)] if plain else None
        if not self.gated:
            return self.activation(x) if kind is None else bias_act(x, None, kind)
        if kind is not None:
            return gated_act_joined(x, kind)
        gate, up = x.chunk(2, dim=-1)
        return self.activation(gate) * up

    def extra_repr(self) -> str:
        return f"experts={self.n_experts}, top_k={self.top_k}, capacity_factor={self.capacity_factor}"


def _no_rows(factor: float | None) -> ConfigError:
    return ConfigError(
        what="the capacity of experts does not go with this training",
        got=f"capacity_factor {factor}, and tokens of which whet does not know the rows",
        why="each sequence has a capacity of its own, and whet knows sequences only where it runs the model",
        fix="use the loss and the training of whet.Trainer, unchanged; or leave --moe_capacity_factor out, and set "
        "capacity_factor of whet_experts to null in the config.json of a model that has it; or in Python call "
        "whet.upcycle with whet.ExpertSettings of the same values without it",
    )


def in_order_of_experts(x: Tensor, order: Sorted) -> Tensor:
    """Return the tokens x (N, D) for each use of an expert, (N top_k, D), sorted by expert."""
    return _Taken.apply(x, order)


def in_order_of_tokens(x: Tensor, order: Sorted) -> Tensor:
    """Return the experts' results (N top_k, D) in the order of tokens, the uses of one token next to each other."""
    return _Returned.apply(x, order)


class _Taken(Function):
    """Both directions copy rows: index_select alone would add them up one by one in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Sorted) -> Tensor:
        ctx.order, ctx.n_tokens = order, len(x)
        return x.index_select(0, order.tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        back = grads[0].index_select(0, ctx.order.places)
        return (back if len(back) == ctx.n_tokens else back.unflatten(0, (ctx.n_tokens, -1)).sum(1)), None


class _Returned(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Sorted) -> Tensor:
        ctx.order = order
        return x.index_select(0, order.places)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grads[0].index_select(0, ctx.order.uses), None


def has_experts(model: nn.Module) -> bool:
    """Return whether the model has sparse layers: whet's, or experts of transformers' own."""
    return bool(layers_of(model)) or any(hasattr(type(module), "_apply_gate") for module in model.modules())


def layers_of(model: nn.Module) -> list[tuple[str, SparseFeedForward]]:
    """Return the sparse layers of a model with their names, each once."""
    return [(name, one) for name, one in model.named_modules() if isinstance(one, SparseFeedForward)]
