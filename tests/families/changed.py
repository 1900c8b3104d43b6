"""Models that whet has changed, by its call or by a Trainer, and what they answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

import engine
import whet
from tiny import Pad, arguments, tiny_config, tiny_model, tiny_rows


def batch_of(family: str = "bert") -> dict[str, Tensor]:
    batch = Pad(tiny_config(family).pad_token_id or 0)([tiny_rows(4, family)[n] for n in range(4)])
    return {name: value for name, value in batch.items() if "positions" not in name}


def logits(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the start logits of real tokens."""
    return model(**batch).start_logits[batch["attention_mask"].bool()]


def changed_by(how: str, family: str, folder: Path) -> Any:
    """Return a model that whet has changed, by its call or by a Trainer."""
    model = tiny_model(family, dropout=0.1)
    if how == "optimize":
        return whet.optimize(model)
    changes = {"gradient_checkpointing": True} if how == "checkpointing" else {}
    args = arguments(folder, max_steps=1, **changes)
    trainer = engine.Trainer(model=model, args=args, train_dataset=tiny_rows(4, family))
    trainer.train()
    return model
