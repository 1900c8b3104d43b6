"""The operators that models use between their matrix products."""

from torch import Tensor

from whet.kernels import reference
from whet.kernels.place import Site


def dropout(x: Tensor, p: float, site: Site) -> Tensor:
    """Return x (..., D) under the dropout mask of this site at the running place."""
    assert site.place is not None
    return reference.dropout(x, p, site.place, site.use())


def packed_attention(qkv: tuple[Tensor, Tensor, Tensor], *, scale: float, p: float, site: Site) -> Tensor:
    """Return the attention (N, H, K) of the running place's rows, each by itself, with dropout p on the weights."""
    assert site.place is not None
    return reference.packed_attention(qkv, scale, p, site.place, site.use())
