"""Heads with their own loss in the engine: what goes without padding, what does not, and what a user sees of it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import BertModel, BertPreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

import engine
from marks import needs_vnni
from tiny import tiny_config
from trained_heads import HEADS, SETTINGS, collator, losses_of, model_of, rows_for, trainer_for
from whet.log import logger

# The same sums in float32, cut in other places; another dropout mask moves a loss by more than 1e-2.
SPLIT = {"rtol": 3e-6, "atol": 1e-6}


def _losses(folder: Path, name: str, family: str = "bert", **changes: Any) -> list[float]:
    trainer = trainer_for(HEADS[name], family, folder, dropout=0.2, **changes)
    trainer.train()
    return losses_of(trainer)


some_heads = pytest.mark.parametrize(
    "name", [name if name in ("tokens", "choices") else pytest.param(name, marks=pytest.mark.night) for name in HEADS]
)
"""Those whose rows become other batches than those of a class each; the others by night."""


@pytest.mark.each_value
@pytest.mark.parametrize("family", ["bert", "distilbert", "electra", "roberta"])
@pytest.mark.parametrize("name", HEADS)
def test_dropout_does_not_depend_on_how_a_step_is_split(name: str, family: str, tmp_path: Path) -> None:
    whole = _losses(tmp_path, name, family, per_device_train_batch_size=6, gradient_accumulation_steps=1)
    split = _losses(tmp_path, name, family, per_device_train_batch_size=2, gradient_accumulation_steps=3)
    np.testing.assert_allclose(split, whole, **SPLIT)


@some_heads
def test_token_budget_of_any_head_keeps_the_losses(name: str, tmp_path: Path) -> None:
    np.testing.assert_allclose(
        _losses(tmp_path, name, max_tokens_per_batch=64), _losses(tmp_path, name), **SPLIT
    )  # multiple choice counts the tokens of all choices


@some_heads
def test_checkpointed_blocks_see_the_same_masks(name: str, tmp_path: Path) -> None:
    plain = _losses(tmp_path, name)
    assert _losses(tmp_path, name, gradient_checkpointing=True) == plain
    assert _losses(tmp_path, name, gradient_checkpointing=True, checkpointing_policy="selective") == plain


@some_heads
def test_compiled_blocks_train_alike(name: str, tmp_path: Path) -> None:
    compiled = _losses(tmp_path, name, torch_compile=True, torch_compile_backend="eager", max_steps=3)
    np.testing.assert_allclose(compiled, _losses(tmp_path, name, max_steps=3), **SPLIT)


@pytest.mark.parametrize("name", HEADS)
def test_resumed_run_is_bitwise_the_uninterrupted_one(name: str, tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 3, "dropout": 0.2}
    whole = trainer_for(HEADS[name], "roberta", tmp_path, **saving)
    whole.train()
    resumed = trainer_for(HEADS[name], "roberta", tmp_path, **saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert losses_of(resumed)[-5:] == losses_of(whole)[-5:]
    for (_, ours), (_, theirs) in zip(resumed.model.named_parameters(), whole.model.named_parameters(), strict=True):
        assert torch.equal(ours, theirs)


@needs_vnni
@pytest.mark.usefixtures("int8_anywhere")
@pytest.mark.parametrize("name", ["classes", "tokens", "choices"])
def test_int8_serves_encoders_with_any_known_head(name: str, tmp_path: Path) -> None:
    """Products of 8 bits move a loss by some thousandths, and never by nothing."""
    exact, int8 = _losses(tmp_path, name, max_steps=3), _losses(tmp_path, name, max_steps=3, precision="int8")
    assert int8 != exact
    np.testing.assert_allclose(int8, exact, rtol=0.02)


def _left(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Pad on the left, as some tokenizers are set up to."""
    batch = collator("bert")(rows)
    n_padding = (batch["attention_mask"] == 0).sum(1).tolist()
    for name in [name for name, value in batch.items() if value.shape == batch["input_ids"].shape]:
        rolled = [torch.roll(row, n) for row, n in zip(batch[name], n_padding, strict=True)]
        batch[name] = torch.stack(rolled)
    return batch


