"""layerwise_lr_decay: what lies deeper learns more slowly, for every family whose depth is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import Toy, toy_trainer
from transformers import AutoModelForQuestionAnswering, GPT2Config, T5Config

import engine
import whet
from tiny import FAMILIES, arguments, tiny_model, tiny_rows, weights_of
from whet.engine.update import rates_by_depth
from whet.optim import registry

DECAY = 0.5
N_BLOCKS = 2
ONE_STACK = [family for family in FAMILIES if family != "albert"]


def trainer_of(folder: Path, family: str = "bert", **changes: Any) -> engine.Trainer:
    usual: dict[str, Any] = {"layerwise_lr_decay": DECAY, "warmup_steps": 0, "lr_scheduler_type": "constant"}
    return engine.Trainer(
        tiny_model(family), arguments(folder, **(usual | changes)), train_dataset=tiny_rows(12, family)
    )


def rates_of(trainer: engine.Trainer) -> dict[str, float]:
    """The learning rate of each parameter, as a share of the highest."""
    names = {id(one): name for name, one in trainer.model.named_parameters()}
    rates = rates_by_depth(trainer.model, trainer.args)
    groups = registry.build(trainer.model, trainer.args, rates).param_groups
    return {names[id(p)]: group["lr"] / trainer.args.learning_rate for group in groups for p in group["params"]}


def depth_by_name(name: str) -> int:
    """How deep a parameter of a tiny model of two blocks is, read from its name."""
    words = name.split(".")
    if "relative_attention_bias" in words or any("embedding" in word for word in words):
        return 0
    if name.startswith("deberta.encoder.LayerNorm"):  # of the vectors by distance, which each block reads
        return 0
    return next((int(word) + 1 for word in words if word in ("0", "1")), N_BLOCKS + 1)


@pytest.mark.parametrize("family", ONE_STACK)
def test_rates_fall_with_the_depth(family: str, tmp_path: Path) -> None:
    found = rates_of(trainer_of(tmp_path, family))
    assert found == {name: DECAY ** (N_BLOCKS + 1 - depth_by_name(name)) for name in found}
    assert {*found.values()} == {1.0, 0.5, 0.25, 0.125}


def test_the_first_group_has_the_rate_that_is_logged(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, max_steps=1)
    trainer.train()
    logged = next(entry for entry in trainer.state.log_history if "learning_rate" in entry)
    assert logged["learning_rate"] == trainer.args.learning_rate


def test_a_step_of_sgd_is_smaller_by_the_rate(tmp_path: Path) -> None:
    """The first step of plain SGD is the gradient times the rate, so steps with and without decay have its ratio."""
    before = weights_of(tiny_model("bert"))
    steps = {}
    for decay in (1.0, DECAY):
        trainer = trainer_of(
            tmp_path, optim="sgd", learning_rate=1.0, max_grad_norm=0, max_steps=1, layerwise_lr_decay=decay
        )
        trainer.train()
        after = weights_of(trainer.model)
        steps[decay] = {name: after[name] - before[name] for name in before}
    for name in ("bert.encoder.layer.0.output.dense.weight", "bert.encoder.layer.1.output.dense.weight"):
        ratio = steps[DECAY][name].norm() / steps[1.0][name].norm()
        assert float(ratio) == pytest.approx(DECAY ** (2 if ".0." in name else 1), rel=1e-4)  # float32 weights near 0.1


@pytest.mark.parametrize("optim", ["adamw_torch", "adafactor", "lion_32bit", "muon", "adamw_whet_8bit"])
def test_every_optimizer_takes_the_rates(optim: str, tmp_path: Path) -> None:
    found = rates_of(trainer_of(tmp_path, optim=optim))
    assert found == {name: DECAY ** (N_BLOCKS + 1 - depth_by_name(name)) for name in found}


def test_the_schedule_scales_every_rate(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, lr_scheduler_type="linear", max_steps=4, num_train_epochs=2)
    trainer.train()
    groups = trainer.optimizer.param_groups
    assert {group["lr"] for group in groups} == {0.0}
    assert {group["initial_lr"] / trainer.args.learning_rate for group in groups} == {1.0, 0.5, 0.25, 0.125}


def test_a_decoder_has_depths_too(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=50, n_positions=40, n_embd=16, n_layer=2, n_head=2)
    model = AutoModelForQuestionAnswering.from_config(config)
    trainer = engine.Trainer(model, arguments(tmp_path, layerwise_lr_decay=DECAY), train_dataset=tiny_rows(4))
    found = rates_of(trainer)
    assert (found["transformer.wte.weight"], found["transformer.h.0.attn.c_attn.weight"]) == (0.125, 0.25)
    assert (found["transformer.h.1.attn.c_attn.weight"], found["qa_outputs.weight"]) == (0.5, 1.0)


def test_models_of_unknown_depth_are_refused_by_name(tmp_path: Path) -> None:
    t5 = AutoModelForQuestionAnswering.from_config(
        T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2)
    )
    for model, name in ((tiny_model("albert"), "Albert"), (t5, "T5"), (Toy(), "Toy")):
        trainer = engine.Trainer(model, arguments(tmp_path, layerwise_lr_decay=DECAY), train_dataset=tiny_rows(4))
        with pytest.raises(whet.ConfigError, match=f"(?s)layerwise_lr_decay does not go with this model.*{name}"):
            trainer.train()


def test_an_optimizer_without_these_rates_is_refused(tmp_path: Path) -> None:
    model = tiny_model("bert")
    given = torch.optim.AdamW(model.parameters(), lr=5e-4)
    args = arguments(tmp_path, layerwise_lr_decay=DECAY)
    trainer = engine.Trainer(model, args, train_dataset=tiny_rows(4), optimizers=(given, None))
    with pytest.raises(whet.ConfigError, match="layerwise_lr_decay is not carried out by this optimizer"):
        trainer.train()


def test_a_resumed_run_refuses_another_decay(tmp_path: Path) -> None:
    trainer_of(tmp_path, max_steps=2, save_strategy="steps", save_steps=1).train()
    other = trainer_of(tmp_path, max_steps=3, layerwise_lr_decay=0.9)
    with pytest.raises(whet.ConfigError, match=r"layerwise_lr_decay: 0\.5 in the checkpoint -> 0\.9 now"):
        other.train(resume_from_checkpoint="auto")
    allowed = trainer_of(tmp_path, max_steps=3, layerwise_lr_decay=0.9, resume_allow_changes=("layerwise_lr_decay",))
    allowed.train(resume_from_checkpoint="auto")
    rates = {round(group["initial_lr"] / allowed.args.learning_rate, 6) for group in allowed.optimizer.param_groups}
    assert rates == {1.0, 0.9, 0.81, 0.729}


@pytest.mark.parametrize(("first", "second"), [(1.0, DECAY), (DECAY, 1.0)])
@pytest.mark.parametrize("schedule", ["constant", "reduce_lr_on_plateau"])
def test_an_allowed_decay_may_begin_and_end(tmp_path: Path, first: float, second: float, schedule: str) -> None:
    usual = {"save_strategy": "steps", "save_steps": 1, "lr_scheduler_type": schedule, "eval_strategy": "epoch"}
    saved = _trained_with_evaluations(tmp_path, max_steps=2, layerwise_lr_decay=first, **usual)
    moments = {name: state["exp_avg"].clone() for name, state in _state_by_name(saved).items()}
    allowed = {"resume_allow_changes": ("layerwise_lr_decay",), "resume_from_checkpoint": "auto"}
    same = _trained_with_evaluations(tmp_path, max_steps=2, layerwise_lr_decay=second, **usual, **allowed)
    assert all(torch.equal(state["exp_avg"], moments[name]) for name, state in _state_by_name(same).items())
    found = _trained_with_evaluations(tmp_path, max_steps=3, layerwise_lr_decay=second, **usual, **allowed)
    rates = {group["lr"] / found.args.learning_rate for group in found.optimizer.param_groups}
    assert rates == {second**depth for depth in range(N_BLOCKS + 2)}


def _trained_with_evaluations(folder: Path, **changes: Any) -> engine.Trainer:
    rows = {"train_dataset": tiny_rows(12), "eval_dataset": tiny_rows(4)}
    trainer = engine.Trainer(tiny_model("bert"), arguments(folder, **({"warmup_steps": 0} | changes)), **rows)
    trainer.train()
    return trainer


def _state_by_name(trainer: engine.Trainer) -> dict[str, Any]:
    return {name: trainer.optimizer.state[one] for name, one in trainer.model.named_parameters()}


def test_a_toy_without_the_setting_trains_as_before(tmp_path: Path) -> None:
    assert toy_trainer(tmp_path).train().global_step == 3
