"""Encoders of families that whet has no file for: packed where a proof shows that this changes nothing."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    BertConfig,
    EuroBertForSequenceClassification,
    EuroBertForTokenClassification,
    EuroBertModel,
)
from transformers.models.bert.modeling_bert import BertPooler

import engine
import odd_encoders
import whet
from proven_models import PROVEN, batch, proven_config, shown
from tiny import Pad, arguments
from whet.kernels.library import library
from whet.models import known
from whet.models.proof import prove, trial

REFUSED = {
    "Windowed": "WindowedAttention computes attention with attention_mask",
    "Biased": "adds a bias of its own",
    "Shifted": "other hidden states",
    "Whispering": "depend on the tokens of other rows",
    "OwnPositions": "takes no position_ids",
    "Noisy": "random numbers outside of nn.Dropout",
    "SkipsLayers": "random numbers outside of nn.Dropout",
    "Random": "random, or depend on earlier calls",
    "Counting": "changes its buffer seen",
    "Experts": "experts",
    "Convolved": "holds a Conv1d",
    "Reaching": "more than a proof runs",
    "olmo": "causal",
    "dynamic_rotary": "longest row of a batch",
    "mobilebert": "join neighbouring tokens",
}


def odd(name: str) -> Any:
    torch.manual_seed(0)
    make = getattr(odd_encoders, name)
    return make(odd_encoders.config()) if isinstance(make, type) else make()


def _numpy_keys() -> list[int]:
    return np.random.get_state(legacy=False)["state"]["key"].tolist()  # pyright: ignore


def reason(model: Any) -> str:
    found = prove.ensure(model)
    assert found is not None
    return found.why_padded or ""


@pytest.mark.parametrize("family", PROVEN)
def test_an_unknown_encoder_runs_packed_and_equals_its_padded_self(family: str) -> None:
    """Through whet.optimize: hidden states of real tokens and all gradients, to rounding."""
    torch.manual_seed(0)
    model = AutoModel.from_config(proven_config(family)).eval()
    inputs, wanted = batch(), copy.deepcopy(model)
    optimized = whet.optimize(model)
    changes = whet.changes(optimized)
    assert changes is not None
    assert changes.fused or library() is None
    real = inputs["attention_mask"].bool()
    found, theirs = optimized(**inputs).last_hidden_state[real], wanted(**inputs).last_hidden_state[real]
    torch.testing.assert_close(found, theirs, rtol=0, atol=2e-5)  # both sum in fp32, in another order
    factors = torch.randn(found.shape)  # the sum of squares behind a norm hardly depends on anything
    (found * factors).sum().backward()
    (theirs * factors).sum().backward()
    for (name, one), other in zip(optimized.named_parameters(), wanted.parameters(), strict=True):
        if other.grad is not None:
            gap = float((one.grad - other.grad).abs().max())
            assert gap <= 1e-4 * max(1.0, float(other.grad.abs().max())), name


@pytest.mark.parametrize("name", REFUSED)
def test_an_encoder_that_mixes_rows_runs_padded_and_the_log_says_why(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = odd(name)
    with shown(caplog):
        engine.Trainer(model=model, args=arguments(tmp_path))
    assert REFUSED[name] in reason(model)
    assert any(REFUSED[name] in line and "may" in line for line in caplog.messages)
    with pytest.raises(whet.ConfigError, match="without padding"):
        whet.optimize(model)


def test_a_models_own_weights_cannot_hide_what_it_does() -> None:
    """The bias of a new model is zero: with these weights packed rows would equal padded ones."""
    model = odd("Biased")
    assert not any(bool(value.any()) for name, value in model.named_parameters() if "relative" in name)
    assert "bias" in reason(model)


def test_a_proof_leaves_no_trace() -> None:
    """Neither in the model, its gradients and its hooks, nor in any generator."""
    model: Any = EuroBertModel(odd_encoders.config(attention_dropout=0.1)).train()
    model.layers[0].mlp.eval()
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    generators = (torch.get_rng_state(), random.getstate(), _numpy_keys())
    assert reason(model) == ""
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert random.getstate() == generators[1]
    assert _numpy_keys() == generators[2]
    assert [module.training for module in model.modules()] == modes
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert all(bool((parameter.grad == 1).all()) for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.config._attn_implementation == "sdpa"
    assert calls == []


def test_a_proof_runs_under_no_grad_autocast_and_another_dtype() -> None:
    model: Any = EuroBertModel(odd_encoders.config())
    model.to(torch.bfloat16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert reason(model) == ""
    assert next(model.parameters()).dtype == torch.bfloat16


def test_a_model_without_values_or_with_integers_is_refused() -> None:
    with torch.device("meta"):
        assert "meta device" in reason(EuroBertModel(odd_encoders.config()))
    model: Any = EuroBertModel(odd_encoders.config())
    model.norm.weight = torch.nn.Parameter(torch.ones(32, dtype=torch.int8), requires_grad=False)
    assert "quantized" in reason(model)


def test_the_copy_of_a_deep_model_is_as_small_as_one_layer() -> None:
    def distinct_bytes(n_layers: int) -> int:
        config = odd_encoders.config()
        config.num_hidden_layers = n_layers
        model = EuroBertModel(config)
        copied, weights = trial.stand_in(model)
        assert len(copied.layers) == n_layers
        assert {id(one) for one in copied.parameters()} == {id(one) for one in weights.values()}
        return sum(one.numel() for one in weights.values())

    assert distinct_bytes(12) == distinct_bytes(2)


def test_a_verdict_holds_while_the_model_stays_the_same() -> None:
    model: Any = EuroBertModel(odd_encoders.config())
    assert reason(model) == ""
    first = known.verdict_on(model)
    assert prove.ensure(model) is first
    model.layers[1].self_attn = odd_encoders.BiasedAttention(model.config, 1)
    assert known.verdict_on(model) is None
    assert "bias" in reason(model)


def test_a_verdict_does_not_keep_its_model() -> None:
    model: Any = EuroBertModel(odd_encoders.config())
    prove.ensure(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_restore_takes_the_generic_operators_out() -> None:
    model: Any = EuroBertModel(odd_encoders.config())
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    types = [type(module) for module in model.modules()]
    whet.restore(whet.optimize(model))
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert [type(module) for module in model.modules()] == types


@pytest.mark.parametrize("pooling", ["bos", "mean", "late"])
def test_a_classifier_of_any_pooling_trains_as_transformers_trains_it(pooling: str, tmp_path: Path) -> None:
    """A class called ForSequenceClassification may average its tokens; the first token alone would be another model."""
    numbers, curves = np.random.default_rng(0), []
    rows = [
        {"input_ids": numbers.integers(4, 190, int(n)).tolist(), "labels": i % 2} for i, n in enumerate([9, 30, 4, 17])
    ]
    for optimized in (False, True):
        torch.manual_seed(0)
        model = EuroBertForSequenceClassification(odd_encoders.config(classifier_pooling=pooling))
        steps = _losses_by_whet(model, rows, tmp_path) if optimized else _losses_by_torch(model, rows)
        curves.append(steps)
    assert curves[1] == pytest.approx(curves[0], abs=2e-5)


def test_the_log_says_why_a_head_trains_with_its_padding(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A head of transformers' own modules that takes the first token of a row alone."""
    torch.manual_seed(0)
    model = EuroBertForTokenClassification(odd_encoders.config())
    model.classifier = nn.Sequential(nn.Linear(32, 2), BertPooler(BertConfig(hidden_size=2, num_attention_heads=1)))
    with shown(caplog):
        engine.Trainer(model=model, args=arguments(tmp_path))
    start = "EuroBertForTokenClassification trains with its padding: a trial of its head with packed rows"
    assert any(line.startswith(f"{start} failed: IndexError") for line in caplog.messages)


