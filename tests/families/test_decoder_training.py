"""Decoders in training with dropout: how a step's rows are cut up and computed does not change the curve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import engine
import whet
from tiny import arguments, assert_same_weights, losses, tiny_config, weights_of
from tiny_decoders import DECODERS, collate, tiny_decoder, token_rows, trainer_of
from whet.errors import ConfigError
from whet.models.fused.limits import CACHE_NAMES

# Sums of float32 in another order; seen: 4e-7. One wrong element of one mask moves a loss by more than 1e-4.
LOSS_TOLERANCE = 2e-6
WEIGHT_TOLERANCE = 2e-6
RUN = {"per_device_train_batch_size": 8, "max_steps": 6, "seed": 5}
KEY_BIASES = ("k_proj.bias", "c_attn.bias")
"""They cancel in the softmax: their gradients are rounding alone, of which AdamW makes steps of any size."""
families = pytest.mark.parametrize("family", DECODERS)
some = pytest.mark.parametrize("family", ["gpt2", "qwen3", "phi", "gemma3_text"])


def run(folder: Path, family: str, *, labelled: float = 0.7, **changes: Any) -> tuple[list[float], Any]:
    model = tiny_decoder(family, dropout=0.1)
    trainer = trainer_of(folder, model, token_rows(44, labelled=labelled), **(RUN | changes))
    trainer.train()
    weights = weights_of(trainer.model)
    return losses(trainer), {name: value for name, value in weights.items() if not name.endswith(KEY_BIASES)}


SPLITS = {
    "2x4": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    "8x1": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
    "checkpointing": {"gradient_checkpointing": True},
    "loader workers": {"dataloader_num_workers": 2},
}


@pytest.mark.each_value
@some
@pytest.mark.parametrize("split", SPLITS)
def test_decoder_with_dropout_has_one_curve(tmp_path: Path, family: str, split: str) -> None:
    """One token in ten is a target: the loss reads the hidden states of these alone."""
    wanted = run(tmp_path / "a", family, labelled=0.1)
    found = run(tmp_path / "b", family, labelled=0.1, **SPLITS[split])
    assert found[0] == pytest.approx(wanted[0], rel=LOSS_TOLERANCE)
    assert_same_weights(found[1], wanted[1], WEIGHT_TOLERANCE)


@families
def test_optimized_decoder_has_the_loss_and_gradients_of_the_untouched_one(family: str) -> None:
    """In training, where nobody keeps keys and values for later calls."""
    batch, found = collate(token_rows(6)), []
    for change in (lambda model: model, whet.optimize):
        model = change(tiny_decoder(family)).train()
        loss = model(**batch).loss
        loss.backward()
        found.append((loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
    (theirs, wanted), (ours, gradients) = found
    assert float(ours) == pytest.approx(float(theirs), rel=1e-6)
    for name, exact in wanted.items():
        assert float((gradients[name] - exact).abs().max()) < 2e-5 * max(float(exact.abs().max()), 1e-3), name


@pytest.mark.each_value
@families
@pytest.mark.parametrize("prepared", ["optimize", "Trainer"])
def test_changed_decoder_generates_what_the_untouched_one_does(tmp_path: Path, family: str, prepared: str) -> None:
    """Prompts of different lengths, padded on the left, with a cache: whet's packed attention has no part in it."""
    ids = torch.randint(10, 200, (3, 9), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[0, :4], mask[1, :2] = 0, 0
    call = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    changes = {"optimize": whet.optimize, "Trainer": lambda model: trainer_of(tmp_path, model, token_rows(4)).model}
    model = tiny_decoder(family).eval()
    wanted = model.generate(**call)
    assert torch.equal(changes[prepared](model).eval().generate(**call), wanted)


@some
def test_cache_of_an_optimized_decoder_serves_the_next_call(family: str) -> None:
    """A call that asks for keys and values gets those of all places, as without whet, by any name and place."""
    model, ids = tiny_decoder(family).eval(), torch.randint(10, 200, (2, 7))
    wanted = model(input_ids=ids).logits
    model = whet.optimize(model)
    first = model(input_ids=ids[:, :5], use_cache=True)
    name = next(name for name in CACHE_NAMES if name in list(first))  # `in first` accepts the older name as well
    rest = model(input_ids=ids[:, 5:], use_cache=True, **{name: first[name]})
    torch.testing.assert_close(torch.cat([first.logits, rest.logits], 1), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("way", ["Trainer", "optimize"])
def test_rows_padded_on_the_left_train_as_in_transformers(tmp_path: Path, way: str) -> None:
    """Their first token is predicted from padding: such a batch runs with it."""
    rows = token_rows(5, labelled=1.0)
    batch = {name: column.flip(1) for name, column in collate(rows).items()}
    wanted = tiny_decoder("gpt2").train()(**batch).loss
    if way == "optimize":
        loss = whet.optimize(tiny_decoder("gpt2")).train()(**batch).loss
    else:
        args = arguments(tmp_path)
        trainer = engine.Trainer(
            model=tiny_decoder("gpt2"), args=args, train_dataset=rows, data_collator=lambda _: batch
        )
        found = trainer.objective.batch(rows, range(5), 0)
        assert found.columns is None
        trainer.model.train()
        loss = trainer.objective.loss_sum(trainer.objective.forward(found, seed=0, step=0), found)
        loss = loss / trainer.objective.count(found)
    assert float(loss.detach()) == pytest.approx(float(wanted.detach()), rel=1e-6)


def test_capped_attention_runs_padded_and_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = token_rows(6)
    model = tiny_decoder("gemma2", attn_logit_softcapping=5.0, attn_implementation="eager")
    batch = collate(rows)
    wanted = float(model.train()(**batch).loss.detach())
    trainer = engine.Trainer(
        model=model, args=arguments(tmp_path, max_steps=1, per_device_train_batch_size=6),
        train_dataset=rows, data_collator=collate,
    )  # fmt: skip
    assert not trainer.objective.packed
    trainer.train()
    assert losses(trainer)[0] == pytest.approx(wanted, rel=1e-5)
    with pytest.raises(ConfigError, match="caps its scores"):
        whet.optimize(tiny_decoder("gemma2", attn_logit_softcapping=5.0))


def test_caps_are_those_of_the_attention_modules() -> None:
    """Each has read the configuration when it was made."""
    model = tiny_decoder("gemma2", attn_logit_softcapping=5.0)
    model.config.attn_logit_softcapping = None
    with pytest.raises(ConfigError, match=r"caps its scores \(attn_logit_softcapping 5.0\)"):
        whet.optimize(model)
    model = tiny_decoder("gemma2", use_cache=False).eval()
    model.config.attn_logit_softcapping = 5.0
    batch = collate(token_rows(4))
    real, wanted = batch["attention_mask"].bool(), model(**batch).logits
    model = whet.optimize(model)
    torch.testing.assert_close(model(**batch).logits[real], wanted[real], rtol=0, atol=1e-5)
    model.model.layers[1].self_attn.attn_logit_softcapping = 5.0
    with pytest.raises(ConfigError, match=r"Gemma2Attention computes attention with softcap"):
        model(**batch)


def test_decoder_that_classifies_runs_padded(tmp_path: Path) -> None:
    """Its head reads the last token of each row."""
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(tiny_config("llama", num_labels=3))
    rows = [{"input_ids": row["input_ids"], "labels": n % 3} for n, row in enumerate(token_rows(6))]

    def batch(given: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        padded = collate([row | {"labels": row["input_ids"]} for row in given])
        return padded | {"labels": torch.tensor([row["labels"] for row in given])}

    wanted = float(model(**batch(rows)).loss.detach())
    trainer = engine.Trainer(
        model=model, args=arguments(tmp_path, max_steps=1, per_device_train_batch_size=6),
        train_dataset=rows, data_collator=batch,
    )  # fmt: skip
    assert not trainer.objective.packed
    trainer.train()
    assert losses(trainer)[0] == pytest.approx(wanted, rel=1e-5)


def test_bidirectional_decoder_is_not_packed_as_a_causal_one(tmp_path: Path) -> None:
    rows = token_rows(6)
    wanted = float(tiny_decoder("llama", is_causal=False).train()(**collate(rows)).loss.detach())
    trainer = engine.Trainer(
        model=tiny_decoder("llama", is_causal=False),
        args=arguments(tmp_path, max_steps=1, per_device_train_batch_size=6),
        train_dataset=rows, data_collator=collate,
    )  # fmt: skip
    assert not trainer.objective.packed
    trainer.train()
    assert losses(trainer)[0] == pytest.approx(wanted, rel=1e-5)


@some
def test_trained_decoder_is_saved_and_loaded_by_transformers(tmp_path: Path, family: str) -> None:
    rows = token_rows(8)
    trainer = trainer_of(tmp_path / "run", tiny_decoder(family), rows, max_steps=2)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    batch = trainer.objective.batch(rows, range(8), 0)
    trainer.model.eval()
    with torch.no_grad():
        ours = trainer.objective.loss_sum(trainer.objective.forward(batch, seed=0, step=0), batch)
        theirs = loaded(**collate(rows)).loss * trainer.objective.count(batch)
    assert float(ours) == pytest.approx(float(theirs), rel=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_batch_without_targets_has_the_loss_and_gradients_0(tmp_path: Path, family: str) -> None:
    """transformers' mean over no targets is NaN; padded batches on the left, or capped scores, go through it."""
    rows = [row | {"labels": [-100] * len(row["labels"])} for row in token_rows(2)]
    batch = {name: column.flip(1) for name, column in collate(rows).items()}
    capped = {"attn_logit_softcapping": 5.0, "attn_implementation": "eager"} if family == "gemma2" else {}
    model = tiny_decoder(family, **capped)
    trainer = engine.Trainer(model=model, args=arguments(tmp_path), train_dataset=rows, data_collator=lambda _: batch)
    found = trainer.objective.batch(rows, range(2), 0)
    output = trainer.objective.forward(found, seed=0, step=0)
    if family == "llama" and found.columns is None:  # the loss of gemma2 never is this mean
        assert torch.isnan(output.loss)
    loss = trainer.objective.loss_sum(output, found)
    loss.backward()
    assert float(loss.detach()) == 0
    assert all(torch.isfinite(p.grad).all() for p in trainer.model.parameters() if p.grad is not None)


def test_attention_that_is_made_bidirectional_later_runs_padded(tmp_path: Path) -> None:
    """By `is_causal` of its modules, as text encoders are made of decoders; the rows have one length."""
    rows = token_rows(6, lengths=(12, 12))

    def turned(model: Any) -> Any:
        for layer in model.model.layers:
            layer.self_attn.is_causal = False
        return model.train()

    batch = {name: value for name, value in collate(rows).items() if name != "attention_mask"}
    wanted = float(turned(tiny_decoder("llama"))(**batch).loss.detach())
    assert wanted != pytest.approx(float(tiny_decoder("llama").train()(**batch).loss.detach()), rel=1e-3)
    for when in ("before", "later"):
        model = tiny_decoder("llama")
        trainer = engine.Trainer(
            model=turned(model) if when == "before" else model,
            args=arguments(tmp_path / when, max_steps=1, per_device_train_batch_size=6),
            train_dataset=rows, data_collator=collate,
        )  # fmt: skip
        turned(model)
        trainer.train()
        assert losses(trainer)[0] == pytest.approx(wanted, rel=1e-5)
