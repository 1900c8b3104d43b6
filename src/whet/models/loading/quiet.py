"""Keep transformers' own bars and reports off the terminal while whet does the talking."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers.utils import logging

_lock = threading.Lock()
_blocks: list[tuple[int, bool]] = []
"""What was set before the first of the blocks that run now, one entry a block: they may run in several threads."""


@contextmanager
def quiet() -> Iterator[None]:
    """Run the block without progress bars and warnings of transformers; both are as before afterwards."""
    with _lock:
        _blocks.append(_blocks[0] if _blocks else (logging.get_verbosity(), logging.is_progress_bar_enabled()))
        logging.set_verbosity_error()
        logging.disable_progress_bar()
    try:
        yield
    finally:
        with _lock:
            verbosity, bars = _blocks.pop()
            if not _blocks:
                logging.set_verbosity(verbosity)
                if bars:
                    logging.enable_progress_bar()


class Undrawn(TorchFunctionMode):
    """Does not draw the first weights of modules on the meta device, which have none to draw.

    torch has Python code for this device that imports sympy.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return what the function returns; a tensor on the meta device as it is from those of torch.nn.init."""
        named = kwargs or {}
        tensor = args[0] if args else named.get("tensor")
        if isinstance(tensor, torch.Tensor) and tensor.is_meta:
            if getattr(function, "__module__", None) == "torch.nn.init":
                return tensor
            if function is torch.empty_like and tensor.is_contiguous() and named.keys() == {"device"}:
                return torch.empty(tensor.shape, dtype=tensor.dtype, **named)
        return function(*args, **named)
