"""Prepare a model for packed batches: its attention learns about rows, its dropouts become functions of their place."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from whet.data.batch import Batch
from whet.data.padding import PaddingTokens
from whet.kernels.fused import dropout
from whet.kernels.place import Kernel, Place, Placement, Site
from whet.kernels.reference import Drop
from whet.models import attention
from whet.models.families import Family, family_of


class PlacedDropout(nn.Dropout):
    """Dropout whose mask is a function of (seed, step, site, row, position, channel); plain dropout outside of whet."""

    def __init__(self, plain: nn.Dropout, site: Site) -> None:
        super().__init__(plain.p)
        self.site = site
        self.replaced = (plain,)  # in a tuple, so that it is no submodule
        self.train(plain.training)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        place = self.site.place
        if place is None or math.prod(x.shape[:-1]) != len(place.slots):
            return nn.functional.dropout(x, self.p)
        return dropout(x, Drop(self.p, place, self.site.use()))

    def extra_repr(self) -> str:
        return f"p={self.p}, site={self.site.number}"


@dataclass(frozen=True)
class PackedModel:
    """A transformers model that reads packed batches; `module` still answers padded calls of its own kind."""

    module: nn.Module
    family: Family
    placement: Placement
    attention_before: str
    """The attention implementation that the model came with."""

    @property
    def position_offset(self) -> int:
        """The first position id of a row."""
        return self.family.position_offset(self.module)

    def __call__(self, batch: Batch, *, seed: int, step: int) -> object:
        """Return the model's output for the packed batch; its token dims are (1, N)."""
        with self.placement.at(place_of(batch, seed=seed, step=step)):
            return self.module(**batch.inputs)


def place_of(batch: Batch, *, seed: int, step: int) -> Place:
    """Return the place of a packed batch in the run; what fills it up is a row more."""
    assert batch.row_starts is not None
    assert batch.positions is not None
    row_starts = with_filling(batch.row_starts, batch.n_in_rows, batch.n_computed)
    row_slots = torch.arange(batch.first_slot, batch.first_slot + len(row_starts) - 1, dtype=torch.int32)
    on_device = row_slots.to(batch.positions.device, non_blocking=True)  # a copy that waits would stall the GPU
    slots = on_device.repeat_interleave(row_starts.diff(), output_size=batch.n_computed)
    return Place(
        seed=seed,
        step=step,
        slots=slots,
        positions=batch.positions,
        row_starts=row_starts,
        row_slots=row_slots,
        longest=torch.tensor(max(batch.longest, batch.n_computed - batch.n_in_rows)),
        key_counts=None if batch.padding is None else _key_counts(batch, batch.padding),
    )


def _key_counts(batch: Batch, padding: PaddingTokens) -> Tensor:
    """Return how many tokens of each row are keys; what fills the batch up is a row without padding."""
    n_more = batch.n_computed - batch.n_in_rows
    return nn.functional.pad(padding.key_counts, (0, 1), value=n_more) if n_more else padding.key_counts


def with_filling(row_starts: Tensor, n_tokens: int, n_filled: int) -> Tensor:
    """Return where rows begin (rows + 1,), with one row more where n_filled token places are more than n_tokens."""
    return row_starts if n_filled == n_tokens else nn.functional.pad(row_starts, (0, 1), value=n_filled)


def prepare(model: nn.Module, kernel: Kernel = "auto") -> PackedModel | None:
    """Change the model, once, so that it can run packed; None (and no change) where its family is not known.

    Weights, their names and the saved form stay as they are. `kernel` says what its attention runs on a GPU.
    """
    family = family_of(model)
    if family is None:
        return None
    attention.register()
    before = str(model.config._attn_implementation)  # pyright: ignore[reportAttributeAccessIssue]
    placement = Placement(kernel, outside=before)
    _place_sites(model, family, placement)
    model.set_attn_implementation(attention.NAME)  # pyright: ignore[reportCallIssue]
    return PackedModel(model, family, placement, before)


def release(packed: PackedModel) -> None:
    """Undo `prepare`, exactly."""
    for parent in packed.module.modules():
        parent.__dict__.pop(attention.SITE, None)
        for name, child in list(parent.named_children()):
            if isinstance(child, PlacedDropout):
                child.replaced[0].train(child.training)
                setattr(parent, name, child.replaced[0])
    packed.module.set_attn_implementation(packed.attention_before)  # pyright: ignore[reportCallIssue]


def _place_sites(model: nn.Module, family: Family, placement: Placement) -> None:
    """Number every attention and every dropout in the order of the model's modules."""
    holders = [module for module in model.modules() if type(module).__name__ in family.attention]
    dropouts = [
        (parent, name, child.replaced[0] if isinstance(child, PlacedDropout) else child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Dropout | PlacedDropout)
    ]
    n_sites = len(holders) + len(dropouts)
    for number, holder in enumerate(holders):
        setattr(holder, attention.SITE, Site(placement, number, n_sites))
    for number, (parent, name, plain) in enumerate(dropouts, start=len(holders)):
        setattr(parent, name, PlacedDropout(plain, Site(placement, number, n_sites)))
