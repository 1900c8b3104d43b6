"""`--lora_r` for every task, and `whet merge`: what is trained, what is saved, and the model that comes of it."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import engine
from text_tasks import examples, load, save_encoder, words
from tiny import arguments
from tiny_decoders import collate, tiny_decoder, token_rows, trainer_of
from whet.cli.main import run
from whet.errors import EXIT_BAD_CONFIG, EXIT_IO, ConfigError
from whet.store import manifest, snapshot

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

CLOSE = 1e-4
"""Relative, of a loss: float32 rounding of weights that were added."""


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    save_encoder(folder)
    return folder


def trained(command: str, model: Path, folder: Path, *flags: str, **options: Any) -> Path:
    """Run a command with LoRA, and return its output folder."""
    file = examples(command, folder)
    usual: dict[str, Any] = {"train_file": file, "validation_file": file, "num_train_epochs": 8, "lora_r": 4}
    if command == "qa":
        usual |= {"doc_stride": 8}
    asked = words(command, model, folder / "out", "--do_train", "--do_eval", *flags, **(usual | options))
    assert run(asked) == 0
    return folder / "out"


@pytest.mark.parametrize("command", ["qa", "classify", "tag", "lm"])
def test_adapter_of_every_task_merges_into_a_model_with_the_same_loss(
    command: str, encoder: Path, small_decoder: Path, tmp_path: Path
) -> None:
    """The output folder holds the adapter alone; merged, any command reads it."""
    model = small_decoder if command == "lm" else encoder
    out = trained(command, model, tmp_path)
    assert (out / "adapter_model.safetensors").exists()
    assert not (out / "model.safetensors").exists()
    merged = tmp_path / "merged"
    assert run(["merge", str(out), "--output_dir", str(merged)]) == 0
    again: dict[str, Any] = {"validation_file": examples(command, tmp_path), "doc_stride": 8}
    again = {name: value for name, value in again.items() if name != "doc_stride" or command == "qa"}
    assert run(words(command, merged, tmp_path / "eval", "--do_eval", **again)) == 0
    found, wanted = load(tmp_path / "eval", "eval_results.json"), load(out, "eval_results.json")
    if command == "qa":
        assert _logits_of_best(tmp_path / "eval") == pytest.approx(_logits_of_best(out), abs=CLOSE)
    else:
        assert found["eval_loss"] == pytest.approx(wanted["eval_loss"], rel=CLOSE)
    before, after = (load_file(folder / "model.safetensors") for folder in (model, merged))
    inside = {name.removeprefix("bert."): value for name, value in after.items()}
    assert any(not torch.equal(inside[name], value) for name, value in before.items() if name in inside)


@pytest.mark.parametrize("save_async", [True, False])
def test_checkpoint_takes_the_room_of_the_adapter_alone(
    save_async: bool, small_decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the disk, which is asked for room before the first step, and in the memory of a save in the background."""
    asked: list[int] = []
    copied: dict[str, int] = {}
    forecast, copies = snapshot.forecast_bytes, snapshot.Buffers.copies

    def copy(self: Any, tensors: Any, prefix: str) -> Any:
        copied[prefix] = sum(one.nbytes for one in tensors.values())
        return copies(self, tensors, prefix)

    monkeypatch.setattr(snapshot, "free_bytes", lambda _: 10**12)
    monkeypatch.setattr(snapshot, "forecast_bytes", lambda state: asked.append(forecast(state)) or asked[-1])
    monkeypatch.setattr(snapshot.Buffers, "copies", copy)
    saves = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "save_async": save_async}
    out = trained("lm", small_decoder, tmp_path, **saves)
    files = {path.name: path.stat().st_size for path in (out / "checkpoint-2").iterdir()}
    assert asked[0] == pytest.approx(sum(files.values()), rel=0.1)
    if save_async:
        tensors = load_file(out / "checkpoint-2" / "adapter_model.safetensors").values()
        assert copied["weights"] == sum(one.nbytes for one in tensors)


def test_adapter_is_read_with_the_configuration_of_its_run(small_decoder: Path, tmp_path: Path) -> None:
    """That of --config_name, by which the same weights compute something else."""
    settings = load(small_decoder, "config.json") | {"hidden_act": "relu", "rms_norm_eps": 0.5}
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text(json.dumps(settings), "utf-8")
    out = trained("lm", small_decoder, tmp_path, config_name=tmp_path / "config", num_train_epochs=2)
    merged = tmp_path / "merged"
    assert run(["merge", str(out), "--output_dir", str(merged)]) == 0
    assert load(merged, "config.json").items() >= {"hidden_act": "relu", "rms_norm_eps": 0.5}.items()
    again = words("lm", merged, tmp_path / "eval", "--do_eval", validation_file=examples("lm", tmp_path))
    assert run(again) == 0
    found, wanted = load(tmp_path / "eval", "eval_results.json"), load(out, "eval_results.json")
    assert found["eval_loss"] == pytest.approx(wanted["eval_loss"], rel=CLOSE)


