"""`--load_in_8bit` and `--load_in_4bit`: what is written, merged, resumed and refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from text_tasks import examples, load, load_lines, save_encoder, words
from whet.cli.main import run
from whet.errors import EXIT_BAD_CONFIG

peft = pytest.importorskip("peft")

ROUNDED = 2e-2
"""Relative, of a loss: the weights of a layer move by less than 1 % of their size, at random."""


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    save_encoder(folder)
    return folder


def asked(command: str, model: Path, folder: Path, *flags: str, **options: Any) -> list[str]:
    """The words of a run with an adapter next to weights of 8 bits."""
    file = examples(command, folder.parent)
    usual: dict[str, Any] = {"train_file": file, "validation_file": file, "max_steps": 6, "lora_r": 4}
    usual |= {"doc_stride": 8} if command == "qa" else {}
    return words(command, model, folder, "--do_train", "--load_in_8bit", *flags, **(usual | options))


@pytest.mark.parametrize("command", ["qa", "classify", "tag", "lm"])
def test_adapter_merges_into_the_exact_model(command: str, encoder: Path, small_decoder: Path, tmp_path: Path) -> None:
    """The folder holds a usual adapter: merged, its weights are those of the model in float32 plus the pairs."""
    model, out = small_decoder if command == "lm" else encoder, tmp_path / "out"
    assert run(asked(command, model, out, "--do_eval", lora_target_modules="all-linear")) == 0
    said = (out / "run.log").read_text()
    assert "linear layers in 8 bits:" in said
    assert "+ int8 (" in said
    assert "model.safetensors" not in {one.name for one in out.iterdir()}
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == str(model)
    assert run(["merge", str(out), "--output_dir", str(tmp_path / "merged")]) == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "merged"))
    after = {name.removeprefix("bert."): value for name, value in after.items()}
    pairs = load_file(out / "adapter_model.safetensors")
    changed = [name for name in before if name in after and not torch.equal(before[name], after[name])]
    types = [name for name in changed if "token_type_embeddings" in name]
    assert len(types) == (command == "qa")  # peft's class for this task trains with the first type alone
    assert all(torch.equal(after[name], before[name][:1].expand_as(before[name])) for name in types)
    changed = [name for name in changed if name not in types]
    assert changed
    for name in changed:
        stem = next(one for one in pairs if one.endswith(name.removesuffix("weight") + "lora_A.weight"))
        added = pairs[stem.replace("lora_A", "lora_B")] @ pairs[stem] * (32 / 4)
        torch.testing.assert_close(after[name], before[name] + added, rtol=0, atol=1e-6)
    if command in ("classify", "lm"):
        file = examples(command, tmp_path)
        assert run(words(command, tmp_path / "merged", tmp_path / "eval", "--do_eval", validation_file=file)) == 0
        found, wanted = load(tmp_path / "eval", "eval_results.json"), load(out, "eval_results.json")
        assert found["eval_loss"] == pytest.approx(wanted["eval_loss"], rel=ROUNDED)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_peft_loads_the_adapter(small_decoder: Path, tmp_path: Path) -> None:
    assert run(asked("lm", small_decoder, tmp_path / "out")) == 0
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(small_decoder), tmp_path / "out")
    pairs = [one for name, one in loaded.named_parameters() if "lora_B" in name]
    assert pairs
    assert all(one.any() for one in pairs)


SAVING = {"save_strategy": "steps", "save_steps": 3}


def test_resumed_run_ends_with_the_same_adapter(small_decoder: Path, tmp_path: Path) -> None:
    straight, cut = tmp_path / "straight", tmp_path / "cut"
    assert run(asked("lm", small_decoder, straight, **SAVING)) == 0
    shutil.copytree(straight / "checkpoint-3", cut / "checkpoint-3")
    assert run(asked("lm", small_decoder, cut, resume_from_checkpoint="auto", **SAVING)) == 0
    found, wanted = (load_file(folder / "adapter_model.safetensors") for folder in (cut, straight))
    early = load_file(straight / "checkpoint-3" / "adapter_model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    assert not any(torch.equal(early[name], value) for name, value in wanted.items())


def test_resuming_with_exact_weights_is_refused(
    small_decoder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its curve would be that of neither model."""
    assert run(asked("lm", small_decoder, tmp_path / "out", **SAVING)) == 0
    again = asked("lm", small_decoder, tmp_path / "out", resume_from_checkpoint="auto", max_steps=9, **SAVING)
    assert run([one for one in again if one != "--load_in_8bit"]) == EXIT_BAD_CONFIG
    assert "int8" in capfd.readouterr().err


