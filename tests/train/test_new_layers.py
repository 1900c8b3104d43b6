"""reinit_layers: the last blocks begin with new weights, the same as transformers draws for the seed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import Toy, bert_config
from transformers import BertForQuestionAnswering, BertForSequenceClassification, TrainerCallback

import engine
import whet
from tiny import FAMILIES, arguments, tiny_model, tiny_rows, weights_of
from tiny_decoders import collate, tiny_decoder, token_rows
from whet.models.view import ModelView

ONE_STACK = [family for family in FAMILIES if family != "albert"]


class First(TrainerCallback):
    """Keeps the weights as they are before the first step of a process."""

    weights: dict[str, torch.Tensor] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        self.weights = weights_of(model)


def begun(folder: Path, model: Any, resume: str | None = None, **changes: Any) -> tuple[engine.Trainer, dict[str, Any]]:
    """Train a few steps; return the trainer and the weights that it began with."""
    first = First()
    usual: dict[str, Any] = {"reinit_layers": 1, "max_steps": 2}
    args = arguments(folder, **(usual | changes))
    trainer = engine.Trainer(model, args, train_dataset=tiny_rows(12), callbacks=[first])
    trainer.train(resume_from_checkpoint=resume)
    assert first.weights is not None
    return trainer, first.weights


def changed(found: dict[str, Any], before: dict[str, Any]) -> set[str]:
    return {name for name in before if not torch.equal(found[name], before[name])}


@pytest.mark.parametrize("family", ONE_STACK)
def test_the_last_block_is_drawn_as_transformers_does(family: str, tmp_path: Path) -> None:
    model, rows = tiny_model(family), tiny_rows(12, family)
    reference, before = copy.deepcopy(model), weights_of(model)
    first = First()
    args = arguments(tmp_path, reinit_layers=1, max_steps=1, seed=7)
    engine.Trainer(model, args, train_dataset=rows, callbacks=[first]).train()
    assert first.weights is not None
    name, block = ModelView(reference).blocks()[-1]
    with torch.no_grad():
        for weight in block.parameters():
            weight.__dict__.pop("_is_hf_initialized", None)
        torch.manual_seed(7)
        block.apply(reference._init_weights)
    found = changed(first.weights, before)
    assert found
    assert {one for one in found if not one.startswith(f"{name}.")} == set()
    assert changed(first.weights, weights_of(reference)) == set()


def test_the_pooler_is_new_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = BertForSequenceClassification(bert_config(num_labels=3))
    before = weights_of(model)
    rows = [{"input_ids": [2, 10 + i, 3], "labels": i % 3} for i in range(12)]
    first = First()
    args = arguments(tmp_path, reinit_layers=1, max_steps=1)
    engine.Trainer(model, args, train_dataset=rows, callbacks=[first]).train()
    assert first.weights is not None
    parts = {name.rpartition(".")[0] for name in changed(first.weights, before)}
    assert "bert.pooler.dense" in parts
    assert all(part.startswith(("bert.pooler", "bert.encoder.layer.1.")) for part in parts)


def test_a_pretrained_model_gets_the_same_new_layers(tmp_path: Path) -> None:
    """transformers marks the weights that it has loaded, and would leave them as they are."""
    made = tiny_model("bert")
    made.save_pretrained(tmp_path / "pretrained")
    loaded = BertForQuestionAnswering.from_pretrained(tmp_path / "pretrained")
    before = weights_of(made)
    drawn = [begun(tmp_path / str(n), model)[1] for n, model in enumerate((made, loaded))]
    assert "bert.encoder.layer.1.output.dense.weight" in changed(drawn[1], before)
    assert changed(drawn[0], drawn[1]) == set()


def test_seeds_draw_other_layers_and_leave_other_numbers_alone(tmp_path: Path) -> None:
    drawn = [begun(tmp_path / str(n), tiny_model("bert"), seed=seed)[1] for n, seed in enumerate((1, 1, 2))]
    assert changed(drawn[0], drawn[1]) == set()
    assert "bert.encoder.layer.1.output.dense.weight" in changed(drawn[0], drawn[2])
    numbers = []
    for layers in (0, 1):
        torch.manual_seed(5)
        begun(tmp_path / f"numbers-{layers}", tiny_model("bert"), reinit_layers=layers, max_steps=1)
        numbers.append(torch.rand(1))
    assert numbers[0] == numbers[1]


def test_a_resumed_run_does_not_draw_again(tmp_path: Path) -> None:
    trainer, _ = begun(tmp_path, tiny_model("bert"), save_strategy="steps", save_steps=1)
    trained = weights_of(trainer.model)
    _, resumed = begun(tmp_path, tiny_model("bert"), "auto", max_steps=3)
    assert changed(resumed, trained) == set()


def test_a_second_training_continues_with_what_it_learnt(tmp_path: Path) -> None:
    trainer, _ = begun(tmp_path, tiny_model("bert"))
    trained = weights_of(trainer.model)
    again = First()
    trainer.events.add_callback(again)
    trainer.train()
    assert again.weights is not None
    assert changed(again.weights, trained) == set()


def test_an_evaluation_draws_nothing(tmp_path: Path) -> None:
    model = tiny_model("bert")
    before = weights_of(model)
    engine.Trainer(model, arguments(tmp_path, reinit_layers=1), eval_dataset=tiny_rows(4)).evaluate()
    assert changed(weights_of(model), before) == set()


@pytest.mark.parametrize(
    ("model", "layers", "message"),
    [
        (lambda: tiny_model("albert"), 1, "Albert"),
        (lambda: tiny_model("bert"), 2, "none of its 2 pretrained blocks"),
        (lambda: Toy(), 1, "Toy"),
    ],
    ids=["shared", "all", "unknown"],
)
def test_what_has_no_last_block_is_refused(model: Any, layers: int, message: str, tmp_path: Path) -> None:
    with pytest.raises(whet.ConfigError, match=f"(?s)reinit_layers does not go with this model.*{message}"):
        begun(tmp_path, model(), reinit_layers=layers)


@pytest.mark.parametrize("name", ["albert", "decoder", "frozen"])
def test_a_recipe_leaves_them_out_where_they_do_not_fit(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "whet")
    model = tiny_decoder("llama") if name == "decoder" else tiny_model("albert" if name == "albert" else "bert")
    for weight in model.base_model.parameters() if name == "frozen" else ():
        weight.requires_grad_(False)
    rows = token_rows(8) if name == "decoder" else tiny_rows(8)
    before = weights_of(model)
    first = First()
    settings: dict[str, Any] = {"recipe": "few_samples", "max_steps": 2}
    args = arguments(tmp_path, **settings)
    collator = {"data_collator": collate} if name == "decoder" else {}
    engine.Trainer(model, args, train_dataset=rows, callbacks=[first], **collator).train()
    assert first.weights is not None
    assert all(torch.equal(before[one], first.weights[one]) for one in before)
    assert "reinit_layers 1 is left out" in caplog.text


def test_frozen_blocks_are_refused(tmp_path: Path) -> None:
    model = tiny_model("bert")
    model.bert.requires_grad_(False)
    with pytest.raises(whet.ConfigError, match="new weights that are never trained"):
        begun(tmp_path, model)
