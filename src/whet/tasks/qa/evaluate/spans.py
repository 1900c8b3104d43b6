"""The best starts and ends of every window of a packed batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import numpy as np
import torch
from torch import Tensor

from whet.tasks.qa.types import SpanScores


def top_spans(start_logits: Tensor, end_logits: Tensor, cu_seqlens: Tensor | np.ndarray, k: int) -> SpanScores:
    """Return the k likeliest starts and ends of each row, best first; the lowest index among equals.

    The logits are (N,), rows end to end without padding, as `cu_seqlens` (rows + 1,) cuts them; no row is empty.
    All tokens of a row compete, not only those of the context: the guides' script (`utils_qa.py`) drops the others
    after the choice, and so does `decode`. Padding never competes, so packing cannot change the choice.
    """
    starts = torch.as_tensor(cu_seqlens, dtype=torch.int64, device=start_logits.device)
    lengths = starts.diff()
    padded = _padded(torch.stack([start_logits, end_logits]).detach().float(), starts, at_least=k)  # (2, rows, T)
    # A stable sort, not topk: the choice of topk among equal logits is undefined and differs by device.
    # Padding is last in its row, so a real token with a logit of -inf still comes before it.
    logit, index = padded.sort(dim=-1, descending=True, stable=True)
    logit, index = logit[..., :k], index[..., :k]
    index = index.masked_fill(index >= lengths[:, None], -1)
    null = padded[:, :, 0]
    return SpanScores(
        start_index=index[0].cpu().numpy(),
        start_logit=logit[0].cpu().numpy(),
        end_index=index[1].cpu().numpy(),
        end_logit=logit[1].cpu().numpy(),
        null_start=null[0].cpu().numpy(),
        null_end=null[1].cpu().numpy(),
    )


def concat(batches: Sequence[SpanScores]) -> SpanScores:
    """Return the scores of all batches, one after the other; there is at least one batch, and all have the same k."""
    return SpanScores(
        **{
            column.name: np.concatenate([getattr(batch, column.name) for batch in batches])
            for column in fields(SpanScores)
        }
    )


def _padded(logits: Tensor, starts: Tensor, *, at_least: int) -> Tensor:
    """Return (2, rows, T) with -inf after each row's tokens; T is the longest row, at least `at_least`."""
    lengths = starts.diff()
    rows, n_tokens = len(lengths), logits.shape[1]
    assert int(starts[-1]) == n_tokens, "cu_seqlens must cover the logits"
    width = max(at_least, int(lengths.max()) if rows else 0)
    row = torch.repeat_interleave(torch.arange(rows, device=logits.device), lengths, output_size=n_tokens)
    column = torch.arange(n_tokens, device=logits.device) - starts[row]
    padded = logits.new_full((2, rows, width), float("-inf"))
    padded[:, row, column] = logits
    return padded
