"""Attention of a packed batch with its three projections, joined into one product."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from whet.errors import ConfigError
from whet.kernels import recompute
from whet.kernels.attention_spec import AttentionSpec, Bias
from whet.kernels.batch_position import BatchPosition, Chosen, Drop, Site
from whet.kernels.linear import linear
from whet.kernels.packed_attention import attend, attend_joined
from whet.models.forwards import instance_forward
from whet.models.fused.layers import PlacedDropout, with_bias
from whet.models.fused.limits import came_later
from whet.models.standard import has_own_hooks, name_of, why_called


def attention(
    module: Any, x: Tensor, parts: tuple[nn.Linear, ...], heads: int, p: float, bias: Tensor | None = None
) -> Tensor:
    """Return the attention output (1, N, D) of x (1, N, D) through the projections of query, key and value.

    `module` is one of the family's attention modules, `p` the share of its weights that this call drops, `bias` what
    `kernels.packed_attention.attend` takes. In the last block the result may be that of chosen tokens, (1, M, D).
    """
    scale = getattr(module, "scaling", None) or (parts[0].out_features // heads) ** -0.5
    spec = spec_of(module, x.shape[1], scale, p)
    chosen = chosen_from(module, module.whet_site.placement.now)
    if chosen is not None:
        q, k, v = (part.unflatten(-1, (heads, -1)) for part in _of_chosen(x, parts, chosen))
        return attend_chosen((q, k, v), spec, chosen, bias).flatten(1)[None]
    return attended(projected(x, parts, heads), spec, bias).flatten(1)[None]


def projected(x: Tensor, parts: tuple[nn.Linear, ...], heads: int) -> tuple[Tensor, ...]:
    """Return query, key and value (N, H, K) of x (1, N, D), or one tensor (N, 3, H, K) that holds them."""
    if _can_join(parts):
        return (_joined(x, *parts)[0].unflatten(-1, (3, heads, -1)),)
    return tuple(with_bias(x, part)[0].unflatten(-1, (heads, -1)) for part in parts)


def attended(tensors: tuple[Tensor, ...], spec: AttentionSpec, bias: Bias | None = None) -> Tensor:
    """Return the attention (N, H, K) of what `projected` returns."""
    if len(tensors) == 1:
        return attend_joined(tensors[0], spec, bias)
    q, k, v = tensors
    return attend(q, k, v, spec, bias)


def _of_chosen(x: Tensor, parts: tuple[nn.Linear, ...], chosen: Chosen) -> tuple[Tensor, ...]:
    """Return the queries (M, D) of the chosen tokens, and keys and values (N, D) of all."""
    query, *others = parts
    q = with_bias(x.index_select(1, chosen.tokens), query)[0]
    if _can_join(parts):
        return q, *_joined(x, *others)[0].chunk(2, dim=-1)
    return q, *(with_bias(x, part)[0] for part in others)


def spec_of(module: Any, n_tokens: int, scale: float, p: float, window: int | None = None) -> AttentionSpec:
    """Return how an attention module runs on so many hidden states; `p` is the share of its weights that are dropped.

    Raises ConfigError if it has no part in the running pass, or gets the hidden states of chosen tokens alone.
    """
    site: Site | None = module.__dict__.get("whet_site")
    position = None if site is None else site.placement.now
    if site is None or position is None:
        raise came_later(module)
    require_all(module, n_tokens, position)
    return AttentionSpec(
        position.cu_seqlens,
        scale,
        causal=site.placement.causal,
        drop=Drop.at(site, p, position),
        max_seqlen=position.max_seqlen,
        kernel=site.placement.kernel,
        key_counts=position.key_counts,
        window=window,
    )


def rate(attention: nn.Module, dropout: Any) -> float:
    """Return what this call drops of the weights, where the class hands `dropout.p` to the AttentionInterface.

    It reads the rate in training alone: an Identity may stand there in an evaluation.
    """
    return dropout.p if attention.training else 0.0


def rate_of_called(dropout: Any) -> float:
    """Return what this call drops of the weights, where the class calls the module: its own mode counts.

    Raises ConfigError if it may do more than drop, which a pass, that does not call it, would leave out.
    """
    if (why := why_more_than_dropout(dropout)) is not None:
        raise ConfigError(
            what="the dropout of an attention was changed after whet had prepared the model",
            got=why,
            why="whet drops weights inside its attention, and never calls the module",
            fix="change it first, and then call whet.optimize or make the Trainer; whet.optimize refuses such a model, "
            "and the Trainer runs it with its padding",
        )
    return getattr(dropout, "p", 0.0) if dropout.training else 0.0


def why_more_than_dropout(dropout: Any) -> str | None:
    """Return why a module does more than drop numbers, or nothing, in place of an attention's dropout."""
    if type(dropout) not in (nn.Dropout, PlacedDropout, nn.Identity):
        return f"the dropout of its attention is a {name_of(type(dropout))}"
    if instance_forward(dropout) is not None:
        return "the dropout of its attention has a forward of its own"
    return "the dropout of its attention has hooks" if has_own_hooks(dropout) else None


def _can_join(parts: tuple[nn.Linear, ...]) -> bool:
    for part in parts:
        if why_called(part, nn.Linear) is not None or part.bias is None or part.weight.dtype != parts[0].weight.dtype:
            return False
    return True


def _joined(x: Tensor, *linears: nn.Linear) -> Tensor:
    """Return the layers' results side by side: one product instead of several."""

    def together() -> Tensor:
        return torch.cat([part.weight for part in linears])

    weight = together()
    recompute.register(weight, together)
    return linear(x, weight, torch.cat([part.bias for part in linears]), [part.weight for part in linears])


def chosen_from(attention: nn.Module, position: BatchPosition | None) -> Chosen | None:
    """Return the chosen tokens if this attention is where they begin."""
    found = None if position is None else position.chosen
    return found if found is not None and found.begins_at is attention else None


def require_all(attention: nn.Module, n_tokens: int, position: BatchPosition) -> None:
    """Raise ConfigError if these are the hidden states of the chosen tokens alone: attention needs those of all."""
    if torch.compiler.is_compiling() or n_tokens == len(position.slots):
        return
    raise ConfigError(
        what="an attention runs behind the block that leaves tokens out",
        got=f"{type(attention).__name__} with the hidden states of {n_tokens} of {len(position.slots)} tokens",
        why="the encoder runs its last block more than once, or another block after it, which whet cannot see",
        fix='compute all tokens there: whet.optimize(model, last_block_tokens="all"), or last_block_tokens="all" in '
        "the TrainingArguments",
    )


def of_chosen(found: Tensor, attention: nn.Module, position: BatchPosition | None) -> Tensor:
    """Return an attention's output (1, N, D), or where the chosen tokens begin theirs alone, (1, M, D)."""
    chosen = chosen_from(attention, position)
    return found if chosen is None else found.index_select(1, chosen.tokens)


def attend_chosen(
    qkv: tuple[Tensor, Tensor, Tensor], spec: AttentionSpec, chosen: Chosen, bias: Bias | None = None
) -> Tensor:
    """Return the attention (M, H, K) of the chosen tokens' queries (M, H, K), on keys and values (N, H, K) of all.

    The other tokens' queries are zeros, and nobody reads their results: the operator finds each query, and its dropout
    mask, at its place among all tokens.
    """
    q, k, v = qkv
    every = q.new_zeros(k.shape[0], *q.shape[1:]).index_copy(0, chosen.tokens, q)
    return attend(every, k, v, spec, bias).index_select(0, chosen.tokens)
