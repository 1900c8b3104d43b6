"""Decoders that keep their padding train with the loss of transformers, without the logits of all tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import engine
from tiny import DECODERS, VOCABULARY, arguments, losses
from tiny_decoders import collate, tiny_decoder, token_rows
from whet.objectives.own_loss import OwnLoss
from whet.objectives.padded_tokens import PaddedNextTokens

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
CAPS = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}
"""Of Gemma 2, which has 50 and 30: low enough that they matter for a tiny model."""


def _own(model: Any, batch: dict[str, Tensor]) -> tuple[float, list[Tensor | None]]:
    """The loss and the gradients of transformers' own forward."""
    model.train().zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return float(loss.detach()), [weight.grad for weight in model.parameters()]


def _without_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a call of the model fail, which computes all logits."""
    monkeypatch.setattr(OwnLoss, "forward", lambda *_, **__: pytest.fail("all logits are computed"))


@pytest.mark.parametrize("family", [*DECODERS, "gemma2 with caps"])
def test_loss_and_gradients_are_those_of_transformers(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capped, family = family.endswith("caps"), family.split()[0]
    model = tiny_decoder(family, **(CAPS if capped else {}))
    attn = None if capped else "sdpa" if model._supports_sdpa else "eager"
    trainer = engine.Trainer(model, arguments(tmp_path, attn_implementation=attn), collate, token_rows(6))
    objective: Any = trainer.objective
    assert not objective.packed
    for labelled in (0.7, 0.0):
        rows: Any = token_rows(6, labelled=labelled)
        wanted, grads = _own(model, collate(rows))
        model.zero_grad()
        batch = objective.batch(rows, range(6), 0)
        with monkeypatch.context() as patch:
            _without_logits(patch)
            loss = objective.loss_sum(objective.forward(batch, seed=0, step=0), batch) / max(objective.count(batch), 1)
            loss.backward()
        assert float(loss.detach()) == pytest.approx(wanted if labelled else 0.0, rel=1e-5)
        for weight, grad in zip(model.parameters(), grads if labelled else [], strict=False):
            torch.testing.assert_close(weight.grad, grad, rtol=1e-4, atol=1e-5)  # sums in another order
        assert labelled or all(weight.grad is None or not weight.grad.any() for weight in model.parameters())


def test_capped_model_trains_and_evaluates_as_with_its_own_loss(tmp_path: Path) -> None:
    """With an adapter and accumulation too; an evaluation that reads logits has all of them."""
    peft = pytest.importorskip("peft")
    rows: Any = token_rows(8)
    options: dict[str, Any] = {"max_steps": 3, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    found = []
    for plain in (False, True):
        torch.manual_seed(0)
        config = peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights="gaussian")
        model = peft.get_peft_model(tiny_decoder("gemma2", **CAPS), config)
        trainer = engine.Trainer(model, arguments(tmp_path, **options), collate, rows, eval_dataset=rows)
        assert isinstance(trainer.objective, PaddedNextTokens)
        if plain:
            trainer.objective = OwnLoss(model, trainer.collate)
        trainer.train()
        found.append([*losses(trainer), trainer.evaluate()["eval_loss"]])
        assert trainer.predict(rows).predictions.shape[-1] == VOCABULARY
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_model_that_gets_a_hook_later_is_called(tmp_path: Path) -> None:
    model, seen = tiny_decoder("gemma2", **CAPS), []
    trainer = engine.Trainer(model, arguments(tmp_path, max_steps=2), collate, token_rows(6))
    assert isinstance(trainer.objective, PaddedNextTokens)
    model.register_forward_hook(lambda _, __, out: seen.append(out.logits.shape[-1]))
    trainer.train()
    assert seen == [VOCABULARY] * 2


def test_columns_that_only_the_loss_reads_reach_it(tmp_path: Path) -> None:
    model, rows = tiny_decoder("gemma2", **CAPS), token_rows(6)

    def shifted(some: Any) -> dict[str, Tensor]:
        batch = collate(some)
        return batch | {"shift_labels": batch["labels"].clone().flip(-1)}

    trainer = engine.Trainer(model, arguments(tmp_path), shifted, rows)
    batch = trainer.objective.batch(rows, range(6), 0)
    model.train()
    loss = trainer.objective.loss_sum(trainer.objective.forward(batch, seed=0, step=0), batch)
    wanted: Any = model(**shifted(list(rows))).loss
    assert float(loss.detach()) == pytest.approx(float(wanted.detach()) * trainer.objective.count(batch), rel=1e-5)
