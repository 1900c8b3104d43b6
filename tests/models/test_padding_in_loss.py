"""Question answering losses that count padding, against the untouched transformers models on padded batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import IBertConfig, IBertForQuestionAnswering

import engine
from marks import needs_vnni
from tiny import FAMILIES, Pad, arguments, losses, padded, tiny_model, tiny_rows, weights_of
from whet.data.padding import SAMPLES
from whet.data.store import RowStore
from whet.engine import step
from whet.precision.policy import Float32

operators = pytest.mark.usefixtures("operators")
ROWS_PER_BATCH = 4
EXACT = 1e-5  # relative: sums of some hundred float32 terms; seen: 3e-7


class Tokenizer(Pad):
    """What a Trainer asks of a tokenizer: how to pad, and with what."""

    def __init__(self, pad_token_id: int, length: int | None = None) -> None:
        super().__init__(pad_token_id, length)
        self.pad_token_id = pad_token_id

    def pad(self, rows: Any, **_: Any) -> dict[str, Tensor]:
        return self(rows)


def trainer_of(
    folder: Path, model: Any, rows: RowStore, *, length: int | None = None, **changes: Any
) -> engine.Trainer:
    """Return a trainer whose loss counts padding."""
    pads = Tokenizer(model.config.pad_token_id, length)
    args = arguments(folder, per_device_train_batch_size=ROWS_PER_BATCH, **changes)
    return engine.Trainer(
        model=model, args=args, train_dataset=rows, eval_dataset=rows, processing_class=pads, padded_length=length
    )


def transformers_loss(model: nn.Module, rows: RowStore, length: int | None = None) -> Tensor:
    """Return the mean over batches of the loss that the model itself computes of padded rows."""
    pad_id = model.config.pad_token_id  # pyright: ignore
    batches = [list(rows.take(range(at, at + ROWS_PER_BATCH))) for at in range(0, len(rows), ROWS_PER_BATCH)]
    found = [model(**padded(batch, pad_id, length)).loss for batch in batches]
    return torch.stack(found).mean()


def loss_and_gradients(trainer: engine.Trainer, n_rows: int, *, rows_at_once: int = ROWS_PER_BATCH) -> float:
    """Leave the gradients of a step in the trainer's model; return its loss."""
    trainer.model.train()
    rows = range(n_rows)
    parts = [(rows[at : at + rows_at_once], at) for at in range(0, n_rows, rows_at_once)]
    batches = [trainer.objective.batch(trainer.train_dataset, part, at) for part, at in parts]
    found = step.ObjectiveGradients(objective=trainer.objective, precision=Float32(), seed=0)(batches, 0).total
    return float(found)


@operators
@pytest.mark.parametrize("length", [None, 60])
@pytest.mark.parametrize("family", FAMILIES)
def test_all_padding_gives_the_loss_and_gradients_of_transformers(
    tmp_path: Path, family: str, length: int | None
) -> None:
    rows, untouched = tiny_rows(8, family), tiny_model(family).train()
    wanted = transformers_loss(untouched, rows, length)
    wanted.backward()
    trainer = trainer_of(tmp_path, tiny_model(family), rows, length=length, padding_in_loss="all")
    assert trainer.objective.packed
    assert loss_and_gradients(trainer, 8) == pytest.approx(float(wanted.detach()), rel=EXACT)
    for (name, one), other in zip(trainer.model.named_parameters(), untouched.parameters(), strict=True):
        if other.grad is None:
            continue
        scale = max(float(other.grad.abs().max()), 0.1)
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=EXACT * scale, msg=name)


def smooth(model: Any) -> Any:
    """Return the model with positions that vary slowly, as those of trained models do, if they have a table."""
    table = next((weight for name, weight in model.named_parameters() if "position_emb" in name), None)
    if table is None:
        return model
    waves = torch.arange(table.shape[0])[:, None] / torch.linspace(20, 60, table.shape[1])
    with torch.no_grad():
        table.copy_(0.2 * waves.sin())
    return model


@operators
@pytest.mark.parametrize("family", FAMILIES)
def test_few_padding_tokens_stand_for_all(tmp_path: Path, family: str) -> None:
    rows = tiny_rows(8, family)
    wanted = float(transformers_loss(smooth(tiny_model(family)), rows, 70).detach())
    trainer = trainer_of(tmp_path, smooth(tiny_model(family)), rows, length=70, padding_in_loss="sampled")
    batch = trainer.objective.batch(rows, range(8), 0)
    assert batch.padding is not None
    assert batch.padding.n == 8 * SAMPLES
    assert loss_and_gradients(trainer, 8) == pytest.approx(wanted, rel=5e-3)  # tiny models: seen 2e-3
    alone = trainer_of(tmp_path, smooth(tiny_model(family)), rows, length=70)
    assert loss_and_gradients(alone, 8) < 0.9 * wanted