def _losses_by_torch(model: Any, rows: list[dict[str, Any]]) -> list[float]:
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0), []
    for _ in range(4):
        loss = model(**Pad()(rows)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def _losses_by_whet(model: Any, rows: list[dict[str, Any]], folder: Path) -> list[float]:
    settings = {"learning_rate": 5e-3, "lr_scheduler_type": "constant", "warmup_steps": 0, "max_grad_norm": 0.0}
    args = arguments(folder, max_steps=4, **settings)
    trainer = engine.Trainer(model=model, args=args, train_dataset=rows, data_collator=Pad())
    assert reason(model) == ""
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_masked_words_of_a_proven_model_compute_the_masked_places_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForMaskedLM.from_config(proven_config("eurobert"))
    trainer = engine.Trainer(model=model, args=arguments(tmp_path))
    assert type(trainer.objective).__name__ == "PackedHead"


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft 0.x reads a name that transformers renamed
def test_a_lora_adapter_on_an_unknown_encoder_runs_packed() -> None:
    peft = pytest.importorskip("peft")
    model = EuroBertForSequenceClassification(odd_encoders.config())
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], lora_dropout=0.1))
    optimized = whet.optimize(wrapped).eval()
    inputs = batch()
    with torch.no_grad():
        found = optimized(**inputs).logits
        wanted = whet.restore(optimized)(**inputs).logits
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)


def test_one_rows_tokens_do_not_reach_another_row_in_training() -> None:
    """With dropout on: bitwise, after the whole of whet.optimize."""
    torch.manual_seed(0)
    model = whet.optimize(AutoModel.from_config(proven_config("nomic_bert", dropout=0.1))).train()
    inputs = batch()
    changed = {**inputs, "input_ids": inputs["input_ids"].clone()}
    changed["input_ids"][1, :5] = 17
    found = []
    for one in (inputs, changed):
        torch.manual_seed(3)
        found.append(model(**one).last_hidden_state)
    assert torch.equal(found[0][[0, 2, 3]], found[1][[0, 2, 3]])
    assert not torch.equal(found[0][1], found[1][1])


def test_a_changed_model_is_found_after_its_configuration_has_changed() -> None:
    """A first call with labels sets problem_type, and a loop may set use_cache; anything else asks for a new proof."""
    model = AutoModel.from_config(proven_config("nomic_bert"))
    holder = whet.optimize(nn.ModuleDict({"tower": model}))
    for name, value in {"problem_type": "regression", "use_cache": False}.items():
        setattr(model.config, name, value)
        assert reason(model) == ""
    model.config.a_setting = 1
    assert whet.changes(holder) is not None
    assert whet.changes(whet.restore(holder)) is None
    assert "forward" not in vars(model)
