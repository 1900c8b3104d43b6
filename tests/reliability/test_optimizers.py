"""B10: every optimizer that whet builds: saved, killed and resumed, it ends bitwise as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from forked_runs import SOAK  # noqa: F401 - it knows where tiny_runs is
from harness import Server, same_folder
from safetensors.torch import load_file
from tiny_runs import Toy, assert_same_weights, toy_trainer
from trials import OUT

from whet.config.optimizer_names import OPTIONS
from whet.errors import EXIT_BAD_CONFIG
from whet.store import find

pytestmark = pytest.mark.reliability
_LAST = Path(OUT, find.folder_name(6))
_PACKED = {"adamw_whet_8bit", "adamw_bnb_8bit", "adamw_8bit", "adamw_torch_8bit", "adamw_torch_4bit"}
"""Optimizers that keep moments in bytes."""


@pytest.mark.parametrize("optim", OPTIONS)
def test_optimizer_killed_and_resumed_is_bitwise_the_same(server: Server, tmp_path: Path, optim: str) -> None:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    code = server.run("train_with", folder=str(tmp_path / "whole"), optim=optim)
    if code == EXIT_BAD_CONFIG:
        pytest.skip(f"{optim} is refused here: {(tmp_path / 'whole' / 'said.json').read_text('utf-8')[:200]}")
    assert code == 0
    assert server.run("train_with", folder=str(tmp_path / "killed"), optim=optim, die=3) == -9
    assert server.run("train_with", folder=str(tmp_path / "killed"), optim=optim, asked="auto") == 0
    assert same_folder(tmp_path / "whole" / _LAST, tmp_path / "killed" / _LAST) == []
    moments = tmp_path / "whole" / _LAST / "optimizer.safetensors"
    kinds = {tensor.dtype for tensor in load_file(moments).values()} if moments.exists() else set()  # SGD has none
    assert (torch.uint8 in kinds or torch.int8 in kinds) == (optim in _PACKED), kinds


@pytest.mark.parametrize("kind", ["AdamW8bit"])
def test_optimizer_of_torchao_that_the_user_made_is_saved_too(tmp_path: Path, kind: str) -> None:
    made = pytest.importorskip("torchao.optim", reason="torchao is missing")

    def train(folder: Path, steps: int, asked: Any = None) -> Any:
        model = Toy()
        model.hidden, model.head = torch.nn.Linear(4, 4096), torch.nn.Linear(4096, 1)
        model.norm = torch.nn.LayerNorm(4096)
        torch.manual_seed(0)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        optimizer = getattr(made, kind)(model.parameters(), lr=1e-2)
        trainer = toy_trainer(
            folder,
            model=model,
            optimizers=(optimizer, None),
            max_steps=steps,
            save_strategy="steps",
            save_steps=2,
            lr_scheduler_type="constant",
        )
        trainer.train(resume_from_checkpoint=asked)
        return trainer

    whole = train(tmp_path / "whole", 4)
    train(tmp_path / "parts", 2)
    assert_same_weights(train(tmp_path / "parts", 4, "auto").model, whole.model)
