"""The last block computes the tokens that the head reads: losses, gradients and predictions stay, and work is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from native_rows import RowsOfOperators
from torch import Tensor
from transformers import AutoModelForSequenceClassification

import whet
from tiny import tiny_config
from trained_heads import HEADS, collator, model_of, rows_for, trainer_for
from whet.errors import ConfigError
from whet.kernels.library import library
from whet.models.known import known

pytestmark = pytest.mark.skipif(library() is None, reason="the native operators are not built here")
CAN = tuple(name for name, family in known().items() if family.stack is not None and not family.causal)
"""Families whose last block can leave tokens out; ALBERT's one block runs many times."""
READ = ["classes", "masked words"]
families = pytest.mark.parametrize("family", CAN)
# The same sums in float32, cut in other places; in bf16 the queries are a product of other shape, whose sums round
# otherwise: 2 ** -9 for each of a few products. Another dropout mask moves a gradient by a tenth of the largest.
GAPS = {"fp32": 3e-6, "bf16": 0.03}


def _of_one_batch(folder: Path, family: str, name: str, **settings: Any) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and the gradients of a batch, dropout on, as a training step computes them."""
    trainer: Any = trainer_for(HEADS[name], family, folder, dropout=0.2, **settings)
    model = trainer.model.train()
    batch = trainer.objective.batch(trainer.train_dataset, range(6), 0)
    with trainer.precision.current.forward():
        loss = trainer.objective.loss_sum(trainer.objective.forward(batch, seed=3, step=1), batch)
    loss.backward()
    return float(loss.detach()), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@families
@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("precision", GAPS)
def test_last_block_of_read_tokens_has_the_loss_and_gradients_of_all(
    family: str, name: str, precision: str, tmp_path: Path
) -> None:
    within = GAPS[precision]
    loss, found = _of_one_batch(tmp_path, family, name, precision=precision)
    exact, wanted = _of_one_batch(tmp_path, family, name, precision=precision, last_block_tokens="all")
    assert loss == pytest.approx(exact, rel=within)
    assert found.keys() == wanted.keys()
    largest = max(float(grad.abs().max()) for grad in wanted.values())
    for weight, grad in wanted.items():
        assert float((found[weight] - grad).abs().max()) <= within * largest, weight


@families
@pytest.mark.parametrize("name", READ)
def test_last_block_computes_the_read_tokens_alone(family: str, name: str, tmp_path: Path) -> None:
    with RowsOfOperators("bias_act", "gated_act") as rows:
        _of_one_batch(tmp_path, family, name)
    batch = collator(family)(rows_for(HEADS[name])[:6])
    n_read = 6 if name == "classes" else int((batch["labels"] != -100).sum())
    blocks = rows.forward[:2]  # a head may have an activation of its own
    assert blocks[0] >= int(batch["attention_mask"].sum())
    assert blocks[1] == n_read


@families
def test_predictions_are_those_of_all_tokens(family: str, tmp_path: Path) -> None:
    found, wanted = (
        trainer_for(HEADS["classes"], family, tmp_path, last_block_tokens=tokens).predict(rows_for(HEADS["classes"]))  # pyright: ignore[reportArgumentType]
        for tokens in ("read", "all")
    )
    np.testing.assert_allclose(found.predictions, wanted.predictions, atol=1e-5)


@pytest.mark.parametrize("place", ["bert.encoder.layer.1", "bert.encoder.layer.1.output.LayerNorm", "bert.encoder"])
def test_hook_near_the_last_block_sees_all_tokens(place: str, tmp_path: Path) -> None:
    trainer: Any = trainer_for(HEADS["classes"], "bert", tmp_path)
    seen: list[int] = []

    def look(_module: Any, _given: Any, out: Any) -> None:
        seen.append((out if isinstance(out, Tensor) else out[0]).shape[1])

    handle = trainer.model.get_submodule(place).register_forward_hook(look)
    batch = trainer.objective.batch(trainer.train_dataset, range(6), 0)
    with RowsOfOperators("bias_act") as watched:
        trainer.objective.forward(batch, seed=0, step=0)
    assert seen == [batch.n_computed]
    assert set(watched.forward) == {batch.n_computed}
    handle.remove()
    with RowsOfOperators("bias_act") as alone:
        trainer.objective.forward(batch, seed=0, step=0)
    assert alone.forward == [batch.n_computed, 6]


def test_module_of_a_users_own_in_the_last_block_gets_all_tokens(tmp_path: Path) -> None:
    class Centred(torch.nn.Module):
        """Mixes tokens, as no layer of BERT does."""

        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(1, keepdim=True)

    trainer: Any = trainer_for(HEADS["classes"], "bert", tmp_path)
    trainer.model.bert.encoder.layer[1].intermediate.intermediate_act_fn = Centred()
    batch = trainer.objective.batch(trainer.train_dataset, range(6), 0)
    with RowsOfOperators("add_norm") as rows:
        trainer.objective.forward(batch, seed=0, step=0)
    assert set(rows.forward) == {batch.n_computed}


# ---- whet.optimize ----


def _classifier(family: str, **options: Any) -> Any:
    torch.manual_seed(2)
    changes = {"pad_token_id": 0} if known()[family].skips_padding else {}
    model = AutoModelForSequenceClassification.from_config(tiny_config(family, num_labels=3, **changes))
    return whet.optimize(model.train(), **options)


def _batch() -> dict[str, Tensor]:
    batch = collator("bert")(rows_for(HEADS["classes"])[:5])
    return batch | {"labels": torch.arange(5) % 3}


@families
def test_optimized_classifier_learns_the_same_from_read_tokens(family: str) -> None:
    outs = []
    for tokens in ("read", "all"):
        model = _classifier(family, last_block_tokens=tokens)
        with RowsOfOperators("bias_act", "gated_act") as rows:
            out = model(**_batch())
        out.loss.backward()
        outs.append((out.loss.detach(), out.logits.detach(), rows.forward[1], model))
    (loss, logits, n_read, model), (exact, wanted, n_all, whole) = outs
    assert (n_read, n_all) == (5, rows.forward[0])
    torch.testing.assert_close(loss, exact, rtol=1e-5, atol=0)
    torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-5)
    for (name, one), other in zip(model.named_parameters(), whole.parameters(), strict=True):
        if other.grad is not None:
            assert float((one.grad - other.grad).abs().max()) < 1e-5 * max(float(other.grad.abs().max()), 1.0), name


def test_optimized_encoder_called_directly_gives_all_states() -> None:
    model, plain = _classifier("bert").eval(), _classifier("bert", last_block_tokens="all").eval()
    batch = {name: value for name, value in _batch().items() if name != "labels"}
    real = batch["attention_mask"].bool()
    found, wanted = (one.bert(**batch).last_hidden_state[real] for one in (model, plain))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    states = model(**batch, output_hidden_states=True).hidden_states[-1][real]
    torch.testing.assert_close(states, wanted, rtol=0, atol=1e-5)


def test_loss_of_a_users_own_may_average_the_encoders_tokens(tmp_path: Path) -> None:
    """The model's class reads first tokens, but here the encoder is called without its head."""

    class Averaging(whet.Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            mask = inputs["attention_mask"]
            states = model.bert(inputs["input_ids"], attention_mask=mask).last_hidden_state
            mean = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
            loss = torch.nn.functional.cross_entropy(model.classifier(mean), inputs["labels"])
            return (loss, {"loss": loss}) if return_outputs else loss

    losses = []
    for tokens in ("read", "all"):
        args = whet.TrainingArguments(
            str(tmp_path),
            last_block_tokens=tokens,
            max_steps=3,
            logging_steps=1,
            precision="fp32",
            use_cpu=True,
            report_to="none",
            save_strategy="no",
        )
        trainer = Averaging(
            model=model_of(HEADS["classes"], "bert"),
            args=args,
            train_dataset=rows_for(HEADS["classes"]),
            data_collator=collator("bert"),
        )
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert losses[0] == losses[1]


def test_optimize_refuses_other_tokens() -> None:
    with pytest.raises(ConfigError, match="use last_block_tokens='read' or 'all'"):
        _classifier("bert", last_block_tokens="first")
