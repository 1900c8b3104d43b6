"""A dense model with experts: the same model at first, and one curve however its steps are split."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from sparse_models import SPARSE_FAMILIES, dense_model, logged, sparse_model, trainer
from transformers import AutoModelForCausalLM

import whet
from tiny import assert_same_weights, losses, padded, tiny_rows, weights_of
from tiny_decoders import collate, token_rows
from whet.errors import ConfigError
from whet.models.loading.heads import CAUSAL_LM
from whet.models.loading.load import ModelSource, load_model

ROUNDING = 1e-5
"""Relative, of a loss: a product of some rows may sum in another order than that of all."""
SPLIT = 1e-6
"""Sums over tokens in another order."""


@pytest.mark.parametrize("family", SPARSE_FAMILIES)
def test_upcycled_model_starts_at_the_loss_of_the_dense_one(family: str, tmp_path: Path) -> None:
    """The loss of the task; the routers' losses come on top."""
    dense = trainer(tmp_path, dense_model(family), max_steps=1)
    dense.train()
    for top_k in (1, 2) if family in ("bert", "modernbert", "llama", "gpt2") else (1,):
        sparse = trainer(tmp_path, sparse_model(family, top_k=top_k), max_steps=1)
        sparse.train()
        assert logged(sparse, "task_loss") == pytest.approx(losses(dense), rel=ROUNDING)
        (balance,), (z_loss,) = logged(sparse, "moe_balance_loss"), logged(sparse, "moe_z_loss")
        total = losses(dense)[0] + 0.01 * balance + 0.001 * z_loss
        assert losses(sparse) == pytest.approx([total], rel=ROUNDING)
        assert balance >= 1.0 - 1e-6


@pytest.mark.parametrize("family", ["bert", "distilbert", "llama", "gpt2"])
def test_upcycled_model_computes_what_the_dense_one_did_outside_of_whet(family: str) -> None:
    """In padded calls, as in an evaluation loop of the user's own, or in generate."""
    causal = family in ("llama", "gpt2")
    batch = collate(token_rows(4)) if causal else padded([tiny_rows(4, family)[n] for n in range(4)], 0)
    inputs = {name: value for name, value in batch.items() if name != "labels" and not name.endswith("_positions")}
    first = "logits" if causal else "start_logits"
    with torch.no_grad():
        found, wanted = (one.eval()(**inputs)[first] for one in (sparse_model(family, top_k=2), dense_model(family)))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def run(folder: Path, family: str, **settings: Any) -> Any:
    """Train with dropout and a capacity that drops tokens."""
    model = sparse_model(family, dropout=0.1, top_k=2, capacity_factor=1.0)
    usual = {"per_device_train_batch_size": 12, "max_steps": 6, "learning_rate": 3e-3}
    found = trainer(folder, model, n_rows=60, **(usual | settings))
    found.train()
    return found


SPLITS: dict[str, dict[str, Any]] = {
    "accumulation": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3},
    "tokens": {"max_tokens_per_batch": 90},
    "blocks": {"gradient_checkpointing": True},
    "selective": {"gradient_checkpointing": True, "checkpointing_policy": "selective"},
}


@pytest.mark.parametrize("family", ["llama", pytest.param("distilbert", marks=pytest.mark.night)])
def test_curve_with_experts_does_not_depend_on_how_a_step_is_split(family: str, tmp_path: Path) -> None:
    """Nor do the balance and the number of dropped tokens: all of them count row by row."""
    wanted = run(tmp_path, family)
    assert sum(logged(wanted, "moe_dropped")) > 0
    for name, settings in SPLITS.items():
        found = run(tmp_path, family, **settings)
        for part in ("loss", "moe_balance_loss", "moe_z_loss"):
            assert logged(found, part) == pytest.approx(logged(wanted, part), rel=SPLIT), (name, part)
        assert logged(found, "moe_dropped") == logged(wanted, "moe_dropped"), name
        assert_same_weights(weights_of(found.model), weights_of(wanted.model), within=1e-5)


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_bf16_trains_experts(family: str, tmp_path: Path) -> None:
    """The curve is that of fp32 to the 2 to 3 digits of bf16."""
    runs = [trainer(tmp_path, sparse_model(family), max_steps=4, precision=one) for one in ("fp32", "bf16")]
    for one in runs:
        one.train()
    assert losses(runs[1]) == pytest.approx(losses(runs[0]), rel=2e-2)