def test_rows_padded_on_the_left_run_padded_and_the_log_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger.name):
        trainer = trainer_for(HEADS["classes"], "bert", tmp_path, collate=_left)
        figures = trainer.train().metrics
    assert len([text for text in caplog.messages if "pad them on the right" in text]) == 1
    assert figures["train_padding_avoided"] == 0.0
    usual = trainer_for(HEADS["classes"], "bert", tmp_path)
    usual.train()
    assert losses_of(trainer) != pytest.approx(losses_of(usual), rel=1e-4)  # BERT's positions count padding


def test_token_labels_of_rows_padded_on_the_left_need_no_padding(tmp_path: Path) -> None:
    trainer = trainer_for(HEADS["tokens"], "bert", tmp_path, collate=_left)
    reference = trainer_for(HEADS["tokens"], "bert", tmp_path, collate=_left, attn_implementation="sdpa")
    assert trainer.train().metrics["train_padding_avoided"] > 0.1
    assert reference.train().metrics["train_padding_avoided"] == 0.0
    np.testing.assert_allclose(losses_of(trainer), losses_of(reference), rtol=1e-5)


@pytest.mark.parametrize("asked", ["output_hidden_states", "output_attentions"])
def test_model_that_returns_all_layers_runs_padded_and_the_log_says_why(
    asked: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger.name):
        trainer = trainer_for(HEADS["classes"], "bert", tmp_path, config={asked: True}, attn="eager")
        figures = trainer.train().metrics
    (said,) = [text for text in caplog.messages if "batches run padded (BertForSequenceClassification)" in text]
    assert asked in said
    assert figures["train_padding_avoided"] == 0.0


