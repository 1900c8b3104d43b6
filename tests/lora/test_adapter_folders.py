"""Folders that --lora_r or peft wrote, read by `whet predict`, `whet ask` and `whet generate` without a merge."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, LlamaForCausalLM

from text_tasks import SAILING, examples, load_lines, save_encoder, words
from whet.cli.main import run
from whet.errors import EXIT_BAD_CONFIG, escape_controls

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

CLOSE = 1e-4
"""Of a score: float32 rounding of weights that were added."""
COMMANDS = ("qa", "classify", "tag", "lm")


@pytest.fixture(scope="module")
def adapters(small_decoder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of a run with LoRA for each task; the models lie next to them."""
    folder = tmp_path_factory.mktemp("adapters")
    save_encoder(folder / "encoder")
    shutil.copytree(small_decoder, folder / "decoder")
    found = {}
    for command in COMMANDS:
        (folder / command).mkdir()
        model = folder / ("decoder" if command == "lm" else "encoder")
        options: dict[str, Any] = {"train_file": examples(command, folder / command), "max_steps": 6, "lora_r": 4}
        options |= {"doc_stride": 8} if command == "qa" else {}
        options |= {"save_strategy": "steps", "save_steps": 6, "learning_rate": 3e-2}
        assert run(words(command, model, folder / command / "out", "--do_train", **options)) == 0
        found[command] = folder / command / "out"
    return found


def answers(command: str, model: Path, folder: Path) -> list[Any]:
    """Return the model's predictions of the examples that it has learnt."""
    folder.mkdir(exist_ok=True)
    file, output = examples(command, folder), folder / "found.jsonl"
    assert run(["predict", str(model), "--file", str(file), "--output", str(output)]) == 0
    return load_lines(output)


def merged(folder: Path, output: Path) -> Path:
    assert run(["merge", str(folder), "--output_dir", str(output)]) == 0
    return output


def close(found: Any, wanted: Any) -> bool:
    """Return whether two answers agree: numbers nearly, everything else exactly."""
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(close(found[name], wanted[name]) for name in wanted)
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(close, found, wanted))
    return abs(found - wanted) < CLOSE if isinstance(wanted, float) else found == wanted


@pytest.mark.parametrize("command", ["qa", "classify", "tag"])
@pytest.mark.parametrize("place", ["out", "out/checkpoint-*"])
def test_predictions_of_an_adapter_are_those_of_the_merged_model(
    command: str, place: str, adapters: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder,) = adapters[command].parent.glob(place)
    found = answers(command, folder, tmp_path)
    assert "no digest" not in capfd.readouterr().err
    wanted = answers(command, merged(adapters[command], tmp_path / "merged"), tmp_path / "whole")
    assert close(found, wanted)


def _printed(line: list[str], capfd: pytest.CaptureFixture[str]) -> str:
    capfd.readouterr()
    assert run(line) == 0
    return capfd.readouterr().out


