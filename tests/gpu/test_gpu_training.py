"""Training on a real GPU through packed attention: one loss curve over what must be equal there."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationMixin

import engine
import whet
from saved_decoder import save_decoder
from tiny import Pad, arguments, losses, tiny_model, tiny_rows
from tiny_decoders import tiny_decoder, token_rows
from tiny_decoders import trainer_of as decoder_trainer
from whet.cli.main import run
from whet.errors import ConfigError, DataError
from whet.kernels import gpu_attention
from whet.log import logger

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
# Products in bf16, and sums of gradients in any order: two runs of one kind differ by less over a few steps.
TOLERANCE = 2e-2


def curve(folder: Path, *, dropout: float = 0.1, **changes: Any) -> list[float]:
    usual = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "max_steps": 6, "seed": 5}
    args = arguments(folder, **(usual | {"use_cpu": False, "bf16": True} | changes))
    model = tiny_model("bert", dropout=dropout)
    trainer = engine.Trainer(model=model, args=args, train_dataset=tiny_rows(24))
    assert trainer.device.type == "cuda"
    assert trainer.objective.packed
    trainer.train()
    return losses(trainer)


def need_flash() -> None:
    if gpu_attention.have(torch.device("cuda", 0)) == gpu_attention.Have():
        pytest.skip("this GPU has no flash kernels")


@pytest.mark.parametrize("name", ["whet", "flash_attention_2"])
def test_without_dropout_every_kernel_gives_one_curve(tmp_path: Path, name: str) -> None:
    need_flash()
    usual = curve(tmp_path, dropout=0.0)
    assert curve(tmp_path, dropout=0.0, attn_implementation=name) == pytest.approx(usual, rel=TOLERANCE)
    fp32 = curve(tmp_path, dropout=0.0, bf16=False, precision="fp32")
    assert fp32 == pytest.approx(usual, rel=TOLERANCE)


@pytest.mark.parametrize("policy", ["blocks", "selective"])
def test_flash_masks_survive_recomputation(tmp_path: Path, policy: str) -> None:
    need_flash()
    again = curve(tmp_path, gradient_checkpointing=True, checkpointing_policy=policy)
    # what is recomputed runs launch by launch, and draws each layer's mask on its own
    assert again == pytest.approx(curve(tmp_path, cuda_graphs=False), rel=TOLERANCE)


def test_activations_wait_for_backward_on_the_host(tmp_path: Path) -> None:
    def trained(**changes: Any) -> tuple[list[float], int]:
        torch.cuda.reset_peak_memory_stats()
        found = curve(tmp_path, per_device_train_batch_size=24, max_steps=3, cuda_graphs=False, **changes)
        return found, torch.cuda.max_memory_allocated()

    usual, most = trained()
    found, offloaded = trained(activation_offload=True)
    assert found == pytest.approx(usual, rel=TOLERANCE)
    assert offloaded < most


def test_activations_of_a_decoder_wait_on_the_host_too(tmp_path: Path) -> None:
    """Its loss of next tokens does not call the complete model."""

    def trained(**changes: Any) -> tuple[list[float], int]:
        usual: dict[str, Any] = {"use_cpu": False, "bf16": True, "max_steps": 3, "cuda_graphs": False}
        rows = token_rows(24, lengths=(200, 250))
        sizes = {"per_device_train_batch_size": 24, "gradient_accumulation_steps": 1}
        model = tiny_decoder("llama", max_position_embeddings=256)
        trainer = decoder_trainer(tmp_path, model, rows, **usual, **sizes, **changes)
        torch.cuda.reset_peak_memory_stats()
        trainer.train()
        return losses(trainer), torch.cuda.max_memory_allocated()

    usual, most = trained()
    found, offloaded = trained(activation_offload=True)
    assert found == pytest.approx(usual, rel=TOLERANCE)
    assert offloaded < most


@pytest.mark.parametrize(("token", "said"), [(500, "input_ids 500"), (-5, "input_ids -5")])
@pytest.mark.parametrize("by", ["engine", "whet.Trainer"])
def test_a_token_outside_of_the_vocabulary_is_named(tmp_path: Path, by: str, token: int, said: str) -> None:
    """And the process stays usable: no kernel has read it."""
    rows = tiny_rows(8)
    rows[3]["input_ids"][2] = token
    if by == "engine":
        args = arguments(tmp_path, use_cpu=False, max_steps=2)
        trainer: Any = engine.Trainer(model=tiny_model("bert"), args=args, train_dataset=rows)
    else:
        own = whet.TrainingArguments(str(tmp_path), max_steps=2, report_to="none", per_device_train_batch_size=8)
        given = [dict(row, attention_mask=[1] * len(row["input_ids"])) for row in rows]
        trainer = whet.Trainer(model=tiny_model("bert"), args=own, train_dataset=given, data_collator=Pad())
    with pytest.raises(DataError, match=said):
        trainer.train()
    torch.cuda.synchronize()


@pytest.mark.parametrize("optim", ["adamw_whet", "adamw_whet_8bit"])
def test_optimizers_for_cpus_are_refused(tmp_path: Path, optim: str) -> None:
    args = whet.TrainingArguments(str(tmp_path), max_steps=2, report_to="none", optim=optim)
    rows = [dict(row, attention_mask=[1] * len(row["input_ids"])) for row in tiny_rows(8)]
    trainer = whet.Trainer(model=tiny_model("bert"), args=args, train_dataset=rows, data_collator=Pad())
    with pytest.raises(ConfigError, match=f"{optim} cannot update these parameters"):
        trainer.train()


def test_precision_auto_measures_in_whet_trainer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    args = whet.TrainingArguments(str(tmp_path), max_steps=2, report_to="none", precision="auto")
    rows = [dict(row, attention_mask=[1] * len(row["input_ids"])) for row in tiny_rows(16)]
    made = tiny_model("bert", hidden_size=256, num_hidden_layers=4, intermediate_size=512)
    trainer = whet.Trainer(model=made, args=args, train_dataset=rows, data_collator=Pad())
    with caplog.at_level(logging.INFO, logger.name):
        trainer.train()
    has_bf16 = torch.cuda.get_device_capability()[0] >= 8
    said = "times the speed of fp32" if has_bf16 else "this GPU has no bf16"
    assert any(said in text for text in caplog.messages)


def test_generate_runs_on_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_decoder(tmp_path / "model")
    seen: list[str] = []
    inner = GenerationMixin.generate

    def generate(self: Any, *args: Any, **options: Any) -> Any:
        seen.extend((self.device.type, options["input_ids"].device.type))
        return inner(self, *args, **options)

    monkeypatch.setattr(GenerationMixin, "generate", generate)
    assert run(["generate", str(tmp_path / "model"), "--prompt", "a", "--max_new_tokens", "3"]) == 0
    assert seen == ["cuda", "cuda"]


def test_whets_masks_survive_accumulation_and_are_the_cpus(tmp_path: Path) -> None:
    fp32: dict[str, Any] = {"attn_implementation": "whet", "bf16": False, "precision": "fp32"}
    whole = curve(tmp_path, **fp32)
    split = curve(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2, **fp32)
    assert split == pytest.approx(whole, rel=1e-4)  # float32 in another order, over six steps
    args = arguments(tmp_path, per_device_train_batch_size=4, max_steps=6, seed=5, use_cpu=True, precision="fp32")
    here = engine.Trainer(model=tiny_model("bert", dropout=0.1), args=args, train_dataset=tiny_rows(24))
    here.train()
    assert losses(here) == pytest.approx(whole, rel=1e-4)


def test_the_log_says_whose_masks_are_drawn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    need_flash()
    gpu_attention.tell.cache_clear()
    with caplog.at_level(logging.INFO, logger.name):
        curve(tmp_path, max_steps=1)
    assert "draw their own dropout masks" in caplog.text


def test_compiled_blocks_run_the_same_attention(tmp_path: Path) -> None:
    need_flash()
    pytest.importorskip("triton", reason="inductor needs triton on a GPU")
    compiled = curve(tmp_path, dropout=0.0, torch_compile=True)
    assert compiled == pytest.approx(curve(tmp_path, dropout=0.0), rel=TOLERANCE)
    # In compiled blocks hidden states have whet's masks, and not the device's.
    with_dropout = curve(tmp_path, torch_compile=True)
    assert with_dropout == pytest.approx(curve(tmp_path, torch_compile=True), rel=TOLERANCE)
    assert with_dropout != pytest.approx(compiled, rel=1e-3)


def test_whet_optimize_runs_on_a_gpu() -> None:
    """Padded calls of an encoder in a loop of one's own, without their padding."""
    model = tiny_model("bert").cuda().eval()
    ids = torch.randint(10, 190, (3, 30), device="cuda")
    mask = torch.arange(30, device="cuda") < torch.tensor([30, 11, 22], device="cuda")[:, None]
    wanted = model(input_ids=ids, attention_mask=mask.long()).start_logits
    found = whet.optimize(model)(input_ids=ids, attention_mask=mask.long()).start_logits
    torch.testing.assert_close(found[mask], wanted[mask], rtol=1e-3, atol=1e-3)  # products may be TF32 in neither
