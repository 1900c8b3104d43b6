"""`whet.optimize` in somebody else's loop: the same results, and exactly undone."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AlbertConfig,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    BertConfig,
    DistilBertConfig,
    ElectraConfig,
    GPT2Config,
    RobertaConfig,
)

import whet

SHAPE = {
    "vocab_size": 120,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 64,
}
CONFIGS = {
    "bert": BertConfig(**SHAPE),
    "roberta": RobertaConfig(**SHAPE, pad_token_id=1),
    "electra": ElectraConfig(**SHAPE, embedding_size=32),
    "albert": AlbertConfig(**SHAPE, embedding_size=32),
    "distilbert": DistilBertConfig(vocab_size=120, dim=48, n_layers=2, n_heads=4, hidden_dim=80),
}
HEADS = {"qa": AutoModelForQuestionAnswering, "classes": AutoModelForSequenceClassification}


def model_of(family: str, head: str = "qa") -> Any:
    torch.manual_seed(3)
    return HEADS[head].from_config(deepcopy(CONFIGS[family])).eval()  # models write into their config


def padded_batch(family: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    ids, mask = torch.randint(5, 120, (4, 18)), torch.ones(4, 18, dtype=torch.long)
    mask[1, 11:], mask[3, 1:] = 0, 0
    ids[mask == 0] = CONFIGS[family].pad_token_id
    return {"input_ids": ids, "attention_mask": mask}


def real_logits(output: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    if "logits" in output:
        return output.logits
    return torch.stack([output.start_logits, output.end_logits], -1)[batch["attention_mask"].bool()]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("family", CONFIGS)
def test_logits_are_those_of_the_untouched_model_and_restore_is_exact(family: str, head: str) -> None:
    model, batch = model_of(family, head), padded_batch(family)
    before, described, names = model(**batch), str(model), list(model.state_dict())
    assert whet.optimize(model) is model
    # fp32 sums in another order: a few units in the last place of logits below 1
    torch.testing.assert_close(real_logits(model(**batch), batch), real_logits(before, batch), rtol=0, atol=2e-6)
    assert list(model.state_dict()) == names
    whet.restore(model)
    assert str(model) == described
    assert torch.equal(real_logits(model(**batch), batch), real_logits(before, batch))


@pytest.mark.parametrize("family", CONFIGS)
def test_gradients_are_those_of_the_untouched_model(family: str) -> None:
    model, batch = model_of(family), padded_batch(family)

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        real_logits(model(**batch), batch).square().sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    plain = gradients()
    whet.optimize(model)
    fused = gradients()
    assert plain.keys() == fused.keys()
    largest = max(g.norm().item() for g in plain.values())
    for name, gradient in plain.items():  # bounds that also hold for biases whose gradient is zero but for rounding
        assert (gradient - fused[name]).norm().item() <= 1e-5 * (gradient.norm().item() + largest), name


def test_bf16_computes_close_to_fp32_and_keeps_fp32_weights() -> None:
    model, batch = model_of("bert"), padded_batch("bert")
    before = real_logits(model(**batch), batch)
    whet.optimize(model, dtype=torch.bfloat16)
    # products carry 8 bits; two layers of them stay within about a hundredth of the logits' size
    bound = 0.02 * before.abs().max().item()
    torch.testing.assert_close(real_logits(model(**batch), batch), before, rtol=0, atol=bound)
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_dropout_differs_from_call_to_call_and_repeats_from_the_seed() -> None:
    model, batch = model_of("bert").train(), padded_batch("bert")

    def two_calls() -> list[torch.Tensor]:
        torch.manual_seed(11)
        whet.optimize(model)
        return [real_logits(model(**batch), batch) for _ in range(2)]

    first, again = two_calls(), two_calls()
    assert not torch.equal(first[0], first[1])
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])


def test_with_an_optimizer_it_returns_both() -> None:
    model = model_of("bert")
    optimizer = torch.optim.AdamW(model.parameters())
    assert whet.optimize(model, optimizer=optimizer, dtype=torch.bfloat16) == (model, optimizer)


def test_an_unknown_family_is_refused_by_name() -> None:
    model = AutoModelForSequenceClassification.from_config(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=50))
    with pytest.raises(whet.ConfigError, match="GPT2ForSequenceClassification"):
        whet.optimize(model)


def test_a_saved_folder_holds_nothing_of_whet(tmp_path: Path) -> None:
    model, batch = model_of("bert"), padded_batch("bert")
    before = real_logits(model(**batch), batch)
    whet.optimize(model).save_pretrained(tmp_path)
    assert "whet" not in (tmp_path / "config.json").read_text()
    loaded = AutoModelForQuestionAnswering.from_pretrained(tmp_path).eval()
    assert torch.equal(real_logits(loaded(**batch), batch), before)


def test_transformers_own_trainer_trains_the_same(tmp_path: Path) -> None:
    """Without dropout, its losses on padded batches are the same with and without whet's operators."""
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
    from transformers import Trainer, TrainingArguments

    batch = padded_batch("bert")
    rows = [{name: column[i].tolist() for name, column in batch.items()} | {"labels": i % 2} for i in range(4)]

    def losses(folder: str, change: Any) -> list[float]:
        torch.manual_seed(3)
        config = BertConfig(**SHAPE, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        model = AutoModelForSequenceClassification.from_config(config)
        change(model)
        args = TrainingArguments(
            output_dir=str(tmp_path / folder), max_steps=10, per_device_train_batch_size=2, learning_rate=1e-3,
            logging_steps=1, report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no",
        )  # fmt: skip
        trainer = Trainer(model=model, args=args, train_dataset=rows)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    plain, changed = losses("plain", lambda model: None), losses("whet", whet.optimize)
    assert len(plain) == 10
    assert changed == pytest.approx(plain, rel=1e-4)  # the log rounds; ten steps carry fp32 rounding on


def span_loss(output: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mean cross entropy of the spans (0, 0), padding left out of the softmax."""
    padding, targets = batch["attention_mask"] == 0, torch.zeros(4, dtype=torch.long)
    sides = [logits.masked_fill(padding, -torch.inf) for logits in (output.start_logits, output.end_logits)]
    return sum(torch.nn.functional.cross_entropy(logits, targets) for logits in sides) / 2


def batch_padded(family: str, side: str) -> dict[str, torch.Tensor]:
    """Rows whose padding stands elsewhere than on the right."""
    mask = torch.ones(4, 18, dtype=torch.long)
    mask[1, slice(7) if side == "left" else slice(4, 7)] = 0
    torch.manual_seed(6)
    ids = torch.where(mask == 1, torch.randint(5, 120, (4, 18)), CONFIGS[family].pad_token_id)
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("side", ["left", "inside"])
def test_rows_padded_elsewhere_are_understood_as_before(
    family: str, side: str, head: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Each token has the position that the untouched model gives it, and a class the place that it is read from."""
    model, batch = model_of(family, head), batch_padded(family, side)
    before = real_logits(model(**batch), batch)
    whet.optimize(model)
    for _ in range(2):
        torch.testing.assert_close(real_logits(model(**batch), batch), before, rtol=0, atol=2e-6)
    assert len([text for text in caplog.messages if "do not begin with a token" in text]) == (side == "left")


def test_padding_none_leaves_zeros_and_a_loss_of_real_tokens_as_it_was() -> None:
    """What the docstring says of padding="none": states at padding are zeros, so logits there are the bias."""
    model, batch = model_of("bert"), padded_batch("bert")
    answers = {name: torch.zeros(4, dtype=torch.long) for name in ("start_positions", "end_positions")}
    before = model(**batch, **answers)
    found = whet.optimize(model, padding="none")(**batch, **answers)
    assert span_loss(found, batch).item() == pytest.approx(span_loss(before, batch).item(), rel=1e-6)
    assert found.loss.item() != pytest.approx(before.loss.item(), rel=1e-5)
    assert torch.equal(found.start_logits[1, 11:], model.qa_outputs.bias[0].expand(7))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, "bf16"])
