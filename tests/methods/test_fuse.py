"""The fused operators inside the model: the same losses, gradients and masks as the operators in plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AlbertConfig,
    AutoModelForQuestionAnswering,
    BertConfig,
    DistilBertConfig,
    ElectraConfig,
    RobertaConfig,
    XLMRobertaConfig,
)

from engine import Trainer, TrainingArguments
from whet.config.methods import MethodSettings
from whet.data.store import RowStore
from whet.kernels.library import library
from whet.methods import fuse
from whet.models.fused.layers import GRADIENT
from whet.models.view import ModelView
from whet.objectives.choose import choose
from whet.objectives.span import PackedSpans

pytestmark = pytest.mark.skipif(library() is None, reason="the native library is not built here (no compiler)")

LENGTHS = (7, 33, 50, 1, 20)


def configs(p: float) -> dict[str, Any]:
    shape = {
        "vocab_size": 120,
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 80,
        "max_position_embeddings": 64,
        "attention_probs_dropout_prob": p,
        "hidden_dropout_prob": p,
    }
    small = {"vocab_size": 120, "dim": 48, "n_layers": 2, "n_heads": 4, "hidden_dim": 80}
    return {
        "bert": BertConfig(**shape),
        "roberta": RobertaConfig(**shape, pad_token_id=1),
        "xlm-roberta": XLMRobertaConfig(**shape, pad_token_id=1),
        "electra": ElectraConfig(**shape, embedding_size=32),
        "albert": AlbertConfig(**shape, embedding_size=32, hidden_act="gelu_new"),
        "distilbert": DistilBertConfig(**small, dropout=p, attention_dropout=p, qa_dropout=p),
    }


def store() -> RowStore:
    starts = np.concatenate([[0], np.cumsum(LENGTHS)]).astype(np.int64)
    labels = {"start_positions": np.array([min(3, n - 1) for n in LENGTHS]), "end_positions": np.array(LENGTHS) - 1}
    ids = np.random.default_rng(0).integers(5, 120, starts[-1])
    return RowStore(starts, {"input_ids": ids}, labels)


def step_of(model: Any, spans: Any) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    batch = spans.batch(store(), range(len(LENGTHS)), 0)
    loss = spans.loss_sum(spans.forward(batch, seed=1, step=3), batch)
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("family", configs(0.0))
def test_loss_and_gradients_are_those_of_plain_torch(family: str, p: float) -> None:
    torch.manual_seed(0)
    model = AutoModelForQuestionAnswering.from_config(configs(p)[family]).train()
    spans = choose(model, None, lambda rows: {})
    assert isinstance(spans, PackedSpans)
    loss, gradients = step_of(model, spans)
    view = ModelView(model)
    applied = fuse.apply(view, MethodSettings(operators="auto", row_gradients=True))
    assert applied is not None
    fused_loss, fused_gradients = step_of(model, spans)
    again, _ = step_of(model, spans)
    fuse.restore(view)
    restored, _ = step_of(model, spans)
    assert sum(applied.changed.values()) >= 3
    assert fused_loss == pytest.approx(loss, rel=2e-6)  # fp32 sums in another order
    assert again == fused_loss
    assert restored == loss
    assert gradients.keys() == fused_gradients.keys()
    largest = max(gradient.norm().item() for gradient in gradients.values())
    for name, gradient in gradients.items():  # biases in front of a softmax have no gradient but rounding
        assert (gradient - fused_gradients[name]).norm().item() <= 1e-5 * (gradient.norm().item() + largest), name


def test_the_training_curve_is_that_of_plain_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty steps with dropout on; the two differ in rounding only, which the steps carry on."""

    def curve(folder: Path) -> tuple[list[float], list[float]]:
        torch.manual_seed(0)
        model = AutoModelForQuestionAnswering.from_config(configs(0.1)["bert"])
        args = TrainingArguments(
            output_dir=str(folder),
            max_steps=20,
            learning_rate=1e-3,
            per_device_train_batch_size=2,
            logging_steps=1,
            save_strategy="no",
            use_cpu=True,
        )
        trainer = Trainer(model=model, args=args, train_dataset=store())
        trainer.train()
        logged = [entry for entry in trainer.state.log_history if "loss" in entry]
        return [entry["loss"] for entry in logged], [entry["grad_norm"] for entry in logged]

    fused, fused_norms = curve(tmp_path / "fused")
    monkeypatch.setattr(fuse, "possible", lambda packed: False)
    plain, plain_norms = curve(tmp_path / "plain")
    assert fused == pytest.approx(plain, rel=1e-4)
    assert fused_norms != plain_norms, "both runs took the same operators"


@pytest.mark.parametrize("tied", [False, True])
def test_a_table_that_the_output_shares_gets_an_ordinary_gradient(tied: bool) -> None:
    """It has no rows of zeros that an optimizer could pass by."""
    model = AutoModelForQuestionAnswering.from_config(configs(0.0)["bert"])
    table = model.get_input_embeddings()
    if tied:
        model.words = torch.nn.Linear(48, 120, bias=False)
        model.words.weight = table.weight
    assert choose(model, None, lambda _: {}).packed
    fuse.apply(ModelView(model), MethodSettings(operators="auto", row_gradients=True))
    holders = [module for module in model.modules() if hasattr(module, GRADIENT)]
    assert len(holders) == (not tied)
