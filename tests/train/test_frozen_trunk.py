"""`cache_frozen_trunk`: the losses of the run without it, the frozen layers once for each row, and what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import TrainerCallback

import engine
from tiny import DECODERS_WITH_OWN_CODE, FAMILIES_WITH_OWN_CODE, arguments, losses, tiny_model, tiny_rows
from tiny_decoders import collate, tiny_decoder
from whet.data.store import RowStore
from whet.engine import frozen_trunk as cache
from whet.errors import ConfigError, StorageError
from whet.models.view import ModelView

ROUNDING = 1e-5
"""Relative, of a loss: the frozen layers' products run over other rows together, which changes the order of sums."""
HALF_ROUNDING = 2e-2
"""The same in bf16."""
N_ROWS = 12


def decoder_rows() -> RowStore:
    """Rows of tokens that are their own labels."""
    found = tiny_rows(N_ROWS)
    return RowStore(found.cu_seqlens, {"input_ids": found.tokens["input_ids"], "labels": found.tokens["input_ids"]})


def trainer_of(folder: Path, family: str = "bert", model: Any = None, **settings: Any) -> engine.Trainer:
    """Return a trainer for three epochs whose first block is frozen."""
    causal = family in DECODERS_WITH_OWN_CODE
    make = tiny_decoder if causal else tiny_model
    usual = {"num_train_epochs": 3, "freeze_layers": 1, "learning_rate": 5e-3, "warmup_steps": 0, "precision": "fp32"}
    rows = decoder_rows() if causal else tiny_rows(N_ROWS, family)
    args = arguments(folder, **(usual | settings))
    model = model or make(family, dropout=0.1)
    return engine.Trainer(model=model, args=args, train_dataset=rows, data_collator=collate if causal else None)


def curve(folder: Path, family: str = "bert", **settings: Any) -> list[float]:
    trainer = trainer_of(folder, family, **settings)
    trainer.train()
    return losses(trainer)


class Uses:
    """Counts the tokens that a module computes."""

    def __init__(self, module: nn.Module) -> None:
        self.n_tokens = 0
        module.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, _: nn.Module, args: Any, options: Mapping[str, Any]) -> None:
        states = args[0] if args else options["hidden_states"]
        self.n_tokens += states.shape[0] * states.shape[1]


