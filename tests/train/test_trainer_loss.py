"""A loss of the user's own: compute_loss and training_step are called as transformers' Trainer calls them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from override_runs import Smoothed, Taking, class_rows, losses, ours, pad, theirs, token_rows
from tiny_runs import (
    span_rows,
    tiny_bert,
    weights_of,
)
from torch import nn
from transformers import BertForSequenceClassification

import engine
from whet.errors import ConfigError

# Bodies of overrides; each is put into a subclass of both Trainers.


def weighted(self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
    labels = inputs.pop("labels")
    outputs = model(**inputs)
    logits = outputs["logits"]
    loss = nn.functional.cross_entropy(logits, labels, weight=torch.tensor([1.0, 2.0, 0.5]), reduction="sum")
    loss = loss / (len(labels) if num_items_in_batch is None else num_items_in_batch)
    return (loss, outputs) if return_outputs else loss


def penalised(self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
    loss, outputs = self.__class__.__mro__[1].compute_loss(
        self, model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
    )
    loss = loss + 0.1 * outputs["logits"].pow(2).mean()
    return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize("accumulated", [1, 3])
@pytest.mark.parametrize("model", [Smoothed, Taking])
@pytest.mark.parametrize("body", [weighted, penalised])
def test_an_overridden_loss_trains_as_in_transformers(
    tmp_path: Path, body: Callable[..., Any], model: type[nn.Module], accumulated: int
) -> None:
    """Losses, weights and the evaluation's loss: those of transformers' Trainer, with accumulation too."""
    rows = class_rows()
    settings = {"gradient_accumulation_steps": accumulated, "per_device_train_batch_size": 2, "num_train_epochs": 2}
    found = {}
    for base, args in (
        (engine.Trainer, ours(tmp_path / "a", **settings)),
        (transformers.Trainer, theirs(tmp_path / "b", **settings)),
    ):
        kind = type("Own", (base,), {"compute_loss": body})
        trainer = kind(model=model(), args=args, train_dataset=rows, eval_dataset=rows[:8])
        trainer.train()
        found[base] = (losses(trainer), weights_of(trainer.model), trainer.evaluate()["eval_loss"])
    (mine, my_weights, my_eval), (other, other_weights, other_eval) = found.values()
    assert len(mine) == len(other)
    assert mine == pytest.approx(other, rel=2e-5, abs=1e-4)  # transformers rounds what it logs? no: other order of sums
    for name, tensor in my_weights.items():
        torch.testing.assert_close(tensor, other_weights[name], rtol=1e-4, atol=1e-6)
    assert my_eval == pytest.approx(other_eval, rel=1e-4)


def test_the_model_in_compute_loss_computes_without_padding(tmp_path: Path) -> None:
    """The batch is padded; the linear layers of the encoder see the real tokens alone; losses are transformers'."""
    seen: list[tuple[int, int, int]] = []
    rows = token_rows()

    def watched(
        self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        widths: list[int] = []
        block = model.bert.encoder.layer[0]
        hook = block.register_forward_hook(lambda _, given, __: widths.append(given[0].shape[:-1].numel()))
        outputs = model(**inputs)
        hook.remove()
        seen.append((widths[0], int(inputs["attention_mask"].sum()), inputs["input_ids"].numel()))
        return (outputs.loss, outputs) if return_outputs else outputs.loss

    found = {}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 3}
    for base, args in ((engine.Trainer, ours(tmp_path / "a")), (transformers.Trainer, theirs(tmp_path / "b"))):
        kind = type("Own", (base,), {"compute_loss": watched})
        trainer = kind(tiny_bert(BertForSequenceClassification, **still), args, data_collator=pad, train_dataset=rows)
        trainer.train()
        found[base] = losses(trainer)
    assert found[engine.Trainer] == pytest.approx(found[transformers.Trainer], rel=1e-4)
    mine = seen[: len(seen) // 2]
    assert len(mine) == 4
    assert all(tokens <= computed <= 33 * tokens / 32 < padded for computed, tokens, padded in mine)


def test_a_loss_patched_into_the_instance_is_called(tmp_path: Path) -> None:
    trainer = engine.Trainer(Smoothed(), ours(tmp_path), train_dataset=class_rows())
    calls: list[int] = []

    def loss(model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        calls.append(len(inputs["x"]))
        return model(**inputs)["logits"].pow(2).mean()

    trainer.compute_loss = loss
    trainer.train()
    assert calls == [4, 4, 4, 2]


def test_a_loss_patched_into_the_class_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def loss(self: Any, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
        calls.append(len(inputs["x"]))
        return model(**inputs)["loss"]

    monkeypatch.setattr(engine.Trainer, "compute_loss", loss)
    engine.Trainer(Smoothed(), ours(tmp_path), train_dataset=class_rows()).train()
    assert calls == [4, 4, 4, 2]


def test_a_loss_of_a_mixin_is_called(tmp_path: Path) -> None:
    class Mixin:
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            return model(**inputs)["loss"] * 0.0 + 7.0

    class Own(Mixin, engine.Trainer):
        pass

    trainer = Own(Smoothed(), ours(tmp_path), train_dataset=class_rows())
    trainer.train()
    assert losses(trainer) == [7.0] * 4


def test_a_loss_of_the_older_signature_is_called(tmp_path: Path) -> None:
    """transformers before 4.46 passed no num_items_in_batch; the mean over micro-batches is taken."""

    class Own(engine.Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
            outputs = model(**inputs)
            return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    plain = engine.Trainer(Taking(), ours(tmp_path / "a"), train_dataset=class_rows(12))
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    trainer = Own(Taking(), ours(tmp_path / "b", **settings), train_dataset=class_rows(12), eval_dataset=class_rows(5))
    plain.train()
    trainer.train()
    for name, tensor in weights_of(trainer.model).items():
        torch.testing.assert_close(tensor, weights_of(plain.model)[name], rtol=1e-4, atol=1e-6)
    assert "eval_loss" in trainer.evaluate()


@pytest.mark.parametrize("given", ["tuple", "vector", "nothing"])
def test_a_loss_that_is_no_number_is_refused(tmp_path: Path, given: str) -> None:
    wrong = {"tuple": lambda loss: (loss, 1), "vector": lambda loss: loss.expand(3), "nothing": lambda _: None}

    class Own(engine.Trainer):
        def compute_loss(self, model: Any, inputs: Any, **_: Any) -> Any:
            return wrong[given](model(**inputs)["loss"])

    with pytest.raises(ConfigError, match=r"(?s)compute_loss of Own returned no loss.*fix: return a scalar"):
        Own(Smoothed(), ours(tmp_path), train_dataset=class_rows()).train()


def test_an_overridden_training_step_is_called(tmp_path: Path) -> None:
    """Adversarial training: two backward passes a micro-batch, through the accelerator that scripts know."""

    class Own(engine.Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            loss = super().training_step(model, inputs, num_items_in_batch)
            self.accelerator.backward(0.5 * model(**inputs)["loss"])
            return loss

    trainer = Own(Smoothed(), ours(tmp_path, max_grad_norm=0.0, optim="sgd"), train_dataset=class_rows(4))
    trainer.train()
    wanted = Smoothed()
    batch = {name: torch.stack([row[name] for row in class_rows(4)]) for name in ("x", "labels")}
    (1.5 * wanted(**batch)["loss"]).backward()
    for mine, other in zip(trainer.model.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(mine, other - 1e-2 * other.grad, rtol=1e-5, atol=1e-7)


def test_a_padding_collator_is_used_with_a_question_answering_model(tmp_path: Path) -> None:
    """A loss that is penalised goes through the padded model, and its number is that of transformers."""
    rows = [row | {"attention_mask": [1] * len(row["input_ids"])} for row in span_rows()]
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    found = []
    for base, args in ((engine.Trainer, ours(tmp_path / "a")), (transformers.Trainer, theirs(tmp_path / "b"))):
        body = {"compute_loss": _doubled}
        trainer = type("Own", (base,), body)(tiny_bert(**still), args, _pad_spans, train_dataset=rows)
        trainer.train()
        found.append(losses(trainer))
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def _doubled(self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
    outputs = model(**inputs)
    return (2 * outputs.loss, outputs) if return_outputs else 2 * outputs.loss


def _pad_spans(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    padded = pad([row | {"labels": 0} for row in rows])
    padded.pop("labels")
    return padded | {name: torch.tensor([row[name] for row in rows]) for name in ("start_positions", "end_positions")}
