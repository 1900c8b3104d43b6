"""The line about weights that had no gradient in the first step: what it names, and that it is logged once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from tiny import arguments
from tiny_decoders import collate, tiny_decoder, token_rows, trainer_of

IN_BACKWARD: dict[str, Any] = {"optimizer_in_backward": True, "max_grad_norm": 0.0}
WAYS = pytest.mark.parametrize("way", [{}, IN_BACKWARD], ids=["after backward", "in backward"])


class Some(nn.Module):
    """Reads one of its two layers; the first `n_broken` losses are not numbers."""

    def __init__(self, n_broken: int = 0) -> None:
        super().__init__()
        self.read, self.unread = nn.Linear(4, 1), nn.Linear(4, 1)
        self._n_broken = n_broken

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        loss = (self.read(x).squeeze(-1) - labels).square().mean()
        self._n_broken -= 1
        return {"loss": loss * float("nan") if self._n_broken >= 0 else loss}


def some(folder: Path, model: nn.Module, optimizer: Any = None, **settings: Any) -> engine.Trainer:
    rows = [{"x": torch.full((4,), float(n)), "labels": torch.tensor(float(n))} for n in range(8)]
    return engine.Trainer(model, arguments(folder, **settings), train_dataset=rows, optimizers=(optimizer, None))


def unread_llama() -> Any:
    """A model whose loss does not read one of its layers, as the pooler of many encoders."""
    model = tiny_decoder("llama")
    model.model.unread = nn.Linear(4, 4)
    return model


def named(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The weights that each line since the last call names."""
    begins = "no gradient in the first step, as the loss does not read them: "
    found = [one.removeprefix(begins) for one in caplog.messages if one.startswith(begins)]
    caplog.clear()
    return found


@pytest.fixture(autouse=True)
def logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="whet")


@pytest.mark.parametrize("changes", [{}, {"precision": "bf16"}, {"gradient_checkpointing": True}, {"padded": True}])
@WAYS
def test_line_names_the_weights_that_the_loss_does_not_read(
    way: dict[str, Any], changes: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The training continues without them. Packed, the embeddings' gradient does not come through autograd."""
    if "padded" in changes:
        args = arguments(tmp_path, max_steps=3, attn_implementation="sdpa", **way)
        engine.Trainer(unread_llama(), args, collate, token_rows(8)).train()
    else:
        trainer_of(tmp_path, unread_llama(), token_rows(8), max_steps=3, **way, **changes).train()
    assert named(caplog) == ["model.unread.bias, model.unread.weight"]


@WAYS
def test_no_line_for_a_model_whose_loss_reads_all(
    way: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = unread_llama()
    model.model.unread.requires_grad_(False)
    trainer_of(tmp_path, model, token_rows(8), max_steps=2, **way).train()
    assert named(caplog) == []


@WAYS
def test_second_training_logs_again_and_leaves_no_hooks(
    way: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = some(tmp_path, Some(), max_steps=2, **way)
    for _ in range(2):
        trainer.train()
        assert named(caplog) == ["unread.bias, unread.weight"]
    assert not any(weight._post_accumulate_grad_hooks for weight in trainer.model.parameters())


@WAYS
def test_resumed_training_logs_nothing(way: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its first step is not the first of all; the line is in the log of the run that took that one."""
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, **way}
    trainer_of(tmp_path, unread_llama(), token_rows(8), **saving).train()
    assert len(named(caplog)) == 1
    trainer = trainer_of(tmp_path, unread_llama(), token_rows(8), **saving)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert trainer.state.global_step == 4
    assert named(caplog) == []


@WAYS
def test_steps_that_are_not_applied_are_waited_for(
    way: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With the optimizer in the backward pass a gradient that is not finite is skipped, but it has arrived."""
    some(tmp_path, Some(n_broken=2), max_steps=2, **way).train()
    assert named(caplog) == []
    some(tmp_path, Some(n_broken=2), max_steps=4, **way).train()
    assert named(caplog) == ["unread.bias, unread.weight"]


@WAYS
def test_weight_that_a_given_optimizer_leaves_out_is_not_named(
    way: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Some()
    optimizer = torch.optim.SGD([model.read.weight, *model.unread.parameters()], lr=0.01)
    some(tmp_path, model, optimizer, max_steps=2, **way).train()
    assert named(caplog) == ["unread.bias, unread.weight"]