def _logits_of_best(folder: Path) -> list[float]:
    """The logits of the best answer to each question; peft keeps token types from a model that answers questions."""
    found = load(folder, "eval_nbest_predictions.json").values()
    return [answers[0][f"{end}_logit"] for answers in found for end in ("start", "end")]


@pytest.mark.parametrize("kind", ["use_rslora", "use_dora"])
def test_kinds_of_lora_are_those_of_peft(kind: str, small_decoder: Path, tmp_path: Path) -> None:
    out = trained(
        "lm", small_decoder, tmp_path, f"--{kind}", lora_target_modules="q_proj,v_proj,gate_proj", lora_alpha=8
    )
    settings = json.loads((out / "adapter_config.json").read_text())
    assert settings[kind]
    assert settings["lora_alpha"] == 8
    assert set(settings["target_modules"]) == {"q_proj", "v_proj", "gate_proj"}
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(small_decoder), out)
    assert run(["merge", str(out), "--output_dir", str(tmp_path / "merged")]) == 0
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    ids = torch.tensor([[0, 20, 30, 40]])
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, loaded.eval()(ids).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("adapter", [".", "checkpoint-2"])
def test_merged_classifier_keeps_its_labels(adapter: str, encoder: Path, tmp_path: Path) -> None:
    """Also from a checkpoint of a run that has not ended: the output folder holds nothing else then."""
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    out = trained("classify", encoder, tmp_path, lora_target_modules="all-linear", **options)
    moved = (out / adapter).rename(tmp_path / "moved" if adapter == "." else tmp_path / adapter)
    assert run(["merge", str(moved), "--output_dir", str(tmp_path / "merged")]) == 0
    config = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged").config
    assert sorted(config.id2label.values()) == ["baking", "garden", "sailing"]


def saved_adapter(model: Path, folder: Path, **changes: Any) -> Path:
    """Save a new adapter of the model, and change its settings."""
    wrapped = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(model), peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    )
    wrapped.save_pretrained(folder)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


def test_merge_takes_the_tokenizer_next_to_the_adapter(small_decoder: Path, tmp_path: Path) -> None:
    """It may have a chat template, or an end token, that the model's own has not."""
    folder = saved_adapter(small_decoder, tmp_path / "adapter")
    tokenizer = AutoTokenizer.from_pretrained(small_decoder)
    tokenizer.chat_template, tokenizer.eos_token = "of the run", "<|end|>"
    tokenizer.save_pretrained(folder)
    assert run(["merge", str(folder), "--output_dir", str(tmp_path / "merged")]) == 0
    found = AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert (found.chat_template, found.eos_token) == ("of the run", "<|end|>")


