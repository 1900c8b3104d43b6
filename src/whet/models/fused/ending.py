"""How a block ends: dropout, residual and norm behind its last product, which a checkpoint may leave out of its block.

Left out, the norm keeps its own sum for backward, and backward need not compute the block's last product again: nobody
reads it. The next block's input is the norm of that sum, so that no more is kept than without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

from whet.kernels.batch_position import Drop, running
from whet.kernels.norm import Norm, add_norm


@dataclass(frozen=True)
class Ending:
    """What comes behind a block's last product."""

    linear_bias: Tensor | None
    norm: Norm
    drop: Drop | None

    def finish(self, product: Tensor, residual: Tensor) -> Tensor:
        """Return LayerNorm(residual + dropout(product + bias))."""
        product = product.to(residual.dtype)
        return add_norm(product, residual, self.norm, linear_bias=self.linear_bias, drop=self.drop)[0]


Taken = list[tuple[Ending, Tensor]]
_TAKEN: ContextVar[tuple[Taken, object] | None] = ContextVar("whet_taken_endings", default=None)
"""Where the end of the running block goes, and the pass that the block belongs to."""


def end(product: Tensor, residual: Tensor, ending: Ending) -> Tensor:
    """Return the block's result, or within `taking` its last product, the rest being left to the taker."""
    found = None if torch.compiler.is_compiling() else _TAKEN.get()  # compiled blocks have their ends
    if found is None or found[1] is not running():  # a hook in the block may have started a pass of another model
        return ending.finish(product, residual)
    found[0].append((ending, residual))
    return product


@contextmanager
def taking() -> Iterator[Taken]:
    """Run a block without its end; yields where the end and its residual will be."""
    taken: Taken = []
    token = _TAKEN.set((taken, running()))
    try:
        yield taken
    finally:
        _TAKEN.reset(token)


def without(run: Callable[..., Tensor], found: list[Ending]) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Return the block `run` without its end: it gives the last product and the residual; the end goes to `found`.

    A block that keeps its end, because one of its modules must be called, gives its result and None.
    """

    def part(*args: object, **options: object) -> tuple[Tensor, Tensor | None]:
        with taking() as taken:
            product = run(*args, **options)
        found[:] = [ending for ending, _ in taken]
        return product, taken[0][1] if taken else None

    return part
