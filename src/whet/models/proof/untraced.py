"""A block that leaves torch, numpy and Python as it found them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from whet.kernels.random import generators_kept


def generator_states() -> tuple[Any, ...]:
    """Return the states of the generators that a forward pass may draw from."""
    of_numpy: Any = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), of_numpy[1].tolist(), of_numpy[2:]


@contextmanager
def untraced() -> Iterator[None]:
    """Run the block in float32 with gradients, and restore all generators and modes after it."""
    dtype = torch.get_default_dtype()
    try:
        with (
            generators_kept(),
            torch.inference_mode(mode=False),
            torch.enable_grad(),
            torch.autocast("cpu", enabled=False),
            torch.device("cpu"),
        ):
            torch.set_default_dtype(torch.float32)
            yield
    finally:
        torch.set_default_dtype(dtype)
