"""The mean over the ranks of tensors that each rank has changed in its own way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from whet.dist.group import Group

_BUCKET_ELEMENTS = 8 << 20
"""Elements that travel at a time: 32 MiB."""


@torch.no_grad()
def averaged(group: Group, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the mean over the ranks of each tensor, in new memory; all ranks get the same bits.

    Numbers are exchanged and summed in float32. The results are to be taken one after the other, on all ranks. A few
    of `tensors` are held at a time.
    """
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and sum(one.numel() for one in bucket) + tensor.numel() > _BUCKET_ELEMENTS:
            yield from _averaged(group, bucket)
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield from _averaged(group, bucket)


def _averaged(group: Group, bucket: Sequence[Tensor]) -> Iterator[Tensor]:
    flat = group.sum_of(torch.cat([one.detach().reshape(-1).float() for one in bucket])) / group.n_ranks
    parts = flat.split([one.numel() for one in bucket])
    for one, part in zip(bucket, parts, strict=True):
        yield part.reshape(one.shape).to(one.dtype, copy=True)
