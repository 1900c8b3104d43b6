"""Models of transformers with experts: packed, in grouped products, with the balance loss that they ask for."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from sparse_models import logged
from torch import nn

import engine
import whet
from tiny import arguments, losses, weights_of
from tiny_decoders import collate, tiny_decoder, token_rows, trainer_of
from whet.errors import ConfigError
from whet.methods.grouped_experts import NAME

NATIVE = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
CLOSE = 1e-4
"""Relative, of a loss: other orders of sums, over some steps."""


@pytest.mark.parametrize("balance", [False, True])
@pytest.mark.parametrize("family", NATIVE)
def test_native_experts_train_as_in_transformers(family: str, balance: bool, tmp_path: Path) -> None:
    """Three steps of transformers' Trainer on padded rows, with its own experts."""
    rows, usual = token_rows(12), {"max_steps": 3, "per_device_train_batch_size": 4, "learning_rate": 3e-3, "seed": 3}
    changes: dict[str, Any] = {"output_router_logits": True, "router_aux_loss_coef": 0.5} if balance else {}
    settings = {"output_dir": str(tmp_path), "use_cpu": True, "logging_steps": 1, "save_strategy": "no", **usual}
    theirs: Any = transformers.Trainer(
        tiny_decoder(family, **changes),
        transformers.TrainingArguments(**settings, disable_tqdm=True, report_to="none"),
        train_dataset=rows,  # pyright: ignore[reportArgumentType]
        data_collator=collate,
    )
    theirs.train()
    ours = trainer_of(tmp_path, tiny_decoder(family, **changes), rows, **usual, lr_scheduler_type="linear",
                      warmup_steps=0)  # fmt: skip
    assert ours.model.get_experts_implementation()[""] == NAME
    ours.train()
    assert losses(ours) == pytest.approx(losses(theirs), rel=CLOSE)
    assert len(logged(ours, "aux_loss")) == (3 if balance else 0)
    wanted, found = weights_of(theirs.model), weights_of(ours.model)
    assert max(float((found[name] - value).abs().max()) for name, value in wanted.items()) < 1e-3


@pytest.mark.parametrize("family", NATIVE)
def test_grouped_experts_have_the_gradients_of_transformers_own(family: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = tiny_decoder(family)
    experts = next(module for module in model.modules() if hasattr(module, "_is_expert_parallel"))
    found = []
    trainer = trainer_of(tmp_path, model, token_rows(4), max_steps=1)
    for name in (NAME, "eager"):
        trainer.model.set_experts_implementation(name)
        x = torch.randn(64, 32, generator=torch.Generator().manual_seed(2)).requires_grad_()
        logits = torch.randn(64, 4, generator=torch.Generator().manual_seed(3)).requires_grad_()
        weights, chosen = logits.softmax(-1).topk(2)
        result = experts(x, chosen, weights)
        grads = torch.autograd.grad(result.square().sum(), [x, logits, *experts.parameters()])
        found.append([result, *grads])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_restored_model_has_its_own_experts_again(tmp_path: Path) -> None:
    model = tiny_decoder("mixtral")
    before = model.get_experts_implementation()
    trainer = trainer_of(tmp_path, model, token_rows(4), max_steps=1)
    trainer.save_model()
    assert NAME not in (tmp_path / "config.json").read_text()
    assert whet.restore(trainer.model).get_experts_implementation() == before


_LOAD = """
import sys, torch
model, ids, wanted = torch.load(sys.argv[1], weights_only=False)
torch.testing.assert_close(model(ids).logits, wanted)
print(model.get_experts_implementation())
"""


def test_a_saved_model_finds_its_experts_in_another_program(tmp_path: Path) -> None:
    """transformers knows the implementation by a name that whet gives it in each process."""
    ids, saved = torch.arange(10, 34).view(2, 12), []
    for family in NATIVE:
        model = whet.optimize(tiny_decoder(family, use_cache=False)).eval()
        assert model.get_experts_implementation()[""] == NAME
        saved.append(tmp_path / f"{family}.pt")
        torch.save((model, ids, model(ids).logits.detach()), saved[-1])
        assert copy.deepcopy(model).get_experts_implementation()[""] == NAME
    for file in saved:
        command = [sys.executable, "-c", _LOAD, str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr
        assert NAME in done.stdout


def test_noise_of_routers_keeps_the_padding(tmp_path: Path) -> None:
    model = tiny_decoder("mixtral", router_jitter_noise=0.1)
    args = arguments(tmp_path, max_steps=1)
    assert not engine.Trainer(model, args, train_dataset=token_rows(4), data_collator=collate).objective.packed


def test_native_experts_get_no_experts_again() -> None:
    from whet.models.experts.settings import ExpertSettings
    from whet.models.experts.upcycle import upcycle

    with pytest.raises(ConfigError, match="feed-forward parts of this model"):
        upcycle(tiny_decoder("mixtral"), ExpertSettings(experts=4))
    assert isinstance(tiny_decoder("mixtral"), nn.Module)
