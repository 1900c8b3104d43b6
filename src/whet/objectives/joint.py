"""The cross entropy of start and end together, among the spans that end at or after their start."""

from __future__ import annotations

from torch import Tensor

from whet.kernels.cross_entropy import to_rows

_NOWHERE = -1e30
"""The logit of a place that is no token: finite, so that differences of such logits are no NaN."""


def joint_cross_entropy(start: Tensor, end: Tensor, labels: tuple[Tensor, Tensor], cu_seqlens: Tensor) -> Tensor:
    """Return -log P(first, last) of each row, (rows,) fp32, for rows that are packed in the logits (N,).

    P(i, j) is proportional to exp(start_i + end_j) for i <= j within the row, and 0 for other pairs. It is the joint
    part of the compound loss of Fajcik et al. 2021 (arXiv:2008.12804, section 3), with a sum as the score of a pair,
    which needs no weights of its own. `labels` are first and last (rows,) int64, positions within their row. Time and
    memory are linear in the tokens: sums over starts are cumulative.
    """
    starts, ends = (to_rows(side.float(), cu_seqlens, _NOWHERE) for side in (start, end))
    first, last = labels
    until = starts.logcumsumexp(dim=1)
    normaliser = (until + ends).logsumexp(dim=1)
    scores = starts.gather(1, first[:, None]) + ends.gather(1, last[:, None])
    return normaliser - scores.squeeze(1)
