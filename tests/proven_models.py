"""Tiny encoders of families without a file that run packed by proof, and batches for them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from odd_encoders import SIZES
from whet.log import logger
from whet.models.known import known

_WITHOUT_A_FILE = ("eurobert", "nomic_bert", "jina_embeddings_v3", "gte", "ernie", "data2vec-text")
PROVEN = tuple(name for name in _WITHOUT_A_FILE if name not in known())
"""One that gets a file is tested as a family."""


def proven_config(family: str, *, dropout: float = 0.0) -> Any:
    """Return the configuration of a tiny model of the family."""
    usual = AutoConfig.for_model(family).to_dict()
    rates = {
        name: dropout
        for name, value in usual.items()
        if ("dropout" in name or "pdrop" in name) and isinstance(value, float)
    }
    return AutoConfig.for_model(family, **SIZES, **rates)


def batch(*lengths: int, seed: int = 0) -> dict[str, Tensor]:
    """Return a batch padded on the right; its padding token is 0."""
    lengths = lengths or (9, 14, 5, 30)
    ids = torch.randint(4, 190, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(seed))
    mask = (torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


@contextmanager
def shown(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Let caplog see whet's log within the block."""
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.INFO, logger=logger.name):
            yield
    finally:
        logger.removeHandler(caplog.handler)