OTHER_KINDS: tuple[dict[str, Any], ...] = (
    {"init_lora_weights": "pissa"},
    {"init_lora_weights": "olora"},
    {"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4}},
    {"alora_invocation_tokens": [5, 6]},
    {"layer_replication": [[0, 1], [0, 2]]},
    {"a_setting_of_tomorrow": 3},
)


@pytest.mark.parametrize("changes", OTHER_KINDS)
def test_merge_refuses_adapters_that_change_more_than_it_adds(
    changes: dict[str, Any], small_decoder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """PiSSA's pairs belong to weights that it has changed, for one."""
    folder = saved_adapter(small_decoder, tmp_path / "adapter", **changes)
    assert run(["merge", str(folder), "--output_dir", str(tmp_path / "merged")]) == EXIT_BAD_CONFIG
    assert next(iter(changes)) in capfd.readouterr().err
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("begin", [True, False, "gaussian", "eva", "orthogonal"])
def test_merge_takes_adapters_however_their_pairs_began(begin: Any, small_decoder: Path, tmp_path: Path) -> None:
    folder = saved_adapter(small_decoder, tmp_path / "adapter", init_lora_weights=begin)
    assert run(["merge", str(folder), "--output_dir", str(tmp_path / "merged")]) == 0


def test_adapter_of_a_folder_by_a_relative_name_merges_from_elsewhere(
    small_decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name could be that of a model on the hub, to which the pairs would be added in silence."""
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    shutil.copytree(small_decoder, here / "gpt2")
    elsewhere.mkdir()
    monkeypatch.chdir(here)
    out = trained("lm", Path("gpt2"), tmp_path, num_train_epochs=1)
    monkeypatch.chdir(elsewhere)
    assert run(["merge", str(out), "--output_dir", "merged"]) == 0
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == str(here / "gpt2")


@pytest.mark.night
def test_merge_reads_the_revision_that_the_run_named(small_decoder: Path, tmp_path: Path) -> None:
    """The cache of the hub holds that one alone."""
    stored, commit = tmp_path / "hub" / "models--someone--tiny", "0" * 40
    shutil.copytree(small_decoder, stored / "snapshots" / commit)
    (stored / "refs").mkdir()
    (stored / "refs" / "old").write_text(commit)
    asked = words("lm", Path("someone/tiny"), tmp_path / "out", "--do_train", train_file=examples("lm", tmp_path),
                  lora_r=2, max_steps=1, model_revision="old")  # fmt: skip
    merge = ["merge", str(tmp_path / "out"), "--output_dir", str(tmp_path / "merged")]
    both = f"from whet.cli.main import run\nassert run({asked!r}) == 0\nassert run({merge!r}) == 0"
    where = os.environ | {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", both], env=where, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "merged" / "model.safetensors").exists()


STOPPED = """
import os, signal
from whet.cli.main import main
from whet.jobs import model_card
model_card.write = lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM)
main()
"""


@pytest.mark.reliability
@pytest.mark.parametrize("saves", [False, True])
def test_run_stopped_after_its_training_continues_with_the_adapter(
    saves: bool, small_decoder: Path, tmp_path: Path
) -> None:
    """No command reads the output folder as a model: it continues from a checkpoint, if there is one."""
    file = examples("lm", tmp_path)
    options = {"lora_r": 2, "max_steps": 2, "save_strategy": "steps" if saves else "no", "save_steps": 2}
    options |= {"train_file": file, "validation_file": file}
    asked = words("lm", small_decoder, tmp_path / "out", "--do_train", "--do_eval", **options)
    done = subprocess.run([sys.executable, "-c", STOPPED, *asked], capture_output=True, text=True, check=False)
    assert "stopped by SIGTERM: the trained model is in" in done.stderr
    assert ("continue with" in done.stderr) == saves
    if saves:
        again = next(line for line in done.stderr.splitlines() if line.startswith("whet lm"))
        assert run(shlex.split(again)[1:]) == 0
        assert load(tmp_path / "out", "eval_results.json")["eval_loss"] > 0


REFUSED = {
    "lora_alpha would change nothing without lora_r": {"lora_alpha": 8},
    "the model has no layer q_projj": {"lora_r": 4, "lora_target_modules": "q_projj"},
    "the model's head gets no pair: lm_head": {"lora_r": 4, "lora_target_modules": "q_proj,lm_head"},
    "lora_dropout is not from 0, below 1": {"lora_r": 4, "lora_dropout": 1.5},
}


@pytest.mark.parametrize("says", REFUSED)
def test_settings_of_lora_that_cannot_work_are_refused(
    says: str, small_decoder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    asked = words("lm", small_decoder, tmp_path / "out", "--do_train", train_file=examples("lm", tmp_path),
                  **REFUSED[says])  # fmt: skip
    assert run(asked) == EXIT_BAD_CONFIG
    assert says in " ".join(capfd.readouterr().err.split())


def test_run_on_an_adapter_names_merge(small_decoder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = trained("lm", small_decoder, tmp_path)
    assert run(words("lm", out, tmp_path / "more", "--do_train", train_file=tmp_path / "rows.jsonl")) == EXIT_BAD_CONFIG
    assert "whet merge" in " ".join(capfd.readouterr().err.split())


def test_checkpoint_of_an_adapter_by_transformers_names_merge(
    small_decoder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its folder is no model: whoever starts from its weights has to merge them first."""
    folder = saved_adapter(small_decoder, tmp_path / "checkpoint-2")
    (folder / "trainer_state.json").write_text("{}")
    options: dict[str, Any] = {"train_file": examples("lm", tmp_path), "max_steps": 1, "save_strategy": "no"}
    asked = words("lm", small_decoder, tmp_path / "out", "--do_train", **options, resume_from_checkpoint=folder)
    assert run(asked) == EXIT_IO
    said = " ".join(capfd.readouterr().err.split())
    found = re.search(r"run: whet (merge \S+ --output_dir) MERGED; then --model_name_or_path MERGED", said)
    assert found is not None
    assert run([*shlex.split(found[1]), str(tmp_path / "merged")]) == 0
    assert run(words("lm", tmp_path / "merged", tmp_path / "out", "--do_train", **options)) == 0


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"lora_alpha": 64}, "model.adapters.default.lora_alpha: 32 in the checkpoint -> 64 now"),
        ({"lora_dropout": 0.3}, "model.adapters.default.lora_dropout: 0.05 in the checkpoint -> 0.3 now"),
        ({"use_rslora": True}, "model.adapters.default.use_rslora: False in the checkpoint -> True now"),
    ],
    ids=str,
)
def test_resumed_run_keeps_the_settings_of_its_adapter(
    changed: dict[str, Any], says: str, small_decoder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def asked(*flags: str, **options: Any) -> list[str]:
        usual = {"train_file": tmp_path / "rows.jsonl", "lora_r": 4, "save_strategy": "steps", "save_steps": 1}
        return words("lm", small_decoder, tmp_path / "out", "--do_train", *flags, **(usual | options))

    examples("lm", tmp_path)
    assert run(asked(max_steps=1)) == 0
    again = {"max_steps": 2, "resume_from_checkpoint": "auto", **changed}
    assert run(asked(**again)) == EXIT_BAD_CONFIG
    assert says in " ".join(capfd.readouterr().err.split())
    assert run(asked(**again, resume_allow_changes="model")) == 0
    saved = load(tmp_path / "out", "checkpoint-2/adapter_config.json")
    assert {name: saved[name] for name in changed} == changed


def test_checkpoint_without_the_settings_of_its_adapter_resumes(tmp_path: Path) -> None:
    """Older versions did not write them, and another peft has other settings."""

    def trained_to(n_steps: int, **changes: Any) -> Any:
        wrapped = peft.get_peft_model(tiny_decoder("llama"), peft.LoraConfig(target_modules=["q_proj"], r=2))
        args = arguments(tmp_path, max_steps=n_steps, save_strategy="steps", save_steps=1, **changes)
        trainer = engine.Trainer(wrapped, args, collate, token_rows(8))
        trainer.train()
        return trainer

    trained_to(1)
    for n_steps, change in (
        (2, lambda found: found.pop("adapters")),
        (3, lambda found: found["adapters"]["default"].pop("bias")),
    ):
        folder = tmp_path / f"checkpoint-{n_steps - 1}"
        facts = json.loads((folder / "identity.json").read_text())
        change(facts["model"])
        (folder / "identity.json").write_text(json.dumps(facts))
        sealed = manifest.facts_of(folder)
        assert sealed is not None
        (folder / manifest.MANIFEST).unlink()
        manifest.seal(folder, n_steps - 1, sealed)
        assert trained_to(n_steps, resume_from_checkpoint="auto").state.global_step == n_steps


def test_second_training_of_an_adapter_removes_the_checkpoints_whose_steps_it_holds(tmp_path: Path) -> None:
    wrapped = peft.get_peft_model(tiny_decoder("llama"), peft.LoraConfig(target_modules=["q_proj"], r=2))
    args = arguments(tmp_path, max_steps=2, save_strategy="steps", save_steps=1)
    trainer = engine.Trainer(wrapped, args, collate, token_rows(8))
    for _ in range(2):
        trainer.train()
    assert {path.name for path in tmp_path.glob("*checkpoint*")} == {"checkpoint-1", "checkpoint-2"}
    assert not [*tmp_path.glob("abandoned-*")]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"attn_implementation": "sdpa"},
        {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
        {"gradient_checkpointing": True},
        {"optimizer_in_backward": True, "max_grad_norm": 0.0},
    ],
    ids=lambda one: " ".join(one) or "packed",
)
def test_weight_without_a_gradient_ends_the_first_step(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Such as a pair next to a layer that the loss does not read."""
    model = tiny_decoder("llama")
    model.model.unread = nn.Linear(4, 4)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "unread"], r=2))
    trainer = engine.Trainer(wrapped, arguments(tmp_path, max_steps=2, **settings), collate, token_rows(8))
    for _ in range(2):  # a second training looks again, and the first has left nothing behind
        with pytest.raises(ConfigError, match=r"unread\.lora_A"):
            trainer.train()
        assert trainer.state.global_step == 1
        assert not any(weight._post_accumulate_grad_hooks for weight in wrapped.parameters())


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("adapter", [False, True])
def test_every_weight_that_is_trained_has_a_gradient(
    tmp_path: Path, checkpointing: bool, packed: bool, adapter: bool
) -> None:
    model: Any = tiny_decoder("qwen3")
    if adapter:
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=2))
    settings: dict[str, Any] = {"max_steps": 1, "gradient_checkpointing": checkpointing}
    if packed:
        trainer = trainer_of(tmp_path, model, token_rows(8), **settings)
    else:
        args = arguments(tmp_path, attn_implementation="sdpa", **settings)
        trainer = engine.Trainer(model=model, args=args, train_dataset=token_rows(8), data_collator=collate)
        assert not trainer.objective.packed
    trainer.train()


@pytest.mark.parametrize(("rank", "named"), [(8, ""), (40, "k_proj (16), q_proj (32)")])
def test_rank_above_the_width_of_a_layer_is_named(
    rank: int, named: str, small_decoder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trained("lm", small_decoder, tmp_path, lora_r=rank, lora_target_modules="q_proj,k_proj", num_train_epochs=1)
    err = capfd.readouterr().err
    assert ("is above the width of" in err) == bool(named)
    assert named in err
