"""Experts next to padding, adapters, teachers, low precision and Muon."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from sparse_models import dense_model, logged, sparse_model, trainer

import engine
import whet
from text_tasks import examples, load, words
from tiny import arguments
from tiny_decoders import collate, tiny_decoder, token_rows
from whet.cli.main import run
from whet.errors import ConfigError
from whet.methods import grouped_experts
from whet.models.experts.layer import layers_of
from whet.models.experts.routing import within_capacity
from whet.optim.optimizers import muon

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


def limited(folder: Path, **settings: Any) -> Any:
    """Train a step with a capacity that drops tokens."""
    args = arguments(folder, max_steps=1, per_device_train_batch_size=8, **settings)
    model = sparse_model("qwen3", top_k=2, capacity_factor=0.5)
    found = engine.Trainer(model, args, train_dataset=token_rows(8), data_collator=collate)
    found.train()
    return found


@pytest.mark.parametrize("checkpointing", [False, True])
def test_padding_does_not_change_what_a_capacity_drops(checkpointing: bool, tmp_path: Path) -> None:
    packed = limited(tmp_path)
    padded = limited(tmp_path, attn_implementation="sdpa", gradient_checkpointing=checkpointing)
    assert (packed.objective.packed, padded.objective.packed) == (True, False)
    dropped = logged(packed, "moe_dropped")
    assert dropped[0] > 0
    assert logged(padded, "moe_dropped") == dropped
    for name in ("loss", "grad_norm"):  # sums in another order
        assert logged(padded, name) == pytest.approx(logged(packed, name), rel=1e-5)


def test_padding_takes_no_place_in_an_expert() -> None:
    experts = torch.tensor([[0], [0], [0], [0]])
    kept = within_capacity(experts, torch.tensor([-1, 0, 0, -1]), 1.0, 2)
    assert kept.flatten().tolist() == [False, True, False, False]


def test_a_capacity_without_known_rows_is_refused() -> None:
    """As in a training loop that calls the model itself."""
    model = sparse_model("llama", capacity_factor=1.0).train()
    batch = {name: value for name, value in collate(token_rows(2)).items() if name != "labels"}
    with pytest.raises(ConfigError, match="capacity"):
        model(**batch)
    model.eval()(**batch)


def test_experts_that_peft_keeps_complete_are_found_once() -> None:
    peft = pytest.importorskip("peft")
    model = tiny_decoder("mixtral")
    before = grouped_experts.experts_of(model)
    config = peft.LoraConfig(target_modules=["q_proj"], r=2, modules_to_save=["experts"])
    found = grouped_experts.experts_of(peft.get_peft_model(model, config))
    assert before
    assert set(map(type, found)) == set(map(type, before))


def test_muon_leaves_routers_and_biases_of_experts_to_adamw(capfd: pytest.CaptureFixture[str]) -> None:
    for model in (sparse_model("gpt2"), tiny_decoder("mixtral"), tiny_decoder("qwen2_moe")):
        chosen = muon.matrices(model)
        names = [name for name, weight in model.named_parameters() if id(weight) in chosen]
        assert names
        assert not [
            name for name in names if "router" in name or ".gate." in name or "_gate." in name or "bias" in name
        ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_upcycling_keeps_the_type_of_the_weights(dtype: torch.dtype) -> None:
    model = dense_model("gpt2").to(dtype)
    whet.upcycle(model, whet.ExpertSettings(experts=4))
    assert {weight.dtype for weight in model.parameters()} == {dtype}


@pytest.mark.parametrize("target", ["down_proj", "up_proj"])
def test_upcycling_parts_with_adapters_is_refused(target: str) -> None:
    peft = pytest.importorskip("peft")
    settings = whet.ExpertSettings(experts=4)
    model = peft.get_peft_model(dense_model("llama"), peft.LoraConfig(target_modules=[target], r=2))
    with pytest.raises(ConfigError, match="hold adapters"):
        whet.upcycle(model, settings)
    whet.upcycle(model.merge_and_unload(), settings)


def test_upcycling_next_to_adapters_of_attention_works() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(dense_model("llama"), peft.LoraConfig(target_modules=["q_proj"], r=2))
    assert layers_of(whet.upcycle(model, whet.ExpertSettings(experts=4)))


def test_perplexity_is_that_of_the_words_alone(models: Path, tmp_path: Path) -> None:
    found = []
    file, size = examples("lm", tmp_path), load(models / "lm", "config.json")["vocab_size"]
    for name, changes in (("asked", {"output_router_logits": True, "router_aux_loss_coef": 0.5}), ("plain", {})):
        shutil.copytree(models / "lm", tmp_path / name)  # its tokenizer
        tiny_decoder("mixtral", vocab_size=size, **changes).save_pretrained(tmp_path / name)
        assert run(words("lm", tmp_path / name, tmp_path / f"{name}-out", "--do_eval", validation_file=file)) == 0
        found.append(load(tmp_path / f"{name}-out", "eval_results.json"))
    assert found[0]["eval_loss"] > found[1]["eval_loss"] + 0.1
    assert found[0]["eval_perplexity"] == pytest.approx(found[1]["eval_perplexity"], rel=1e-5)


def test_experts_of_a_teacher_are_not_the_students(tmp_path: Path) -> None:
    from whet.objectives.distilled import Distillation, distilled

    wanted = trainer(tmp_path, sparse_model("llama"), max_steps=1)
    wanted.train()
    found = trainer(tmp_path, sparse_model("llama"), max_steps=1)
    teacher = trainer(tmp_path, sparse_model("llama", experts=3, every=1), max_steps=1)
    teacher.model.eval()
    teacher.objective.needs_logits = False
    how = Distillation(temperature=1.0, alpha=0.5, teacher="none")
    found.objective = distilled(found.objective, found.model, teacher.objective, how)
    found.train()
    for name in ("moe_balance_loss", "moe_z_loss", "moe_load_max"):
        assert logged(found, name) == pytest.approx(logged(wanted, name), rel=1e-6)
