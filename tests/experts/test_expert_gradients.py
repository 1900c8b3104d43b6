"""Every weight of a model with experts learns, and what experts do not go with is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from sparse_models import dense_model, logged, sparse_model, trainer
from torch import nn
from transformers import AutoModelForSequenceClassification

import engine
import whet
from tiny import arguments, padded, tiny_config, tiny_model
from tiny_decoders import collate, token_rows
from whet.errors import ConfigError
from whet.models.experts.layer import layers_of
from whet.models.experts.settings import ExpertSettings
from whet.models.experts.upcycle import upcycle

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
CHECKPOINTING: dict[str, dict[str, Any]] = {
    "all kept": {},
    "blocks": {"gradient_checkpointing": True},
    "selective": {"gradient_checkpointing": True, "checkpointing_policy": "selective"},
}


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("adapter", [True, False])
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_every_weight_next_to_experts_has_a_gradient(
    checkpointing: str, adapter: bool, packed: bool, tmp_path: Path
) -> None:
    """The losses of the first step are the same in all of these runs: what is kept and computed changes nothing."""
    model = sparse_model("qwen3", top_k=2)
    if adapter:
        peft = pytest.importorskip("peft")
        names = [name for name, _ in layers_of(model)]
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=2, modules_to_save=names))
    settings: dict[str, Any] = {"max_steps": 1, "per_device_train_batch_size": 8}
    wanted = trainer(tmp_path, sparse_model("qwen3", top_k=2), n_rows=8, **settings)
    wanted.train()
    settings |= {"attn_implementation": None if packed else "sdpa"} | CHECKPOINTING[checkpointing]
    found = engine.Trainer(model, arguments(tmp_path, **settings), train_dataset=token_rows(8), data_collator=collate)
    assert found.objective.packed == packed
    found.train()
    (task,), (balance,) = logged(found, "task_loss"), logged(found, "moe_balance_loss")
    assert task == pytest.approx(logged(wanted, "task_loss")[0], rel=1e-5)
    assert balance == pytest.approx(logged(wanted, "moe_balance_loss")[0], rel=1e-5)


def test_expert_weight_without_a_gradient_ends_the_first_step(tmp_path: Path) -> None:
    """Such as that of a layer whose result nobody reads."""
    model = sparse_model("bert")
    layer = layers_of(model)[0][1]
    forward: Any = lambda x, *_: layer.router(x).sum() * 0.0 + x[..., :1].expand(x.shape)  # noqa: E731
    layer.forward = forward
    model.bert.encoder.layer[1].output.dense = nn.Linear(32, 32)
    found = trainer(tmp_path, model, max_steps=2)
    with pytest.raises(ConfigError, match=r"intermediate\.down_bias"):
        found.train()


def test_experts_need_a_known_feed_forward_part_for_each_block() -> None:
    for model, says in ((tiny_model("albert"), "feed-forward parts"), (nn.Sequential(nn.Linear(2, 2)), "config")):
        with pytest.raises((ConfigError, AttributeError), match=says):
            upcycle(model, ExpertSettings(experts=4))
    with pytest.raises(ConfigError, match="moe_every 3 of 2 blocks"):
        upcycle(dense_model("bert"), ExpertSettings(experts=4, every=3))
    with pytest.raises(ConfigError, match="dropout between their layers"):
        upcycle(tiny_model("modernbert", dropout=0.1), ExpertSettings(experts=4))


def _sparse_classifier() -> Any:
    torch.manual_seed(0)
    return upcycle(AutoModelForSequenceClassification.from_config(tiny_config("bert")), ExpertSettings(experts=4))


def test_loss_that_would_leave_the_balance_out_is_refused(tmp_path: Path) -> None:
    """A loss of smoothed labels, and a loop outside of whet; without balance both train."""
    rows = [{"input_ids": one["input_ids"], "labels": n % 2} for n, one in enumerate(token_rows(8))]
    args = arguments(tmp_path, max_steps=1, label_smoothing_factor=0.1)
    collator = lambda taken: padded(taken, 0)  # noqa: E731
    with pytest.raises(ConfigError, match="balance loss of experts") as refused:
        engine.Trainer(_sparse_classifier(), args, train_dataset=rows, data_collator=collator).train()
    model = _sparse_classifier()
    call = re.search(r"whet\.upcycle\(model, whet\.ExpertSettings\(([^)]*)\)\)", refused.value.problems[0].fix)
    assert call is not None
    given = {name: json.loads(value) for name, value in (pair.split("=") for pair in call[1].split(", "))}
    whet.upcycle(model, ExpertSettings(**given))
    with pytest.raises(ConfigError, match="does not train the routers"):
        whet.optimize(sparse_model("bert"))
    free = {"aux_loss_coef": 0.0, "z_loss_coef": 0.0}
    engine.Trainer(model, args, train_dataset=rows, data_collator=collator).train()
    assert whet.changes(whet.optimize(sparse_model("bert", **free)))


def test_compiled_and_new_blocks_with_experts_are_refused(tmp_path: Path) -> None:
    for settings, says in (({"torch_compile": True}, "torch_compile"), ({"reinit_layers": 1}, "reinit_layers")):
        with pytest.raises(ConfigError, match=says):
            trainer(tmp_path, sparse_model("bert"), max_steps=1, **settings).train()


def test_frozen_router_adds_no_balance(tmp_path: Path) -> None:
    model = sparse_model("bert")
    for _, layer in layers_of(model):
        layer.router.requires_grad_(False)
    found = trainer(tmp_path, model, max_steps=1)
    found.train()
    assert not logged(found, "moe_balance_loss")


def test_classifier_with_experts_in_its_last_block_computes_all_tokens(tmp_path: Path) -> None:
    """Their balance is that of all tokens, not of those alone that the head reads."""
    rows = [{"input_ids": one["input_ids"], "labels": n % 2} for n, one in enumerate(token_rows(8))]
    seen = []
    for tokens in ("read", "all"):
        args = arguments(tmp_path, max_steps=1, last_block_tokens=tokens)
        found = engine.Trainer(
            _sparse_classifier(), args, train_dataset=rows, data_collator=lambda taken: padded(taken, 0)
        )
        found.train()
        seen.append(logged(found, "moe_balance_loss"))
    assert seen[0] == seen[1]