@pytest.mark.parametrize("family", FAMILIES_WITH_OWN_CODE + DECODERS_WITH_OWN_CODE)
def test_losses_are_those_without_it(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_TOKENS", 100)  # several groups
    sparse = family in ("mixtral", "olmoe") or "moe" in family
    if not ModelView(tiny_decoder(family) if family in DECODERS_WITH_OWN_CODE else tiny_model(family)).depths():
        return
    if sparse:
        with pytest.raises(ConfigError, match="experts"):
            curve(tmp_path, family, cache_frozen_trunk=True)
        return
    wanted = curve(tmp_path / "plain", family)
    found = curve(tmp_path / "cached", family, cache_frozen_trunk=True)
    assert len(found) == 9
    assert found == pytest.approx(wanted, rel=ROUNDING)
    assert wanted[0] != pytest.approx(wanted[-1], rel=1e-2)  # it learns something


WAYS: dict[str, dict[str, Any]] = {
    "all blocks": {"freeze_layers": 2},
    "accumulated": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
    "by tokens": {"max_tokens_per_batch": 60},
    "blocks": {"gradient_checkpointing": True},
    "selective": {"gradient_checkpointing": True, "checkpointing_policy": "selective"},
    "workers": {"dataloader_num_workers": 2},
    "random order": {"train_sampling_strategy": "random"},
    "bf16": {"precision": "bf16"},
    "averaged": {"weight_averaging_start": 0.3},
    "in backward": {"optimizer_in_backward": True, "max_grad_norm": 0.0},
    "rates of layers": {"layerwise_lr_decay": 0.5},
    "new layers": {"reinit_layers": 1},
    "stage of one rank": {"zero_stage": 3},
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_train_has_the_curve_without_it(way: str, tmp_path: Path) -> None:
    wanted = curve(tmp_path / "plain", **WAYS[way])
    found = curve(tmp_path / "cached", cache_frozen_trunk=True, **WAYS[way])
    assert found == pytest.approx(wanted, rel=HALF_ROUNDING if way == "bf16" else ROUNDING)


@pytest.mark.parametrize("cached", [False, True])
def test_frozen_blocks_run_once_for_each_row(cached: bool, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, cache_frozen_trunk=cached)
    first, second = (Uses(block.get_submodule("attention")) for _, block in ModelView(trainer.model).blocks())
    trainer.train()
    n_tokens = int(tiny_rows(N_ROWS).cu_seqlens[-1])
    assert second.n_tokens >= 3 * n_tokens
    # the first group runs twice: its results must agree. The filling of a batch is at most a 32nd of it and 63 tokens
    most = 2 * n_tokens * 33 / 32 + 2 * 63
    assert (first.n_tokens <= most) == cached


def test_nothing_is_left_on_the_disk(tmp_path: Path) -> None:
    for name, cached in {"plain": False, "cached": True}.items():
        trainer_of(tmp_path / name, cache_frozen_trunk=cached).train()
    plain, found = (list((tmp_path / name).rglob("*")) for name in ("plain", "cached"))
    assert len(found) == len(plain)


def test_evaluation_computes_rows_of_its_own(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, cache_frozen_trunk=True)
    trainer.train()
    plain = trainer_of(tmp_path)
    plain.model.load_state_dict(trainer.model.state_dict())
    rows = tiny_rows(5, seed=7)
    assert trainer.evaluate(rows)["eval_loss"] == pytest.approx(plain.evaluate(rows)["eval_loss"], rel=ROUNDING)


def test_resumed_run_has_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of the second epoch, with states that it computes again."""
    monkeypatch.setattr(cache, "_TOKENS", 50)
    saving = {"save_strategy": "steps", "save_steps": 4, "cache_frozen_trunk": True, "num_train_epochs": 3}
    trainer_of(tmp_path / "run", **saving).train()
    wanted = load_file(tmp_path / "run" / "checkpoint-8" / "model.safetensors")
    shutil.copytree(tmp_path / "run" / "checkpoint-4", tmp_path / "again" / "checkpoint-4")
    trainer_of(tmp_path / "again", **saving).train(resume_from_checkpoint=True)
    found = load_file(tmp_path / "again" / "checkpoint-8" / "model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft asks for it
def test_adapters_above_the_frozen_layers_have_the_curve_without_it(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def model() -> Any:
        base = tiny_model("bert", dropout=0.1)
        torch.manual_seed(1)
        config = peft.LoraConfig(
            task_type="QUESTION_ANS", target_modules=["query", "dense"], layers_to_transform=[1], r=4,
            layers_pattern=["layer"], init_lora_weights="gaussian", lora_dropout=0.1, modules_to_save=["qa_outputs"],
        )  # fmt: skip
        return peft.get_peft_model(base, config)

    wanted = curve(tmp_path / "plain", model=model())
    found = curve(tmp_path / "cached", model=model(), cache_frozen_trunk=True)
    assert found == pytest.approx(wanted, rel=ROUNDING)


class Thaws(TrainerCallback):
    """Trains the first block from the second epoch on."""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, *, model: nn.Module, **_: Any) -> None:
        if state.epoch and state.epoch >= 1:
            next(iter(dict(ModelView(model).blocks()).values())).requires_grad_(True)


class Writes(TrainerCallback):
    """Changes a frozen weight in the second epoch."""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, *, model: nn.Module, **_: Any) -> None:
        if state.epoch and state.epoch >= 1:
            with torch.no_grad():
                ModelView(model).tables()[0].module.weight.mul_(1.1)  # pyright: ignore


@pytest.mark.parametrize("callback", [Thaws, Writes])
def test_frozen_layers_that_change_end_the_run(callback: Any, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, cache_frozen_trunk=True)
    trainer.events.add_callback(callback())
    with pytest.raises(ConfigError, match="frozen layers changed"):
        trainer.train()


def test_dropout_in_the_frozen_layers_is_refused(tmp_path: Path) -> None:
    """Such as that of a module which a callback switches on again."""
    trainer = trainer_of(tmp_path, cache_frozen_trunk=True)
    block = ModelView(trainer.model).blocks()[0].module
    del block.__dict__["train"]
    with pytest.raises(ConfigError, match="other results each time"):
        trainer.train()


def test_rows_that_change_are_refused(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0)

    def masking(rows: Any) -> Any:
        batch = collate(rows)
        batch["input_ids"][:, 1] = int(numbers.integers(20, 150))
        return batch

    trainer = trainer_of(tmp_path, "llama", cache_frozen_trunk=True, num_train_epochs=1)
    args, model = trainer.args, trainer.model
    trainer = engine.Trainer(model=model, args=args, train_dataset=decoder_rows(), data_collator=masking)
    with pytest.raises(ConfigError, match="not the same each time"):
        trainer.train()


def test_full_disk_is_reported_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "free_bytes", lambda _: 1000)
    trainer = trainer_of(tmp_path, cache_frozen_trunk=True)
    with pytest.raises(StorageError, match="no room for the hidden states"):
        trainer.train()
    assert trainer.state.global_step == 0


REFUSED: dict[str, dict[str, Any]] = {
    "without freeze_layers of 1 or more": {"freeze_layers": None},
    "without freeze_layers of 1 or more ": {"freeze_layers": 0},
    "torch_compile": {"torch_compile": True},
    "padding_in_loss": {"padding_in_loss": "sampled"},
    "label_smoothing_factor": {"label_smoothing_factor": 0.1},
    "whose batches run padded": {"attn_implementation": "sdpa"},
}


@pytest.mark.parametrize("says", REFUSED)
def test_what_keeps_no_states_is_refused(says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says.strip()):
        trainer_of(tmp_path, cache_frozen_trunk=True, **REFUSED[says]).train()


def test_rows_of_another_kind_are_refused(tmp_path: Path) -> None:
    args = arguments(tmp_path, freeze_layers=1, cache_frozen_trunk=True)
    rows = tiny_rows(8)
    trainer = engine.Trainer(model=tiny_model("bert"), args=args, train_dataset=[rows[n] for n in range(8)])
    with pytest.raises(ConfigError, match="rows in a list"):
        trainer.train()
