"""local_sgd_steps with the kinds of runs that commands make: language models, adapters, experts, bf16, resumed ones.

An average after each step of SGD is data parallel training, whatever the model: that is the reference.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from many import Jobs, losses
from safetensors.torch import load_file

from saved_decoder import save_decoder
from text_tasks import examples, save_encoder, words

pytestmark = pytest.mark.reliability

_SAME = 1e-5
"""Relative, of a loss: float32 sums in another order, over four steps."""
_SAME_BF16 = 2e-2
"""A last bit of a float32 weight can round to another bf16 number, 2^-9 away, and the model is tiny."""
_SGD: dict[str, Any] = {"optim": "sgd", "max_grad_norm": 0.0, "learning_rate": 0.1}
_LORA: dict[str, Any] = {"lora_r": 2, "lora_target_modules": "all-linear"}
_EXPERTS: dict[str, Any] = {"moe_experts": 4, "moe_top_k": 2}
_KINDS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "lm": ("lm", {}),
    "lm, padded": ("lm", {"attn_implementation": "sdpa"}),
    "lora": ("lm", _LORA),
    "lora, checkpointing": ("lm", {**_LORA, "gradient_checkpointing": "true"}),
    "lora on 8 bits": ("lm", {**_LORA, "load_in_8bit": "true"}),
    "experts": ("classify", _EXPERTS),
    "experts of a decoder": ("lm", {**_EXPERTS, "moe_capacity_factor": 1.0}),
    "lora and experts": ("lm", {**_LORA, **_EXPERTS}),
    "tags": ("tag", {}),
    "bf16": ("lm", {"precision": "bf16"}),
}
"""Name -> the command and its settings."""
_RESUMED: Mapping[str, dict[str, Any]] = {
    "resumed": {}, "resumed lora": _LORA, "resumed experts": _EXPERTS, "resumed bf16": {"precision": "bf16"},
    "resumed outer steps of lora": {**_LORA, "outer_learning_rate": 0.7, "outer_momentum": 0.9},
}  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    pytest.importorskip("peft")
    folder = tmp_path_factory.mktemp("kinds")
    save_decoder(folder / "lm")
    for name in ("classify", "tag"):
        save_encoder(folder / name)
    jobs = Jobs(folder)

    def add(name: str, command: str, output: Path, **settings: Any) -> None:
        rows = folder / f"rows of {command}"
        rows.mkdir(exist_ok=True)
        file = examples(command, rows)
        usual = {"train_file": file, "logging_steps": 1, "per_device_train_batch_size": 2}
        asked = words(command, folder / command, output, "--do_train", **usual, **settings)
        jobs.add(name, "command", 2, words=asked)

    for name, (command, settings) in _KINDS.items():
        for every in (0, 1):
            output = _output(jobs, f"{name} {every}")
            add(f"{name} {every}", command, output, **(_SGD | settings | {"max_steps": 4, "local_sgd_steps": every}))
    for name, settings in _RESUMED.items():
        local = {"local_sgd_steps": 2, "save_strategy": "steps", "save_steps": 2, "optim": "adamw_whet"} | settings
        local |= {"lr_scheduler_type": "constant"}
        add(f"{name}, unbroken", "lm", _output(jobs, f"{name}, unbroken"), max_steps=6, **local)
        add(f"{name}, begun", "lm", _output(jobs, name), max_steps=4, **local)
        add(name, "lm", _output(jobs, name), max_steps=6, resume_from_checkpoint="auto", **local)
    return jobs.run()


@pytest.mark.parametrize("name", _KINDS)
def test_an_average_after_each_step_is_data_parallel_training_for_every_kind(found: Jobs, name: str) -> None:
    for every in (0, 1):
        ended = found[f"{name} {every}", 2]
        assert [one.get("code") for one in ended] == [0, 0], ended
    summed, averaged = (losses(_output(found, f"{name} {every}")) for every in (0, 1))
    within = _SAME_BF16 if name == "bf16" else _SAME
    assert len(summed) == 4
    assert averaged == pytest.approx(summed, rel=within)
    assert abs(summed[0] - summed[-1]) > 3 * within * summed[0]  # a run that does not learn would be equal too


@pytest.mark.parametrize("name", _RESUMED)
def test_a_resumed_run_ends_with_the_files_of_one_that_was_not_stopped(found: Jobs, name: str) -> None:
    for part in (f"{name}, unbroken", f"{name}, begun", name):
        assert [one.get("code") for one in found[part, 2]] == [0, 0], found[part, 2]
    resumed, unbroken = _output(found, name), _output(found, f"{name}, unbroken")
    assert "resuming after step 4" in (resumed / "run.log").read_text("utf-8")
    file = "adapter_model.safetensors" if "lora" in name else "model.safetensors"
    left, right = load_file(resumed / file), load_file(unbroken / file)
    assert left.keys() == right.keys()
    assert all(left[key].equal(right[key]) for key in left)
    assert json.loads((resumed / "trainer_state.json").read_text("utf-8"))["global_step"] == 6


def _output(found: Jobs, name: str) -> Path:
    return found.folder(name, 2).parent / "out"
