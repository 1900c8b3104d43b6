"""Which modules of a model have a fused forward, and which of their submodules are called nevertheless."""

from torch import nn

from whet.models.binding import bound
from whet.models.family import Part, owner_of
from whet.models.fused.low_rank import layer_of
from whet.models.standard import learn, why_called


def part_of(module: nn.Module) -> Part | None:
    """Return the fused part that may take the place of the module's forward; None for any class but a family's own."""
    return _declared(module) if learn(type(module)) else None


def is_fused(module: nn.Module) -> bool:
    """Return whether the module's forward is a fused one now."""
    part = _declared(module)
    return part is not None and bound(module) is part.forward


def runs_always(module: nn.Module) -> bool:
    """Return whether the module's forward is one that it has wherever the model runs packed."""
    part = _declared(module)
    return part is not None and part.always and is_fused(module)


def ends_a_block(module: nn.Module) -> bool:
    """Return whether the result of the module's block is this module's result."""
    part = part_of(module)
    return part is not None and part.ends_block


def called(module: nn.Module) -> dict[str, str]:
    """Return which submodules of a fused module are called all the same, and why."""
    part, found = _declared(module), {}
    assert part is not None
    for path, standard in part.slots.items():
        slot = _slot(module, path)
        if slot is None:
            continue
        if (why := why_called(slot, standard)) is not None and layer_of(slot) is None:
            found[path] = why
    return found


def has_products(module: nn.Module) -> bool:
    """Return whether an operator multiplies by the weight of one of the module's linear layers."""
    part = _declared(module)
    if part is None or not is_fused(module):
        return False
    slots = ((_slot(module, path), standard) for path, standard in part.slots.items() if standard is nn.Linear)
    return any(slot is not None and why_called(slot, standard) is None for slot, standard in slots)


def _slot(module: nn.Module, path: str) -> nn.Module | None:
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


def _declared(module: nn.Module) -> Part | None:
    family = owner_of(type(module))
    return None if family is None else family.parts.get(type(module).__name__)
