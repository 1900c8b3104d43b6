"""Hooks within a block that is computed again may call the block's own modules: they get what these give elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import engine
from tiny import arguments, losses, tiny_model, tiny_rows

ENDS = {"bert": "bert.encoder.layer.1.output", "electra": "electra.encoder.layer.0.output"}
INSIDE = {"bert": "bert.encoder.layer.1.intermediate", "electra": "electra.encoder.layer.0.intermediate"}


def run(family: str, folder: Path, *, checkpoints: bool) -> tuple[list[float], list[Tensor]]:
    """Train with a hook that calls the end of its block; return the losses, and what the hook saw."""
    model, seen = tiny_model(family), []
    end = model.get_submodule(ENDS[family])

    def look(module: Any, given: tuple[Tensor], out: Tensor) -> None:
        with torch.no_grad():
            seen.append(end(out, given[0]))

    model.get_submodule(INSIDE[family]).register_forward_hook(look)
    args = arguments(folder, gradient_checkpointing=checkpoints, max_steps=3, precision="fp32")
    trainer = engine.Trainer(model, args, train_dataset=tiny_rows(12, family))
    trainer.train()
    return losses(trainer), seen


@pytest.mark.parametrize("family", ENDS)
def test_a_hook_may_call_the_end_of_its_block_under_checkpointing(family: str, tmp_path: Path) -> None:
    wanted, calls = run(family, tmp_path / "plain", checkpoints=False)
    found, calls_again = run(family, tmp_path / "again", checkpoints=True)
    assert found == pytest.approx(wanted, rel=1e-5)  # float32 sums in another order
    torch.testing.assert_close(calls_again[0], calls[0], rtol=0, atol=1e-5)