def test_a_dtype_that_it_cannot_compute_in_is_refused_and_changes_nothing(dtype: Any) -> None:
    model = model_of("bert")
    described = str(model)
    with pytest.raises(whet.ConfigError, match="computes in no such dtype") as caught:
        whet.optimize(model, dtype=dtype)
    assert "torch.bfloat16" in caught.value.problems[0].fix
    assert (str(model), whet.changes(model)) == (described, None)


def test_float32_is_computed_even_where_the_loop_asks_for_bfloat16() -> None:
    model, batch = model_of("bert"), padded_batch("bert")
    before = real_logits(model(**batch), batch)
    whet.optimize(model, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.bert(**batch).last_hidden_state
    assert hidden.dtype == torch.float32
    torch.testing.assert_close(real_logits(model(**batch), batch), before, rtol=0, atol=2e-6)
    torch.testing.assert_close(hidden, model.bert(**batch).last_hidden_state, rtol=0, atol=0)


def test_what_was_changed_can_be_asked(operators: None) -> None:
    model = model_of("bert")
    n_dropouts = sum(isinstance(module, torch.nn.Dropout) for module in model.modules())
    assert whet.changes(model) is None
    found = whet.changes(whet.optimize(model, dtype=torch.bfloat16))
    assert found is not None
    assert (found.attention_before, found.dropouts, found.dtype) == ("sdpa", n_dropouts, torch.bfloat16)
    assert (found.isa is None) == (found.fused == {})
    if found.fused:
        assert {name: found.fused[name] for name in ("BertSelfOutput", "BertEmbeddings")} == {
            "BertSelfOutput": 2,
            "BertEmbeddings": 1,
        }
    assert whet.changes(whet.restore(model)) is None