@pytest.mark.night
@pytest.mark.slow
def test_experts_share_the_tokens_after_200_steps(tmp_path: Path) -> None:
    """Routers that prefer one expert learn to use all: the busiest gets less than twice the even share."""
    model = sparse_model("llama", experts=8, aux_loss_coef=0.03)
    with torch.no_grad():
        model.model.layers[1].mlp.router.weight[0] += 0.1
    found = trainer(
        tmp_path, model, n_rows=64, max_steps=200, learning_rate=2e-3, per_device_train_batch_size=16, logging_steps=20
    )
    found.train()
    largest = logged(found, "moe_load_max")  # each the mean of 20 steps
    assert largest[0] > 2 > largest[-1]


@pytest.mark.parametrize("how", ["save_pretrained", "a copy", "whet.Trainer"])
def test_model_saved_in_python_is_no_dense_model(how: str, tmp_path: Path) -> None:
    """transformers would give it new feed-forward parts; whet reads it with its experts."""
    model, out = sparse_model("llama", aux_loss_coef=0.0, z_loss_coef=0.0), tmp_path / "out"
    if how == "whet.Trainer":
        args = whet.TrainingArguments(output_dir=str(out), max_steps=1, save_steps=1, use_cpu=True, report_to="none")
        own = whet.Trainer(model=model, args=args, train_dataset=token_rows(4), data_collator=collate)
        own.train()
        own.save_model()
        folders = [out, out / "checkpoint-1"]
    else:
        (copy.deepcopy(model) if how == "a copy" else model).save_pretrained(out)
        folders = [out]
    for folder in folders:
        with pytest.raises(ValueError, match="whet-experts-llama"):
            AutoModelForCausalLM.from_pretrained(folder)
    read = load_model(ModelSource(model=str(out)), CAUSAL_LM)
    assert_same_weights(weights_of(read), weights_of(model), within=0)
    with pytest.raises(ConfigError, match="push_to_hub"):
        read.save_pretrained(out, push_to_hub=True)


def test_of_several_processes_the_main_one_writes_the_configuration(tmp_path: Path) -> None:
    model = sparse_model("llama")
    model.save_pretrained(tmp_path)
    saved = (tmp_path / "config.json").read_text("utf-8")
    assert "whet-experts-llama" in saved
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    (tmp_path / "config.json").write_text(cut := saved[: len(saved) // 2], "utf-8")  # the main process is writing it
    model.save_pretrained(tmp_path, is_main_process=False)
    model.save_pretrained(tmp_path, False)
    assert (tmp_path / "config.json").read_text("utf-8") == cut


_SAVE = """
import sys, torch
from sparse_models import sparse_model
model, ids = sparse_model("llama").eval(), torch.arange(10, 34).view(2, 12)
torch.save((model, ids, model(ids).logits.detach()), sys.argv[1])
"""
_LOAD = """
import sys, torch
model, ids, wanted = torch.load(sys.argv[1], weights_only=False)
torch.testing.assert_close(model(ids).logits, wanted)
model.save_pretrained(sys.argv[2])
"""


def test_pickled_model_loads_in_programs_that_do_not_optimize(tmp_path: Path) -> None:
    model, out = tmp_path / "model.pt", tmp_path / "out"
    for program in (_SAVE, _LOAD):
        done = subprocess.run(
            [sys.executable, "-c", program, model, out], capture_output=True, text=True, check=False, timeout=300,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert "whet-experts-llama" in (out / "config.json").read_text("utf-8")
