"""Fused operators between the matrix products of a packed model, on a CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from whet.card import Card
from whet.config.methods import MethodSettings
from whet.kernels import allocator
from whet.kernels.embedding import RowGradient
from whet.kernels.library import library
from whet.methods.seam import Applied, Cost, Stage
from whet.models import record
from whet.models.forwards import bind, instance_forward, is_whets
from whet.models.fused import parts
from whet.models.fused.layers import GRADIENT, PLACEMENT
from whet.models.fused.parts import part_of
from whet.models.packed import PackedModel, packed_model
from whet.models.view import ModelView

CARD = Card(
    name="operators",
    asked_by="default",
    does="Native operators compute what lies between a packed model's matrix products, on a CPU.",
    improves="both",
    same_result="yes",
    hurts="Never so far (WHET_KERNELS=reference).",
    source="each operator names its own, for example Dao et al. 2022 for attention",
    wanted_by="operators",
    page="speed.md#native-operators",
)
STAGE = Stage.OPERATORS


def possible(packed: PackedModel) -> bool:
    """Return whether the operators can serve this model: it is on the CPU and the native library is there."""
    on_cpu = all(parameter.device == torch.device("cpu") for parameter in packed.module.parameters())
    return on_cpu and library() is not None


def would_run(view: ModelView, settings: MethodSettings) -> bool:
    """Return whether the model would run on these operators with these settings."""
    packed = packed_model(view.model)
    return settings.operators is not None and packed is not None and possible(packed)


def apply(view: ModelView, settings: MethodSettings) -> Applied | None:
    """Put whet's operators into the model. Weights, their names and the saved form stay as they are.

    A module that is more than its class, because of a hook or an adapter for example, is still called: each pass checks
    again.
    """
    packed, native = packed_model(view.model), library()
    if settings.operators is None or packed is None or native is None or not possible(packed):
        return None
    allocator.keep_freed_memory()
    changed = _put(packed, row_gradients=settings.row_gradients)
    record.keep(view.model, CARD.name, changed)
    return Applied(CARD.name, in_words(changed, native.isa, called(packed)), changed)


def _put(packed: PackedModel, *, row_gradients: bool) -> dict[str, int]:
    """Replace the forwards; return how many of each class. `row_gradients`: see the settings of this name."""
    changed: Counter[str] = Counter()
    for module in packed.module.modules():
        part = part_of(module)
        if part is not None and ("forward" not in module.__dict__ or parts.is_fused(module)):
            module.__dict__[PLACEMENT] = packed.placement
            module.forward = bind(part.forward, module)
            changed[type(module).__name__] += 1
    if packed.family.proven:
        changed.update(parts.put_generic(packed.module, packed.placement))
    if row_gradients:
        _keep_rows(packed)
    return dict(changed)


def _keep_rows(packed: PackedModel) -> nn.Module | None:
    """Let the word table keep its gradient between steps; return the table, None if it has to make new ones."""
    words: Any = packed.module.base_model.get_input_embeddings()  # pyright: ignore
    if type(words) is not nn.Embedding or GRADIENT in words.__dict__ or not _trained_alone(words.weight, packed.module):
        return None
    setattr(words, GRADIENT, RowGradient(words.weight))
    return words


@contextmanager
def row_gradients_of(models: Iterable[nn.Module]) -> Iterator[None]:
    """Let the word tables of these models, if they run fused, keep their gradients between the steps in the block."""
    packed = [one for model in models if changed_in(model) and (one := packed_model(model)) is not None]
    tables = [words for one in packed if (words := _keep_rows(one)) is not None]
    try:
        yield
    finally:
        for words in tables:
            words.__dict__.pop(GRADIENT, None)


def called(packed: PackedModel) -> dict[str, str]:
    """Return which modules the operators could take the place of and do not, as the model is now, and why."""
    found = {}
    for name, module in packed.module.named_modules():
        if parts.is_generic(module):
            continue
        if PLACEMENT in module.__dict__ and _is_whets(module):
            found |= {f"{name}.{path}": why for path, why in parts.called(module).items() if _computes(module, path)}
        elif part_of(module) is not None and not _is_whets(module):
            found[name] = "has a forward of its own"
    return found


def _computes(module: nn.Module, path: str) -> bool:
    """Return whether the submodule does anything: experts leave an Identity where a dense layer was."""
    return not isinstance(module.get_submodule(path), nn.Identity)


def _is_whets(module: nn.Module) -> bool:
    """Return whether the module has a forward that whet gave it, or none of its own."""
    forward = instance_forward(module)
    return forward is None or is_whets(forward)


def changed_in(model: nn.Module) -> dict[str, int] | None:
    """Return how many modules of each class run fused; None if the operators are not in this model."""
    return record.read(model, CARD.name)


def in_words(changed: Mapping[str, int], isa: str, called: Mapping[str, str]) -> str:
    """Return what runs fused, and which modules inside are called as they are."""
    text = f"fused operators in {sum(changed.values())} modules ({isa})"
    return f"{text}, but not in {_called_in_words(called)}" if called else text


def _called_in_words(called: Mapping[str, str]) -> str:
    """Return modules that are called, in short: `query, value (24: is a Linear of peft)`."""
    by_reason: dict[str, list[str]] = {}
    for name, why in called.items():
        by_reason.setdefault(why, []).append(name.rpartition(".")[2])
    return "; ".join(f"{', '.join(dict.fromkeys(names))} ({len(names)}: {why})" for why, names in by_reason.items())


def restore(view: ModelView) -> None:
    """Take the operators out again, exactly."""
    if record.take(view.model, CARD.name) is None:
        return
    parts.take_generic(view.model)
    for module in view.model.modules():
        module.__dict__.pop(GRADIENT, None)
        if parts.runs_always(module):
            continue
        module.__dict__.pop(PLACEMENT, None)
        if parts.is_fused(module):
            del module.forward


def cost(view: ModelView, settings: MethodSettings) -> Cost:
    """Return what the blocks of a packed model keep more, or less, than on torch's operators."""
    if not would_run(view, settings):
        return Cost()
    from whet.methods import counting

    settings = replace(settings, checkpointing=None)
    fused, plain = (counting.kept(view, settings, operators=operators) for operators in (True, False))
    return Cost(
        activation_bytes=fused.fixed - plain.fixed, activation_bytes_per_token=fused.per_token - plain.per_token
    )


def _trained_alone(weight: Tensor, module: nn.Module) -> bool:
    """Return whether the weight is trained, and no output layer shares it: its gradient would have no zero rows."""
    holders = [part for part in module.modules() if any(own is weight for own in part.parameters(recurse=False))]
    return weight.requires_grad and len(holders) == 1
