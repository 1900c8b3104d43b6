"""A step inside backward: the weights of the usual step, and never the gradients of all parameters at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from optimizer_runs import cases
from torch import Tensor, nn
from transformers import BertConfig, BertForQuestionAnswering, TrainerCallback

import engine
from whet.config.optimizer_names import names
from whet.errors import ConfigError, NonFiniteError
from whet.optim.in_backward import InBackward

_USUAL: dict[str, Any] = {
    "use_cpu": True, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "save_strategy": "no", "max_steps": 6,
    "weight_decay": 0.1, "max_grad_norm": 0.0, "logging_steps": 1,
}  # fmt: skip


class Deep(nn.Module):
    """Learns y = sum(x) through a few layers of one size."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)), nn.LayerNorm(8), nn.Linear(8, 1))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.layers(x).squeeze(-1) - labels).square().mean()}


def rows(n: int = 16) -> list[dict[str, Tensor]]:
    x = torch.randn(n, 8, generator=torch.Generator().manual_seed(7))
    return [{"x": row, "labels": row.sum()} for row in x]


def run(folder: Path, *, model: nn.Module | None = None, data: Any = None, **changes: Any) -> engine.Trainer:
    """A trained trainer; what Trainer itself takes goes there."""
    own = {name: changes.pop(name) for name in ("callbacks", "optimizers") if name in changes}
    args = engine.TrainingArguments(output_dir=str(folder), **(_USUAL | changes))
    trainer = engine.Trainer(model=model or Deep(), args=args, train_dataset=data or rows(), **own)
    with torch.compiler.set_stance("force_eager"):
        trainer.train()
    return trainer


def figures(trainer: engine.Trainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


@pytest.mark.parametrize("optim", cases(name for name in names() if name != "adamw_apex_fused"))
def test_in_backward_weights_equal_those_of_the_usual_step(tmp_path: Path, optim: str) -> None:
    usual, early = run(tmp_path, optim=optim), run(tmp_path, optim=optim, optimizer_in_backward=True)
    for one, other in zip(usual.model.parameters(), early.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert figures(early, "loss") == figures(usual, "loss")
    assert figures(early, "grad_norm") == pytest.approx(figures(usual, "grad_norm"), rel=1e-5)  # summed in other order


def test_in_backward_run_resumes_bitwise(tmp_path: Path) -> None:
    saving = {"optimizer_in_backward": True, "save_strategy": "steps", "save_steps": 3, "optim": "adamw_whet_8bit"}
    whole = run(tmp_path / "whole", **saving)
    (tmp_path / "rest").mkdir()
    (tmp_path / "whole" / "checkpoint-3").rename(tmp_path / "rest" / "checkpoint-3")
    resumed = run(tmp_path / "rest", resume_from_checkpoint="auto", **saving)
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_in_backward_uses_gradients_from_outside_autograd(tmp_path: Path) -> None:
    """Embedding tables get theirs outside of autograd on a CPU with the native operators."""
    config = BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48)
    data = [
        {"input_ids": [5 + i % 40, 7, 9, 11 + i % 30, 8], "start_positions": i % 5, "end_positions": 4}
        for i in range(16)
    ]
    models = []
    for early in (False, True):
        torch.manual_seed(0)
        trainer = run(tmp_path, model=BertForQuestionAnswering(config), data=data, optimizer_in_backward=early)
        models.append(trainer.model)
    for (name, one), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other), name


def test_in_backward_works_with_a_custom_optimizer(tmp_path: Path) -> None:
    models = []
    for early in (False, True):
        model = Deep()
        given = (torch.optim.NAdam(model.parameters(), lr=1e-2), None)
        models.append(run(tmp_path, model=model, optimizers=given, optimizer_in_backward=early).model)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


def test_gradients_are_freed_while_backward_runs() -> None:
    model = Deep()
    alive: list[int] = []
    for parameter in model.parameters():
        # hooks run in the order of their registration: this one sees what is there before the step
        parameter.register_post_accumulate_grad_hook(
            lambda _: alive.append(sum(p.grad is not None for p in model.parameters()))
        )
    hooks = InBackward(torch.optim.SGD(model.parameters(), lr=0.1))
    model(**{name: torch.stack([row[name] for row in rows()]) for name in ("x", "labels")})["loss"].backward()
    assert len(alive) == len(list(model.parameters()))
    assert max(alive) <= 2  # a layer's weight and bias come at the same time
    assert all(parameter.grad is None for parameter in model.parameters())
    hooks.remove()


def test_after_training_backward_leaves_gradients_again(tmp_path: Path) -> None:
    model = run(tmp_path, optimizer_in_backward=True).model
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model(**{name: torch.stack([row[name] for row in rows()]) for name in ("x", "labels")})["loss"].backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))


class Spoiler(TrainerCallback):
    """Lets the loss of one step be infinite."""

    def on_step_begin(self, args: Any, state: Any, control: Any, *, model: Deep, **_: Any) -> None:
        model.layers[-1].register_forward_hook(
            lambda _module, _inputs, output: output * float("inf") if state.global_step == 2 else output
        )


def test_non_finite_gradients_do_not_reach_the_weights(tmp_path: Path) -> None:
    trainer = run(tmp_path, optimizer_in_backward=True, callbacks=[Spoiler()])
    assert all(bool(torch.isfinite(parameter).all()) for parameter in trainer.model.parameters())
    losses = figures(trainer, "loss")
    assert len(losses) == 6
    assert losses[-1] < 1e6


def test_run_that_ends_with_bad_steps_says_that_weights_have_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(NonFiniteError, match="already applied those of their gradients that are finite") as caught:
        run(tmp_path, optimizer_in_backward=True, callbacks=[Spoiler()], max_nonfinite_steps=1)
    assert "last good step" not in str(caught.value)
    assert "step 3 was not applied in full" in caplog.text


def test_incompatible_settings_are_refused_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        engine.TrainingArguments(
            optimizer_in_backward=True, gradient_accumulation_steps=2, max_grad_norm=1.0, max_loss_spike=5.0
        )
    (problem,) = caught.value.problems
    assert "leave --max_loss_spike out" in problem.fix
    assert "--gradient_accumulation_steps 1" in problem.fix
    assert "--max_grad_norm 0" in problem.fix
    assert "norm over all gradients" in problem.why


def test_token_limit_is_refused_like_accumulation() -> None:
    """It cuts a step into batches, each of which would take a step of its own: the losses would be others."""
    with pytest.raises(ConfigError, match="each would take a step of its own") as caught:
        engine.TrainingArguments(optimizer_in_backward=True, max_grad_norm=0.0, max_tokens_per_batch=100)
    assert "leave --max_tokens_per_batch out" in caught.value.problems[0].fix