def test_text_of_an_adapter_is_that_of_the_merged_model(
    adapters: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    line = ["--prompt", SAILING[0][:12], "--max_new_tokens", "12"]
    found = _printed(["generate", str(adapters["lm"]), *line], capfd)
    assert found == _printed(["generate", str(merged(adapters["lm"], tmp_path / "merged")), *line], capfd)
    plain = _printed(["generate", str(adapters["lm"].parents[1] / "decoder"), *line], capfd)
    assert found != plain


def test_answers_of_an_adapter_are_those_of_the_merged_model(
    adapters: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text(". ".join(SAILING), "utf-8")
    line = ["--context", str(tmp_path / "notes.txt"), "--question", "where lay the boat?"]
    line += ["--max_seq_length", "32", "--doc_stride", "8"]
    found = _printed(["ask", str(adapters["qa"]), *line], capfd)
    assert found == _printed(["ask", str(merged(adapters["qa"], tmp_path / "merged")), *line], capfd)


def test_share_that_is_trained_is_logged(
    small_decoder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    line = words("lm", small_decoder, tmp_path / "out", "--do_train", train_file=examples("lm", tmp_path), lora_r=2,
                 max_steps=1, lora_target_modules="q_proj")  # fmt: skip
    line[line.index("--max_seq_length")] = "--max_length"
    assert run(line) == 0
    n_weights = sum(one.numel() for one in LlamaForCausalLM.from_pretrained(small_decoder).parameters())
    n_trained = 2 * 2 * (32 + 32)  # two blocks, a pair of rank 2 each
    shown = capfd.readouterr().out
    assert f"LoRA: {n_trained / 1e6:.4f} of {(n_weights + n_trained) / 1e6:.4f} million weights trained" in shown


def test_peft_opens_the_folder_of_a_run(adapters: dict[str, Path], capfd: pytest.CaptureFixture[str]) -> None:
    """With the model that it names; the docs name this call, as transformers' own looks for all weights there."""
    model = peft.AutoPeftModelForCausalLM.from_pretrained(adapters["lm"]).eval()
    tokenizer = AutoTokenizer.from_pretrained(adapters["lm"])
    ids = tokenizer(SAILING[0][:12], return_tensors="pt")
    written = model.generate(**ids, max_new_tokens=6, do_sample=False, pad_token_id=1)
    found = _printed(["generate", str(adapters["lm"]), "--prompt", SAILING[0][:12], "--max_new_tokens", "6"], capfd)
    assert found.strip() == escape_controls(tokenizer.decode(written[0], skip_special_tokens=True)).strip()
    with pytest.raises(OSError, match=r"no file named"):
        AutoModelForCausalLM.from_pretrained(adapters["lm"])


def _moved(adapters: dict[str, Path], command: str, folder: Path) -> tuple[Path, Path]:
    """Return copies of an adapter and of its model; the adapter names a folder that is gone."""
    model = adapters[command].parents[1] / ("decoder" if command == "lm" else "encoder")
    shutil.copytree(adapters[command], folder / "adapter")
    shutil.copytree(model, folder / "model")
    path = folder / "adapter" / "adapter_config.json"
    settings = json.loads(path.read_text("utf-8")) | {"base_model_name_or_path": str(folder / "gone")}
    path.write_text(json.dumps(settings), "utf-8")
    return folder / "adapter", folder / "model"


def test_model_that_moved_is_named_by_a_flag(
    adapters: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    adapter, model = _moved(adapters, "lm", tmp_path)
    line = ["generate", str(adapter), "--prompt", SAILING[0][:12], "--max_new_tokens", "6"]
    assert run(line) == EXIT_BAD_CONFIG
    shown = capfd.readouterr().err
    assert "is not where it was" in shown
    assert str(tmp_path / "gone") in shown
    assert "--base_model_name_or_path" in shown
    wanted = _printed(["generate", str(adapters["lm"]), *line[2:]], capfd)
    assert _printed([*line, "--base_model_name_or_path", str(model)], capfd) == wanted


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        ("generate", "--base_model_name_or_path"),
        ("merge", "--base_model_name_or_path"),
        ("merge", "--model_name_or_path"),
    ],
)
def test_model_that_changed_is_refused(
    command: str, flag: str, adapters: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One weight is enough. `whet merge` had another name for the flag."""
    adapter, folder = _moved(adapters, "lm", tmp_path)
    model: Any = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] += 1e-3
    model.save_pretrained(folder)
    line = {
        "generate": ["--prompt", "the boat"],
        "merge": ["--output_dir", str(tmp_path / "merged")],
    }[command]
    assert run([command, str(adapter), *line, flag, str(folder)]) == EXIT_BAD_CONFIG
    shown = " ".join(capfd.readouterr().err.split())
    assert "the adapter was trained on other weights" in shown
    assert "name the model that it was trained on in --base_model_name_or_path" in shown


def test_model_in_shards_has_the_same_digest(adapters: dict[str, Path], tmp_path: Path) -> None:
    adapter, folder = _moved(adapters, "lm", tmp_path)
    model = LlamaForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len([*folder.glob("*.safetensors")]) > 2
    line = ["generate", str(adapter), "--prompt", "the boat", "--max_new_tokens", "2"]
    assert run([*line, "--base_model_name_or_path", str(folder)]) == 0


def test_adapter_of_peft_itself_is_read_with_a_warning(
    small_decoder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False)
    wrapped = peft.get_peft_model(LlamaForCausalLM.from_pretrained(small_decoder), config).eval()
    wrapped.save_pretrained(tmp_path / "adapter")
    line = ["generate", str(tmp_path / "adapter"), "--prompt", SAILING[0][:12], "--max_new_tokens", "6"]
    assert run(line) == 0
    shown = capfd.readouterr()
    assert "records no digest of its model" in shown.err
    tokenizer = AutoTokenizer.from_pretrained(small_decoder)
    ids = tokenizer(SAILING[0][:12], return_tensors="pt")
    written = wrapped.generate(**ids, max_new_tokens=6, do_sample=False, pad_token_id=1)
    assert shown.out.strip() == tokenizer.decode(written[0], skip_special_tokens=True).strip()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["generate", "{classify}", "--prompt", "the"], "it was trained for text classification"),
        (["ask", "{tag}", "--context", "{file}", "--question", "who?"], "it was trained for token classification"),
        (["predict", "{lm}", "--file", "{file}"], "no head that whet predicts with"),
        (
            ["generate", "{decoder}", "--prompt", "the", "--base_model_name_or_path", "{decoder}"],
            "would change nothing",
        ),
    ],
)
def test_adapters_for_another_task_are_refused(
    line: list[str], said: str, adapters: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    names = {**adapters, "file": examples("classify", tmp_path), "decoder": adapters["lm"].parents[1] / "decoder"}
    assert run([word.format(**names) for word in line]) == EXIT_BAD_CONFIG
    assert said in capfd.readouterr().err


@pytest.mark.parametrize("command", ["generate", "merge", "lm"])
def test_adapter_of_the_hub_is_to_be_downloaded(
    command: str, adapters: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    stored = tmp_path / "hub" / "models--some--adapter"
    shutil.copytree(adapters["lm"], stored / "snapshots" / ("0" * 40))
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text("0" * 40, "utf-8")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    line = {
        "generate": ["generate", "some/adapter", "--prompt", "the boat"],
        "merge": ["merge", "some/adapter", "--output_dir", str(tmp_path / "merged")],
        "lm": words("lm", Path("some/adapter"), tmp_path / "out", "--do_train", train_file=examples("lm", tmp_path)),
    }[command]
    assert run(line) == EXIT_BAD_CONFIG
    shown = " ".join(capfd.readouterr().err.split())
    assert f"hf download {'NAME' if command == 'merge' else 'some/adapter'} --local-dir adapter" in shown


def test_adapter_without_the_head_that_it_needs_is_refused(
    adapters: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """peft saves the head and no pooler; if the model has none either, the answers would be random."""
    shutil.copytree(adapters["classify"].parents[1] / "encoder", tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "pooler" not in name}
    save_file(kept, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS")).save_pretrained(tmp_path / "adapter")
    line = ["predict", str(tmp_path / "adapter"), "--file", str(examples("classify", tmp_path))]
    assert run([*line, "--output", str(tmp_path / "x.jsonl")]) == EXIT_BAD_CONFIG
    assert "neither holds weights for bert.pooler.dense" in capfd.readouterr().err
