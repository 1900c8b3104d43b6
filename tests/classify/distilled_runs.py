"""Distillation by its formula: a plain loop with padded rows, transformers' models, and Hinton's loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax

Logits = Callable[[Any, Mapping[str, Tensor]], Sequence[tuple[Tensor, Tensor]]]
"""Returns pairs of logits (rows, C) and targets (rows,), whose losses are averaged."""


def by_formula(
    student: Any, teacher: Any, batch: Mapping[str, Tensor], logits: Logits, how: Mapping[str, float]
) -> list[float]:
    """Return the losses of ten steps on one batch: (1 - a) CE + a T^2 KL, Hinton et al. 2015, section 2."""
    optimizer = torch.optim.AdamW(student.parameters(), lr=how["rate"], eps=1e-4, weight_decay=0.0)
    temperature, alpha, found = how["temperature"], how["alpha"], []
    with torch.no_grad():
        wanted = logits(teacher.eval(), batch)
    student.train()
    for _ in range(10):
        losses = []
        for (ours, targets), (theirs, _) in zip(logits(student, batch), wanted, strict=True):
            log_p, log_q = (log_softmax(one.double() / temperature, -1) for one in (theirs, ours))
            soft = temperature**2 * (log_p.exp() * (log_p - log_q)).sum(-1).mean()
            losses.append((1 - alpha) * cross_entropy(ours, targets) + alpha * soft)
        loss = torch.stack(losses).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found
