"""Where the tokens of a padded batch go when it runs without most of its padding, and where they come back from."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from whet.config.fields import PaddingInLoss
from whet.data.batch import filled_length
from whet.data.padding import SAMPLES, offset_frac
from whet.kernels.batch_position import BatchPosition, DrawnPosition
from whet.on_host import sent


@dataclass(frozen=True)
class Layout:
    """A padded batch (B, T), packed: each row's real tokens, and behind them the padding tokens that are computed.

    `columns` (N,) says where in the flattened batch each packed token comes from, `ranks` (N,) which token of its row
    it is, real ones first. `key_counts` (rows,) is how many tokens of each row are real, and `row_lengths` (rows,) how
    many there are in all; what fills the batch up is a row more. `sources` (B, T) is the packed token whose state each
    place gets back. `sizes` (N,) is how many places each packed token stands for; None: no padding is computed.
    """

    columns: Tensor
    ranks: Tensor
    row_lengths: Tensor
    key_counts: Tensor
    sources: Tensor
    sizes: Tensor | None

    def on(self, device: torch.device) -> Layout:
        """Return the layout of a batch on this device. What says how many tokens there are stays on the CPU."""
        if self.columns.device == device:
            return self
        columns, ranks, sources = (sent(one, device) for one in (self.columns, self.ranks, self.sources))
        sizes = None if self.sizes is None else sent(self.sizes, device)
        return replace(self, columns=columns, ranks=ranks, sources=sources, sizes=sizes)

    def packed(self, column: Tensor) -> Tensor:
        """Return a column (B, T) as the packed batch has it, (1, N) int64."""
        return column.flatten().index_select(0, self.columns).long()[None]

    def position(self) -> BatchPosition:
        """Return the batch's position in the run; its masks follow torch's generator."""
        device = self.columns.device
        row_slots = torch.arange(len(self.row_lengths), dtype=torch.int32, device="cpu")
        slots = torch.from_numpy(np.repeat(row_slots.numpy(), self.row_lengths.numpy()))
        starts = nn.functional.pad(self.row_lengths.cumsum(0, dtype=torch.int32), (1, 0))
        return DrawnPosition(
            seed=0,
            step=0,
            slots=sent(slots, device),
            positions=self.ranks,
            cu_seqlens=sent(starts, device),
            row_slots=row_slots,
            max_seqlen=self.row_lengths.max().cpu(),
            key_counts=None if self.sizes is None else self.key_counts.cpu(),
            sizes=self.sizes,
        )

    def padded(self, states: Tensor) -> Tensor:
        """Return packed states (N, D) as (B, T, D): each place of padding has that of the token that stands for it.

        So the gradient of such a token is the sum over all places that it stands for.
        """
        return nn.functional.embedding(self.sources, states)


def scattered(tokens: Tensor, mask: Tensor) -> Tensor:
    """Return the states (N, D) of the real tokens under this mask (B, T) as (B, T, D), zeros at padding tokens.

    The mask is on the CPU. torch's masked_scatter would wait for a GPU in its backward pass, and be slower on a CPU.
    """
    places = sent(mask.flatten().nonzero()[:, 0], tokens.device)
    flat = tokens.new_zeros(mask.numel(), tokens.shape[-1]).index_copy(0, places, tokens[: len(places)])
    return flat.view(*mask.shape, -1)


def computing_in(dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager[object]:
    """Return the context in which products of an encoder compute in this dtype; None: as without whet."""
    if dtype is None:
        return nullcontext()
    return torch.autocast(device.type, None if dtype == torch.float32 else dtype, enabled=dtype != torch.float32)


def layout_of(mask: Tensor, amount: PaddingInLoss) -> Layout:
    """Return the layout of a batch under this mask (B, T), on the CPU, of real tokens; each row has at least one.

    A row's padding is split into equal stretches; of each, a token near the middle is computed.
    """
    n_rows, longest = mask.shape
    lengths = mask.sum(1)
    n_padding = longest - lengths
    most = {"none": 0, "sampled": SAMPLES, "all": longest}[amount]
    counts = n_padding.clamp(max=most)
    at = torch.arange(longest, device=mask.device).expand(n_rows, longest)
    order = mask.logical_not().int().argsort(dim=1, stable=True)  # columns, those of real tokens first
    computed = at < (lengths + counts)[:, None]
    number = at - lengths[:, None]
    begin, end = (_cut(place, n_padding, counts) for place in (number, number + 1))
    within = ((end - begin) * offset_frac(lengths.double())[:, None]).long()
    ranks = torch.where(number < 0, at, lengths[:, None] + begin + within)
    firsts = torch.arange(n_rows, device=mask.device)[:, None] * longest
    columns = firsts + order.gather(1, ranks.clamp(0, longest - 1))
    # torch would start its threads for these few numbers, which takes longer than a pass on a GPU
    kept = computed.numpy()
    columns, ranks = (torch.from_numpy(one.numpy()[kept]) for one in (columns, ranks))
    return _filled(columns, ranks, lengths, counts, _sources(mask, lengths, counts))


def layout_without_padding(mask: Tensor, first_tokens: Tensor | None) -> Layout:
    """Return the layout of a batch (B, T), on the CPU, of real tokens alone: they stay where they are, end to end.

    `first_tokens` (B, T) are those that begin a sequence; None: each row is one.
    """
    n_rows, longest = mask.shape
    every = torch.arange(mask.numel(), device=mask.device)
    if first_tokens is None:
        lengths, ranks = every.new_full((n_rows,), longest), every % longest
    else:
        starts = first_tokens.flatten().nonzero()[:, 0]
        lengths = starts.diff(append=starts.new_tensor([mask.numel()]))
        ranks = every - torch.from_numpy(np.repeat(starts.numpy(), lengths.numpy()))
    return _filled(every, ranks, lengths, torch.zeros_like(lengths), every.view(mask.shape))


def _cut(number: Tensor, n_padding: Tensor, counts: Tensor) -> Tensor:
    """Return where in a row's padding the stretch of this number begins."""
    return number * n_padding[:, None] // counts.clamp(min=1)[:, None]


def _sources(mask: Tensor, lengths: Tensor, counts: Tensor) -> Tensor:
    """Return for each place (B, T) the packed token that stands for it: a real one for itself."""
    starts = (lengths + counts).cumsum(0) - (lengths + counts)
    rank, padding = mask.cumsum(1) - 1, mask.logical_not().cumsum(1)
    stretch = (padding * counts[:, None] - 1) // (mask.shape[1] - lengths).clamp(min=1)[:, None]
    return starts[:, None] + torch.where(mask, rank, lengths[:, None] + stretch.clamp(min=0))


def _filled(columns: Tensor, ranks: Tensor, lengths: Tensor, counts: Tensor, sources: Tensor) -> Layout:
    n_tokens = len(columns)
    n_more = filled_length(n_tokens) - n_tokens
    row_lengths, key_counts = lengths + counts, lengths
    if n_more:
        row_lengths, key_counts = (nn.functional.pad(x, (0, 1), value=n_more) for x in (row_lengths, key_counts))
    has_padding = bool((key_counts != row_lengths).any())
    sizes = torch.bincount(sources.flatten(), minlength=n_tokens + n_more).float() if has_padding else None
    return Layout(
        columns=torch.cat([columns, columns[:n_more]]),
        ranks=nn.functional.pad(ranks.int(), (0, n_more)),
        row_lengths=row_lengths.int(),
        key_counts=key_counts.int(),
        sources=sources,
        sizes=sizes,
    )