REFUSED = {
    "load_in_8bit would change nothing without lora_r": {"lora_r": ...},
    "does not go with use_dora": {"use_dora": "true"},
    "does not go with moe_experts": {"moe_experts": 4},
    "does not go with zero_stage": {"zero_stage": 2},
    "does not go with torch_compile": {"torch_compile": "true"},
    "does not go with precision": {"precision": "int8"},
}


@pytest.mark.parametrize("says", REFUSED)
def test_what_weights_of_8_bits_cannot_do_is_refused(
    says: str, small_decoder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = {"max_steps": 2, "lora_r": 4} | REFUSED[says]
    given = {name: value for name, value in options.items() if value is not ...}
    refused = words("lm", small_decoder, tmp_path / "out", "--do_train", "--load_in_8bit",
                    train_file=examples("lm", tmp_path), **given)  # fmt: skip
    assert run(refused) == EXIT_BAD_CONFIG
    assert says in " ".join(capfd.readouterr().err.split())


def test_weights_are_counted_as_weights_whatever_holds_them(small_decoder: Path, tmp_path: Path) -> None:
    """A byte holds two codes of 4 bits; the record, the first lines and the work of a step count both."""
    found = {}
    for n_bits in (32, 8, 4):
        line = asked("lm", small_decoder, tmp_path / str(n_bits), max_steps=1, lora_target_modules="all-linear")
        line = [{8: "--load_in_8bit", 4: "--load_in_4bit"}.get(n_bits, "") if one == "--load_in_8bit" else one
                for one in line]  # fmt: skip
        assert run([one for one in line if one]) == 0
        out = tmp_path / str(n_bits)
        counts = next(one["model"] for one in load_lines(out / "run.jsonl") if "model" in one)
        (shown,) = [line for line in (out / "run.log").read_text().splitlines() if " parameters, " in line]
        state = load(out, "trainer_state.json")
        found[n_bits] = counts["parameters"], counts["trainable"], shown.partition(", ")[2], state["total_flos"]
    assert found[4] == found[8] == found[32]
    n_weights = sum(one.numel() for one in AutoModelForCausalLM.from_pretrained(small_decoder).parameters())
    assert found[4][0] == n_weights + found[4][1]


@pytest.mark.parametrize("command", ["lm", "classify"])
def test_weights_of_4_bits_train_resume_and_merge(
    command: str, encoder: Path, small_decoder: Path, tmp_path: Path
) -> None:
    model, straight, cut = small_decoder if command == "lm" else encoder, tmp_path / "straight", tmp_path / "cut"

    def words_of(out: Path, *flags: str) -> list[str]:
        given = asked(command, model, out, *flags, **SAVING)
        return ["--load_in_4bit" if one == "--load_in_8bit" else one for one in given]

    assert run(words_of(straight)) == 0
    assert "linear layers in 4 bits:" in (straight / "run.log").read_text()
    shutil.copytree(straight / "checkpoint-3", cut / "checkpoint-3")
    assert run(words_of(cut, "--resume_from_checkpoint")) == 0
    found, wanted = (load_file(folder / "adapter_model.safetensors") for folder in (cut, straight))
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    assert run(["merge", str(straight), "--output_dir", str(tmp_path / "merged")]) == 0


@pytest.mark.parametrize("command", ["qa", "classify", "tag", "lm"])
def test_cached_trunk_under_an_adapter_has_the_curve_without_it(
    command: str, encoder: Path, small_decoder: Path, tmp_path: Path
) -> None:
    """The lower block is frozen, in 8 bits, and gets no pairs; the adapter merges as any other."""
    model, found = small_decoder if command == "lm" else encoder, {}
    for name, flags in {"plain": (), "cached": ("--cache_frozen_trunk",)}.items():
        (tmp_path / name).mkdir()
        out = tmp_path / name / "out"
        options = {"freeze_layers": 1, "lora_target_modules": "all-linear", "logging_steps": 1}
        assert run(asked(command, model, out, "--do_eval", *flags, **options)) == 0
        history = load(out, "trainer_state.json")["log_history"]
        found[name] = [entry["loss"] for entry in history if "loss" in entry]
        pairs = load_file(out / "adapter_model.safetensors")
        assert {".0." in one for one in pairs if "lora_" in one} == {False}
        assert run(["merge", str(out), "--output_dir", str(tmp_path / name / "merged")]) == 0
    assert len(found["plain"]) == 6
    assert found["cached"] == pytest.approx(found["plain"], rel=1e-5)  # float32 sums in another order