def test_labels_at_padding_tokens_count_as_they_do_in_transformers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def careless(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = collator("bert")(rows)
        return batch | {"labels": batch["labels"].masked_fill(batch["attention_mask"] == 0, 0)}

    with caplog.at_level(logging.WARNING, logger.name):
        trainer = trainer_for(HEADS["tokens"], "bert", tmp_path, collate=careless)
        trainer.train()
    reference = trainer_for(HEADS["tokens"], "bert", tmp_path, collate=careless, attn_implementation="sdpa")
    reference.train()
    np.testing.assert_allclose(losses_of(trainer), losses_of(reference), rtol=1e-5)
    assert len([text for text in caplog.messages if "set these to -100" in text]) == 1


class MeanOfTokens(BertPreTrainedModel):
    """A head of a user's own: the mean of each row's real tokens."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.bert = BertModel(config, add_pooling_layer=False)
        self.out = nn.Linear(config.hidden_size, 1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Any:
        states = self.bert(input_ids, attention_mask=attention_mask).last_hidden_state
        shares = attention_mask / attention_mask.sum(1, keepdim=True)
        logits = self.out((states * shares[..., None]).sum(1))[:, 0]
        loss = None if labels is None else ((logits - labels) ** 2).mean()
        return SequenceClassifierOutput(loss=loss, logits=logits)  # pyright: ignore[reportArgumentType]


def test_head_of_a_users_own_gets_hidden_states_without_the_cost_of_padding(tmp_path: Path) -> None:
    def trainer(**changes: Any) -> engine.Trainer:
        torch.manual_seed(3)
        args: dict[str, Any] = SETTINGS | {"precision": "fp32"} | changes
        return engine.Trainer(
            model=MeanOfTokens(tiny_config("bert")),
            args=engine.TrainingArguments(output_dir=str(tmp_path), **args),
            train_dataset=rows_for(HEADS["regression"]),
            data_collator=collator("bert"),
        )

    ours, padded = trainer(), trainer(attn_implementation="sdpa")
    assert 0.0 < ours.train().metrics["train_padding_avoided"] < 0.3  # a few padding tokens a row are computed
    padded.train()
    np.testing.assert_allclose(losses_of(ours), losses_of(padded), rtol=1e-5)


def test_head_with_a_layer_of_a_users_own_is_not_taken_for_the_usual_one(tmp_path: Path) -> None:
    """A classifier that looks at the neighbours of a token: its rows must not lie end to end."""

    class Neighbours(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(32, 5)

        def forward(self, states: Tensor) -> Tensor:
            return self.out(states + states.roll(1, 1))

    def trainer(**changes: Any) -> engine.Trainer:
        model = model_of(HEADS["tokens"], "bert")
        torch.manual_seed(4)
        model.classifier = Neighbours()
        return trainer_for(HEADS["tokens"], "bert", tmp_path, model=model, **changes)

    ours, padded = trainer(padding_in_loss="all"), trainer(attn_implementation="sdpa")
    ours.train()
    padded.train()
    np.testing.assert_allclose(losses_of(ours), losses_of(padded), rtol=1e-5)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft's own
def test_adapter_on_a_classifier_runs_without_padding(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def trainer(**changes: Any) -> engine.Trainer:
        torch.manual_seed(5)
        lora = peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"], lora_dropout=0.0)
        model = peft.get_peft_model(model_of(HEADS["classes"], "bert"), lora)
        return trainer_for(HEADS["classes"], "bert", tmp_path, model=model, **changes)

    ours, padded = trainer(), trainer(attn_implementation="sdpa")
    assert ours.train().metrics["train_padding_avoided"] > 0.1
    padded.train()
    np.testing.assert_allclose(losses_of(ours), losses_of(padded), rtol=1e-5)


def test_a_users_collator_that_draws_masks_is_asked_for_each_batch(tmp_path: Path) -> None:
    drawn = []

    def masking(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = collator("bert")(rows)
        drawn.append(len(rows))
        return batch | {"labels": torch.where(torch.rand(batch["input_ids"].shape) < 0.3, batch["labels"], -100)}

    trainer = trainer_for(HEADS["masked words"], "bert", tmp_path, collate=masking)
    trainer.train()
    assert sum(drawn) >= 2 * len(rows_for(HEADS["masked words"]))
    assert all(np.isfinite(losses_of(trainer)))


def test_sparse_predictions_stand_at_their_tokens(tmp_path: Path) -> None:
    """ModernBERT's masked language model may compute the logits of tokens with a label alone."""
    results = []
    for sparse in (False, True):
        trainer = trainer_for(HEADS["masked words"], "modernbert", tmp_path, config={"sparse_prediction": sparse})
        assert trainer.objective.packed
        trainer.train()
        results.append((trainer.predict(rows_for(HEADS["masked words"], 7, seed=2)), losses_of(trainer)))
    (every, wanted), (sparse_ones, found) = results
    labelled = every.label_ids != -100
    assert sparse_ones.predictions.shape == every.predictions.shape
    np.testing.assert_allclose(sparse_ones.predictions[labelled], every.predictions[labelled], rtol=1e-4, atol=1e-4)
    assert (sparse_ones.predictions[~labelled] == -100).all()
    assert sparse_ones.metrics["test_loss"] == pytest.approx(every.metrics["test_loss"], rel=1e-5)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_transformers_is_not_changed_by_a_run(tmp_path: Path) -> None:
    """After a run the model answers padded calls of anybody as transformers' own does."""
    trainer = trainer_for(HEADS["classes"], "bert", tmp_path)
    trainer.train()
    again = transformers.AutoModelForSequenceClassification.from_config(trainer.model.config)
    again.load_state_dict(trainer.model.state_dict())
    batch = collator("bert")(rows_for(HEADS["classes"], 5))
    with torch.no_grad():
        np.testing.assert_allclose(
            trainer.model.eval()(**batch).logits.numpy(), again.eval()(**batch).logits.numpy(), atol=1e-6
        )