@operators
@pytest.mark.parametrize("amount", ["sampled", "all"])
@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_padding_is_that_of_the_batch_however_it_is_split(tmp_path: Path, family: str, amount: str) -> None:
    """Accumulation and micro-batches of few tokens, dropout on: the same curve."""
    rows, changes = tiny_rows(32, family), {"max_steps": 4, "padding_in_loss": amount, "optim": "sgd"}

    def run(**more: Any) -> engine.Trainer:
        model = tiny_model(family, dropout=0.1)
        trainer = trainer_of(tmp_path, model, rows, gradient_accumulation_steps=2, **changes, **more)
        trainer.train()
        return trainer

    whole, cut = run(), run(max_tokens_per_batch=60)
    assert losses(cut) == pytest.approx(losses(whole), rel=EXACT)
    after = weights_of(whole.model)
    for name, value in weights_of(cut.model).items():
        torch.testing.assert_close(value, after[name], rtol=0, atol=1e-5, msg=name)


_WAYS: dict[str, dict[str, Any]] = {
    "compiled": {"torch_compile": True, "torch_compile_backend": "aot_eager"},
    "recomputed": {"gradient_checkpointing": True},
    "recomputed in part": {"gradient_checkpointing": True, "checkpointing_policy": "selective"},
}


@pytest.mark.each_value
@pytest.mark.parametrize("way", _WAYS)
@pytest.mark.parametrize("family", ["bert", "albert", "distilbert"])
def test_every_way_to_run_a_model_counts_the_same_padding(tmp_path: Path, family: str, way: str) -> None:
    rows, changes = tiny_rows(12, family), {"max_steps": 3, "padding_in_loss": "sampled", "optim": "sgd"}
    found = []
    for more in ({}, _WAYS[way]):
        trainer = trainer_of(tmp_path, tiny_model(family, dropout=0.1), rows, **changes, **more)
        trainer.train()
        found.append(losses(trainer))
    assert found[0] == pytest.approx(found[1], rel=EXACT)


@pytest.mark.usefixtures("int8_anywhere")
@pytest.mark.parametrize("precision", ["bf16", pytest.param("int8", marks=needs_vnni)])
def test_coarser_formats_count_the_same_padding(tmp_path: Path, precision: str) -> None:
    rows = tiny_rows(8)
    wanted = float(transformers_loss(tiny_model("bert"), rows, 60).detach())
    changes = {"padding_in_loss": "all", "precision": precision, "max_steps": 1, "per_device_train_batch_size": 8}
    trainer = engine.Trainer(tiny_model("bert"), arguments(tmp_path, **changes), train_dataset=rows, padded_length=60)
    trainer.train()
    assert losses(trainer)[0] == pytest.approx(wanted, rel=0.02)  # factors of 8 bits; without padding: 0.8 times it


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_eval_loss_counts_padding_and_predictions_do_not(tmp_path: Path, family: str) -> None:
    rows = tiny_rows(16, family)
    wanted = float(transformers_loss(tiny_model(family).eval(), rows).detach())
    trainer = trainer_of(
        tmp_path, tiny_model(family, dropout=0.1), rows, padding_in_loss="all", per_device_eval_batch_size=4
    )
    assert trainer.evaluate()["eval_loss"] == pytest.approx(wanted, rel=EXACT)
    plain = trainer_of(tmp_path, tiny_model(family), rows).predict(rows).predictions
    for found, other in zip(trainer.predict(rows).predictions, plain, strict=True):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(other), rtol=0, atol=1e-5)


def test_rows_that_come_padded_are_counted_so(tmp_path: Path) -> None:
    """Tokenised with padding="max_length", as the guides' script does: the loss is over these places."""
    rows, untouched = tiny_rows(8), tiny_model("bert")
    wanted = float(transformers_loss(untouched, rows, 64).detach())
    columns = padded(list(rows), 0, 64)
    features: Any = [{name: column[row].tolist() for name, column in columns.items()} for row in range(8)]
    trainer = trainer_of(tmp_path, tiny_model("bert"), features, padding_in_loss="all")
    assert loss_and_gradients(trainer, 8) == pytest.approx(wanted, rel=EXACT)


@pytest.mark.parametrize("amount", ["sampled", "all"])
def test_a_family_that_runs_padded_counts_all_of_it(tmp_path: Path, amount: str) -> None:
    sizes = {"vocab_size": 200, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = IBertConfig(**sizes, intermediate_size=64, max_position_embeddings=80)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    torch.manual_seed(0)
    model, rows = IBertForQuestionAnswering(config), tiny_rows(8, "roberta")
    for length in (None, 60):
        wanted = float(transformers_loss(model, rows, length).detach())
        trainer = trainer_of(tmp_path, model, rows, length=length, padding_in_loss=amount)
        assert not trainer.objective.packed
        assert loss_and_gradients(trainer, 8) == pytest.approx(wanted, rel=EXACT)
        model.zero_grad()
