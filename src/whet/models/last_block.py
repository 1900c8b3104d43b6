"""Which tokens the last block of a packed encoder has to compute: those alone whose hidden states somebody reads.

Attention mixes the tokens of a row, so the last block needs keys and values of all of them. What follows works token by
token: queries, the output of attention, feed-forward and norms. A token that nobody reads needs none of these, and has
no gradient in them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from whet.kernels.batch_position import BatchPosition, Chosen
from whet.models import record
from whet.models.experts.settings import settings_of
from whet.models.family import Family
from whet.models.forwards import home_of, instance_forward, is_whets
from whet.models.packed import PackedModel, other_shape
from whet.models.standard import has_hooks, is_unchanged

_ON = "last block"
"""The entry in the record of a model whose last block may leave tokens out."""
_LARGEST_SHARE = 0.5
"""Above this share of the tokens, picking them out costs more than the others' work."""
_ROW_WISE = ("torch.nn.", "peft.", "whet.")
"""Packages whose layers may be in a block next to the family's own: each computes a token from that token alone."""


def switch_on(packed: PackedModel) -> bool:
    """Let passes of the model leave tokens out of the last block; return whether its family can."""
    if packed.family.stack is None or _ends_sparse(packed):
        return False
    record.keep(packed.module, _ON, True)
    return True


def switch_off(model: nn.Module) -> None:
    """Undo `switch_on`."""
    record.take(model, _ON)


def narrowed(packed: PackedModel, position: BatchPosition, tokens: Tensor) -> BatchPosition:
    """Return the position of a pass of which only the hidden states of `tokens` (M,) are read, in rising order.

    The position comes back as it was if the last block has to compute all tokens: because it is switched off, because a
    hook or a module of somebody else's might look at the others, or because few tokens would be left out.
    """
    if record.read(packed.module, _ON) is None or len(tokens) > _LARGEST_SHARE * len(position.slots):
        return position
    attention = _attention_of_last(packed)
    if attention is None:
        return position
    slots, positions = (one.index_select(0, tokens) for one in (position.slots, position.positions))
    return replace(position, chosen=Chosen(tokens, slots, positions, attention))


def read_states(states: Tensor, tokens: Tensor, position: BatchPosition) -> Tensor:
    """Return the hidden states (M, D) of the tokens, of what the encoder returned (1, N, D) or, narrowed, (1, M, D)."""
    if not position.is_of(*states.shape[:2]):
        raise other_shape(states, len(position.slots))
    done = position.chosen is not None and states.shape[1] == len(tokens)
    return states[0] if done else states[0].index_select(0, tokens)


def _ends_sparse(packed: PackedModel) -> bool:
    """Return whether the last block has experts: their balance is that of all tokens."""
    if settings_of(getattr(packed.module, "config", None)) is None:
        return False
    from whet.models.experts.layer import layers_of

    blocks = [module for module in packed.module.modules() if packed.family.is_block(module)]
    return bool(blocks) and bool(layers_of(blocks[-1]))


def _attention_of_last(packed: PackedModel) -> nn.Module | None:
    """Return the attention of the last block; None if a module there is not as whet knows it, or is watched.

    None too where that attention may run more than once in a pass: a module that stands twice in the encoder, or a
    forward of the encoder's that is none of its family's. An earlier run has to compute all tokens.
    """
    encoder: Any = packed.module.base_model
    family, path = packed.family, packed.family.stack
    assert path is not None
    above, holder = [encoder, *encoder._modules.values()], encoder
    for name in path.split("."):
        holder = getattr(holder, name, None)
        above.append(holder)
    if not isinstance(holder, nn.ModuleList) or not len(holder):
        return None
    if any(has_hooks(module) or not _runs_once(module, family) for module in above if module is not None):
        return None
    inside = list(holder[-1].modules())
    found = [module for module in inside if family.is_attention(module)]
    if len(found) != 1 or not all(_is_known(module, family) for module in inside):
        return None
    return found[0] if _count_in(encoder, found[0]) == 1 else None


def _count_in(encoder: nn.Module, wanted: nn.Module) -> int:
    """Return how often the module stands in the encoder, under any name."""
    count, left = 0, [encoder]
    while left:
        children = left.pop()._modules.values()
        count += sum(child is wanted for child in children)
        left.extend(child for child in children if child is not None)
    return count


def _runs_once(module: nn.Module, family: Family) -> bool:
    """Return whether the module's forward is the family's, torch's or whet's: these run each block in turn, once."""
    home = home_of(instance_forward(module) or type(module).forward)
    return home.startswith(("whet.", "torch.nn.", f"{family.package}.")) or home == family.package


def _is_known(module: nn.Module, family: Family) -> bool:
    """Return whether the module works token by token as whet knows it, and nobody looks at its results."""
    if has_hooks(module):
        return False
    own, cls = instance_forward(module), type(module)
    if own is not None:
        return is_whets(own)
    if cls.__name__ in family.parts and family.owns(cls):
        return False  # without its fused forward it would add the hidden states of all tokens
    return cls.__module__.startswith(_ROW_WISE) or is_unchanged(module)
