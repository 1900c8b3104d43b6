"""Refuses operations of torch that may differ from run to run, while `full_determinism` asks for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from whet.log import logger

_ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "FLASH_ATTENTION_DETERMINISTIC": "1"}
"""Variables that GPU libraries read; those that are set already keep their values."""


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Refuse such operations in the block, if that is wanted."""
    if not wanted:
        yield
        return
    logger.info("full_determinism: operations of torch that may differ from run to run are refused")
    was, warn_only = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn
    kept = cudnn.deterministic, cudnn.benchmark
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warn_only)
        cudnn.deterministic, cudnn.benchmark = kept
