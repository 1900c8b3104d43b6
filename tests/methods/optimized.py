"""Tiny models as `whet.optimize` leaves them, padded batches for them, and what a loop makes of both."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import whet
from tiny import tiny_model
from whet.models.known import known

Inputs = dict[str, Tensor]


def inputs(*lengths: int, seed: int = 0) -> Inputs:
    ids = torch.randint(10, 190, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(seed))
    mask = (torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}  # the padding token of these models is 0


def optimized(family: str = "bert", **changes: Any) -> Any:
    if known()[family].skips_padding:
        changes |= {"pad_token_id": 0}
    return whet.optimize(tiny_model(family, **changes)).train()


def logits(model: Any, batch: Inputs) -> Tensor:
    out = model(**batch)
    return torch.stack([out.start_logits, out.end_logits])


def gradients(model: Any, batch: Inputs) -> tuple[Tensor, ...]:
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.autograd.grad(logits(model, batch).square().mean(), weights)
