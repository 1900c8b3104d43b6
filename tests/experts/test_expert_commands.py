"""`--moe_experts` in every task: what is trained, what is saved, who reads it, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from text_tasks import examples, load, words
from whet.cli.main import run
from whet.errors import EXIT_BAD_CONFIG

SAME = 1e-6
"""Relative, of a loss: an evaluation of the same weights, in float32."""
MERGED = 1e-4
"""The same after low-rank pairs were added to the weights."""


def asked(command: str, models: Path, folder: Path, *flags: str, **options: Any) -> list[str]:
    """Return the words of a training with experts."""
    file, model = examples(command, folder), models / ("lm" if command == "lm" else "encoder")
    usual: dict[str, Any] = {"train_file": file, "validation_file": file, "num_train_epochs": 3, "logging_steps": 1}
    usual |= {"moe_experts": 4} | ({"doc_stride": 8} if command == "qa" else {})
    return words(command, model, folder / "out", "--do_train", "--do_eval", *flags, **(usual | options))


def evaluated(command: str, model: Path, folder: Path) -> float:
    """Return what an evaluation of a saved model finds."""
    options: dict[str, Any] = {"doc_stride": 8} if command == "qa" else {}
    file = examples(command, folder)
    assert run(words(command, model, folder / "again", "--do_eval", validation_file=file, **options)) == 0
    return score(command, folder / "again")


def score(command: str, folder: Path) -> float:
    return load(folder, "eval_results.json")["eval_f1" if command == "qa" else "eval_loss"]


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("command", "adapter"),
    [("qa", False), *((command, adapter) for command in ("classify", "tag", "lm") for adapter in (False, True))],
)
def test_trained_experts_are_saved_and_read_by_every_task(
    command: str, adapter: bool, models: Path, tmp_path: Path
) -> None:
    """Merging rounds, and the score of answers jumps where two are as good: no adapter for answers."""
    options: dict[str, Any] = {"lora_r": 2} if adapter else {}
    assert run(asked(command, models, tmp_path, moe_top_k=2, moe_capacity_factor=1.25, **options)) == 0
    out = model = tmp_path / "out"
    if adapter:
        pytest.importorskip("peft")
        model = tmp_path / "merged"
        assert run(["merge", str(out), "--output_dir", str(model)]) == 0
    assert evaluated(command, model, tmp_path) == pytest.approx(score(command, out), rel=MERGED if adapter else SAME)
    weights = load_file(model / "model.safetensors")
    (up,) = [value for name, value in weights.items() if name.endswith(".up_proj") and value.dim() == 3]
    assert up.shape[0] == 4
    assert not torch.equal(up[0], up[1])


def test_saved_experts_write_and_are_refused_by_plain_transformers(
    models: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A dense model of this type would have new, random feed-forward parts in their place."""
    assert run(asked("lm", models, tmp_path, "--do_predict", test_file=examples("lm", tmp_path))) == 0
    assert run(["generate", str(tmp_path / "out"), "--prompt", "the boat", "--max_new_tokens", "4"]) == 0
    assert "the boat" in capfd.readouterr().out
    with pytest.raises(ValueError, match="whet-experts-llama"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_saved_experts_refuse_what_new_ones_do(models: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """All of it together: their losses would be left out, or their blocks."""
    assert run(asked("lm", models, tmp_path, max_steps=1)) == 0
    options = {"train_file": tmp_path / "pairs.jsonl", "max_steps": 1, "torch_compile": True}
    (tmp_path / "pairs.jsonl").write_text(
        json.dumps({"prompt": "the", "chosen": " boat lay", "rejected": " dough"}) + "\n", "utf-8"
    )
    line = words("lm", tmp_path / "out", tmp_path / "next", "--do_train", **options, loss="dpo")
    assert run(line) == EXIT_BAD_CONFIG
    shown = " ".join(capfd.readouterr().err.split())
    assert "torch_compile does not go with the experts of the model" in shown
    assert "loss dpo does not go with the experts of the model" in shown
    line = words("lm", tmp_path / "out", tmp_path / "next", "--do_train", teacher_model=models / "lm",
                 train_file=examples("lm", tmp_path), max_steps=1)  # fmt: skip
    assert run(line) == EXIT_BAD_CONFIG
    assert "teacher_model does not go with the experts of the model" in " ".join(capfd.readouterr().err.split())


def test_log_has_the_parts_of_the_loss_and_the_dropped_tokens(models: Path, tmp_path: Path) -> None:
    assert run(asked("lm", models, tmp_path, moe_capacity_factor=0.5, moe_aux_loss_coef=0.1, max_steps=2)) == 0
    first = load(tmp_path / "out", "trainer_state.json")["log_history"][0]
    assert first["loss"] == pytest.approx(
        first["task_loss"] + 0.1 * first["moe_balance_loss"] + 0.001 * first["moe_z_loss"], rel=1e-5
    )
    assert first["moe_dropped"] > 0
    assert first["moe_load_max"] >= 1 >= first["moe_load_min"]


def test_resumed_run_with_experts_ends_with_the_same_bits(models: Path, tmp_path: Path) -> None:
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "moe_capacity_factor": 1.0}
    whole = asked("lm", models, tmp_path, **options)
    assert run(whole) == 0
    wanted = load_file(tmp_path / "out" / "model.safetensors")
    shutil.rmtree(tmp_path / "out" / "checkpoint-4")
    assert run([*whole, "--resume_from_checkpoint", "auto"]) == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_resume_with_another_balance_is_refused(
    models: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    assert run(asked("lm", models, tmp_path, **options)) == 0
    changed = asked("lm", models, tmp_path, **options, moe_aux_loss_coef=0.5, resume_from_checkpoint="auto")
    assert run(changed) == EXIT_BAD_CONFIG
    assert "aux_loss_coef" in capfd.readouterr().err


def test_training_continues_with_saved_experts(models: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With the settings of the folder, with other factors, and not with another number."""
    assert run(asked("lm", models, tmp_path)) == 0
    file = examples("lm", tmp_path)
    more: dict[str, Any] = {"train_file": file, "max_steps": 1, "logging_steps": 1}
    out = tmp_path / "out"
    assert run(words("lm", out, tmp_path / "more", "--do_train", **more)) == 0
    assert "moe_balance_loss" in load(tmp_path / "more", "trainer_state.json")["log_history"][0]
    assert run(words("lm", out, tmp_path / "top2", "--do_train", **more, moe_experts=4, moe_top_k=2)) == 0
    assert load(tmp_path / "top2", "config.json")["whet_experts"]["top_k"] == 2
    assert run(words("lm", out, tmp_path / "six", "--do_train", **more, moe_experts=6)) == EXIT_BAD_CONFIG
    assert "the model has other experts than these" in capfd.readouterr().err


def test_training_continues_with_the_settings_that_are_not_given(models: Path, tmp_path: Path) -> None:
    begun = {"moe_top_k": 2, "moe_every": 1, "moe_capacity_factor": 1.5, "moe_z_loss_coef": 0.0}
    assert run(asked("lm", models, tmp_path, **begun)) == 0
    before = load(tmp_path / "out", "config.json")["whet_experts"]
    more: dict[str, Any] = {"train_file": examples("lm", tmp_path), "max_steps": 1, "moe_aux_loss_coef": 0.05}
    assert run(words("lm", tmp_path / "out", tmp_path / "more", "--do_train", moe_experts=4, **more)) == 0
    assert load(tmp_path / "more", "config.json")["whet_experts"] == before | {"aux_loss_coef": 0.05}


DAMAGE: dict[str, dict[str, Any]] = {
    "whet_experts is damaged": {"whet_experts": {"experts": 4, "code": "x"}},
    "top_k is not 1 or 2": {"whet_experts": {"experts": 4, "top_k": 100}},
    "experts of": {"whet_experts": {"experts": 1_000_000_007}},
    "names no architecture": {"whet_experts": None},
}


@pytest.mark.parametrize("says", DAMAGE)
def test_damaged_settings_of_saved_experts_are_refused(
    says: str, models: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(asked("lm", models, tmp_path, max_steps=1)) == 0
    file = tmp_path / "out" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | DAMAGE[says]))
    evaluation = words("lm", tmp_path / "out", tmp_path / "e", "--do_eval", validation_file=examples("lm", tmp_path))
    assert run(evaluation) == EXIT_BAD_CONFIG
    assert says in " ".join(capfd.readouterr().err.split())


def test_saved_model_without_its_experts_is_refused(
    models: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(asked("lm", models, tmp_path, max_steps=1)) == 0
    file = tmp_path / "out" / "model.safetensors"
    weights = {name: value for name, value in load_file(file).items() if not name.endswith("router.weight")}
    save_file(weights, file, metadata={"format": "pt"})
    assert run(words("lm", tmp_path / "out", tmp_path / "more", "--do_train", train_file=examples("lm", tmp_path),
                     max_steps=1)) == EXIT_BAD_CONFIG  # fmt: skip
    assert "lacks weights of its experts" in " ".join(capfd.readouterr().err.split())
