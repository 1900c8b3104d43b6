"""LoRA and experts of commands whose ranks share state, gradients or weights: every trained weight has a gradient."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from many import Jobs, losses
from safetensors.torch import load_file

from saved_decoder import save_decoder
from text_tasks import examples, save_encoder, words

pytestmark = pytest.mark.reliability

_CURVE = 1e-6
"""Relative, of a loss: the optimizer works on single elements, and the ranks add the same numbers."""
_LORA: dict[str, Any] = {"lora_r": 2, "lora_target_modules": "all-linear"}
_EXPERTS: dict[str, Any] = {"moe_experts": 4, "moe_top_k": 2}
_CHECKPOINTING: dict[str, Any] = {"gradient_checkpointing": "true"}
_CASES: Mapping[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "lora": ("lm", _LORA, (1, 2, 3)),
    "experts": ("classify", _EXPERTS, (1, 2, 3)),
    "lora and experts, checkpointing": ("lm", {**_LORA, **_EXPERTS, **_CHECKPOINTING}, (1, 2, 3)),
    "lora, checkpointing, a head": ("classify", {**_LORA, **_CHECKPOINTING}, (3,)),
    "lora, padded batches": ("lm", {**_LORA, "attn_implementation": "sdpa"}, (3,)),
    "experts, fsdp": ("lm", {**_EXPERTS, "fsdp": "full_shard"}, (0,)),
}
"""Name -> the command, its settings, and the stages of ZeRO."""
_EACH = [(name, stage) for name, (_, _, stages) in _CASES.items() for stage in stages]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    pytest.importorskip("peft")
    folder = tmp_path_factory.mktemp("adapters")
    save_decoder(folder / "lm")
    save_encoder(folder / "classify")
    jobs = Jobs(folder)
    for name, (command, settings, stages) in _CASES.items():
        file = examples(command, folder)
        for stage in {0, *stages}:
            shared = {} if stage == 0 else {"zero_stage": stage}
            usual = {"train_file": file, "max_steps": 3, "logging_steps": 1, "per_device_train_batch_size": 2}
            out = jobs.folder(f"{name} {stage}", 2).parent / "out"
            asked = words(command, folder / command, out, "--do_train", **usual, **settings, **shared)
            jobs.add(f"{name} {stage}", "command", 2, words=asked)
    for stage in (0, 1, 2, 3):
        jobs.add(f"unread {stage}", "unread", 2, args={"zero_stage": stage})
    return jobs.run()


@pytest.mark.parametrize(("name", "stage"), _EACH)
def test_adapters_and_experts_train_the_same_at_every_stage(found: Jobs, name: str, stage: int) -> None:
    ended = found[f"{name} {stage}", 2]
    assert [one.get("code") for one in ended] == [0, 0], ended
    if stage == 0:
        return
    plain, shared = (_output(found, f"{name} {one}") for one in (0, stage))
    assert losses(shared) == pytest.approx(losses(plain), rel=_CURVE)
    file = "adapter_model.safetensors" if "lora" in name else "model.safetensors"
    left, right = load_file(plain / file), load_file(shared / file)
    assert {key: one.shape for key, one in left.items()} == {key: one.shape for key, one in right.items()}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_weight_without_a_gradient_is_named_by_every_rank(found: Jobs, stage: int) -> None:
    ended = found[f"unread {stage}", 2]
    assert len(ended) == 2
    for one in ended:
        assert one["error"] == "ConfigError"
        assert "weights that are to be trained got no gradient" in one["text"]
        assert "unread.lora_A" in one["text"]
        assert "q_proj" not in one["text"]


def _output(found: Jobs, name: str) -> Path:
    return found.folder(name, 2).parent / "out"
