"""Refuses operations of torch that may differ from run to run, while a Trainer with full_determinism works."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar, cast

import torch

from whet.log import logger

_Method = TypeVar("_Method", bound=Callable[..., Any])
_ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "FLASH_ATTENTION_DETERMINISTIC": "1"}
"""Variables that GPU libraries read; those that are set already keep their values."""


def honoured(method: _Method) -> _Method:
    """Return the method of a Trainer, run as its `args.full_determinism` says."""

    @functools.wraps(method)
    def run(trainer: Any, *given: Any, **named: Any) -> Any:
        with _deterministic() if trainer.args.full_determinism else nullcontext():
            return method(trainer, *given, **named)

    return cast(_Method, run)


@contextmanager
def _deterministic() -> Iterator[None]:
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
