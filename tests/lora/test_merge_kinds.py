"""What `whet merge` makes of each kind of LoRA, and of settings that no run has written: the model, or a reason."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from text_tasks import save_encoder
from whet.cli.main import run
from whet.errors import EXIT_BAD_CONFIG

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
]

CLOSE = 1e-5
"""Relative to the largest logit: float32 rounding of weights that were added, through two blocks."""
SPREAD = 0.3
"""Of the random numbers of an adapter: its effect is as large as the logits of the model."""


def _tied(folder: Path) -> nn.Module:
    config: Any = AutoConfig.from_pretrained(folder)
    config.tie_word_embeddings = True
    return LlamaForCausalLM(config)


def _gpt2(folder: Path) -> nn.Module:
    n_tokens = AutoConfig.from_pretrained(folder).vocab_size
    sizes: dict[str, Any] = {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 64,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return GPT2LMHeadModel(GPT2Config(vocab_size=n_tokens, **sizes))


def _experts(folder: Path) -> nn.Module:
    n_tokens = AutoConfig.from_pretrained(folder).vocab_size
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    sizes |= {"num_key_value_heads": 2, "num_local_experts": 4, "bos_token_id": 0, "eos_token_id": 0}
    return MixtralForCausalLM(MixtralConfig(vocab_size=n_tokens, **sizes))


MAKERS: dict[str, Callable[[Path], nn.Module]] = {
    "llama": lambda folder: AutoModelForCausalLM.from_pretrained(folder),
    "tied": _tied,
    "tied bf16": lambda folder: _tied(folder).to(torch.bfloat16),
    "gpt2": _gpt2,
    "mixtral": _experts,
}


@pytest.fixture(scope="module")
def bases(small_decoder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of tiny decoders with one tokenizer."""
    folders = {}
    for name, make in MAKERS.items():
        folders[name] = tmp_path_factory.mktemp(name.replace(" ", "_"))
        for path in small_decoder.glob("*token*"):
            (folders[name] / path.name).write_bytes(path.read_bytes())
        torch.manual_seed(0)
        model: Any = make(small_decoder)
        model.save_pretrained(folders[name])
    return folders


def saved(base: Path, folder: Path, *, auto: Any = AutoModelForCausalLM, task: str = "CAUSAL_LM", **kind: Any) -> Path:
    """Save an adapter of this kind with random weights, and return its folder."""
    kind = {"target_modules": ["q_proj", "v_proj"]} | kind
    model = auto.from_pretrained(base, dtype=torch.float32)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(task_type=task, **kind))
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in wrapped.parameters():
            if weight.requires_grad:
                weight += SPREAD * torch.randn_like(weight)
    wrapped.save_pretrained(folder)
    return folder


def changed(folder: Path, **settings: Any) -> Path:
    """Change settings of the adapter, and return its folder."""
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return folder


def with_peft(base: Path, adapter: Path, auto: Any = AutoModelForCausalLM) -> Any:
    """Return the logits of the model with its adapter, as peft computes them without merging."""
    return logits(peft.PeftModel.from_pretrained(auto.from_pretrained(base, dtype=torch.float32), adapter))


def logits(model: Any) -> Any:
    ids = torch.tensor([[0, 3, 5, 20, 30, 7, 11]])
    with torch.no_grad():
        out = model.eval()(input_ids=ids, attention_mask=torch.ones_like(ids))
    return torch.cat([value.flatten() for name, value in out.items() if name.endswith("logits")])


def off(found: Any, wanted: Any) -> float:
    """How far the two are apart, as a part of the largest."""
    return float((found - wanted).abs().max() / wanted.abs().max())


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "rslora": ("llama", {"use_rslora": True}),
    "dora": ("llama", {"use_dora": True}),
    "dora of conv1d": ("gpt2", {"target_modules": ["c_attn"], "use_dora": True, "fan_in_fan_out": True}),
    "conv1d": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "bias all": ("gpt2", {"target_modules": ["c_attn"], "bias": "all", "fan_in_fan_out": True}),
    "bias lora_only": ("gpt2", {"target_modules": ["c_attn"], "bias": "lora_only", "fan_in_fan_out": True}),
    "lora_bias": ("gpt2", {"target_modules": ["c_attn"], "lora_bias": True, "fan_in_fan_out": True}),
    "pattern": ("llama", {"target_modules": r".*layers\.1\..*(q|v)_proj"}),
    "one layer": ("llama", {"layers_to_transform": [1]}),
    "ranks": ("llama", {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}}),
    "excluded": ("llama", {"target_modules": "all-linear", "exclude_modules": ["k_proj"]}),
    "norms": ("llama", {"modules_to_save": ["input_layernorm"]}),
    "head saved": ("tied", {"modules_to_save": ["lm_head"]}),
    "table saved": ("tied", {"modules_to_save": ["embed_tokens"]}),
    "both saved": ("tied", {"modules_to_save": ["embed_tokens", "lm_head"]}),
    "tokens": ("llama", {"trainable_token_indices": [3, 5]}),
    "tokens of a tied table": ("tied", {"trainable_token_indices": [3, 5]}),
    "table": ("llama", {"target_modules": ["embed_tokens"]}),
    "tied table": ("tied", {"target_modules": ["embed_tokens"]}),
    "tied head": ("tied", {"target_modules": ["lm_head"]}),
    "both tied": ("tied", {"target_modules": ["embed_tokens", "lm_head"]}),
    "dora of a tied table": ("tied", {"target_modules": ["embed_tokens"], "use_dora": True}),
    "tied in peft too": ("tied", {"target_modules": ["embed_tokens"], "ensure_weight_tying": True}),
    "tied table of gpt2": ("gpt2", {"target_modules": ["wte"]}),
    "bf16 base": ("tied bf16", {"target_modules": ["embed_tokens", "q_proj"]}),
    "experts": ("mixtral", {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}),
}


@pytest.mark.each_value
@pytest.mark.parametrize("kind", KINDS)
def test_merged_model_computes_what_the_model_with_the_adapter_does(
    kind: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    base, settings = KINDS[kind]
    adapter = saved(bases[base], tmp_path / "adapter", **settings)
    assert run(["merge", str(adapter), "--output_dir", str(tmp_path / "merged")]) == 0
    wanted = with_peft(bases[base], adapter)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert off(logits(merged), wanted) < CLOSE
    before = logits(AutoModelForCausalLM.from_pretrained(bases[base], dtype=torch.float32))
    assert off(before, wanted) > 100 * CLOSE  # the adapter matters


@pytest.mark.parametrize("kind", ["tokens of a tied table", "tied in peft too"])
def test_tables_that_the_adapter_changes_alike_stay_tied(kind: str, bases: dict[str, Path], tmp_path: Path) -> None:
    base, settings = KINDS[kind]
    adapter = saved(bases[base], tmp_path / "adapter", **settings)
    assert run(["merge", str(adapter), "--output_dir", str(tmp_path / "merged")]) == 0
    assert "lm_head.weight" not in load_file(tmp_path / "merged" / "model.safetensors")
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["tie_word_embeddings"]


ENCODERS = {
    "SEQ_CLS": AutoModelForSequenceClassification,
    "TOKEN_CLS": AutoModelForTokenClassification,
    "QUESTION_ANS": AutoModelForQuestionAnswering,
}


@pytest.mark.parametrize("task", ENCODERS)
@pytest.mark.parametrize("kind", ["query", "word_embeddings"])
def test_merged_encoder_computes_what_it_did_with_its_adapter(kind: str, task: str, tmp_path: Path) -> None:
    save_encoder(tmp_path)
    adapter = saved(tmp_path, tmp_path / "adapter", auto=ENCODERS[task], task=task, target_modules=[kind])
    assert run(["merge", str(adapter), "--output_dir", str(tmp_path / "merged")]) == 0
    wanted = with_peft(tmp_path, adapter, ENCODERS[task])
    assert off(logits(ENCODERS[task].from_pretrained(tmp_path / "merged")), wanted) < CLOSE


def refusal(adapter: Path, output: Path, capfd: pytest.CaptureFixture[str]) -> str:
    """Merge, see it refused with nothing written, and return what was said."""
    capfd.readouterr()
    assert run(["merge", str(adapter), "--output_dir", str(output)]) == EXIT_BAD_CONFIG
    assert not output.exists()
    return " ".join(capfd.readouterr().err.split())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["q_proj.lora_A", "v_proj.lora_B"])
def test_adapter_that_is_not_finite_is_refused(
    name: str, value: float, bases: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    adapter = saved(bases["llama"], tmp_path / "adapter")
    weights = load_file(adapter / "adapter_model.safetensors")
    next(weight for key, weight in weights.items() if name in key).view(-1)[0] = value
    save_file(weights, adapter / "adapter_model.safetensors")
    said = refusal(adapter, tmp_path / "merged", capfd)
    assert "not finite" in said
    assert name in said


@pytest.mark.parametrize("alpha", [1e308, 1e39])
def test_adapter_whose_products_overflow_is_refused(
    alpha: float, bases: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    adapter = changed(saved(bases["llama"], tmp_path / "adapter"), lora_alpha=alpha)
    assert f"lora_alpha {alpha}" in refusal(adapter, tmp_path / "merged", capfd)


def test_merge_that_computes_anything_else_writes_nothing(
    bases: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of peft, say: here its pairs are added with the wrong sign."""
    adapter = saved(bases["llama"], tmp_path / "adapter")
    real = peft.tuners.lora.Linear.get_delta_weight
    monkeypatch.setattr(peft.tuners.lora.Linear, "get_delta_weight", lambda *given: -real(*given))
    assert "does not compute what the model with the adapter computes" in refusal(adapter, tmp_path / "merged", capfd)


def test_other_adapters_of_the_folder_are_named(
    bases: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """peft saves an adapter with a name of its own in a sub-folder."""
    adapter = saved(bases["llama"], tmp_path / "adapter")
    saved(bases["llama"], adapter / "second")
    assert run(["merge", str(adapter), "--output_dir", str(tmp_path / "merged")]) == 0
    assert f"{adapter / 'second'}, which are not merged" in " ".join(capfd.readouterr().err.split())
    (adapter / "adapter_model.safetensors").unlink()
    assert f"name one of {adapter / 'second'}" in refusal(adapter, tmp_path / "again", capfd)


FAULTS: dict[str, dict[str, Any]] = {
    "r of the adapter cannot be read": {"r": "4"},
    "r of the adapter": {"r": 4.0},
    "the rank of the adapter does not fit its weights": {"r": 10**12},
    "rank_pattern of the adapter": {"rank_pattern": {"q_proj": 0}},
    "use_rslora of the adapter": {"use_rslora": "false"},
    "lora_alpha of the adapter": {"lora_alpha": True},
    "target_modules of the adapter": {"target_modules": [3]},
    "modules_to_save of the adapter": {"modules_to_save": "lm_head"},
    "layers_to_transform of the adapter": {"layers_to_transform": [{}]},
    "trainable_token_indices of the adapter": {"trainable_token_indices": [-1]},
    "no weights, for": {"modules_to_save": ["lm_head"]},
    "the adapter does not fit the model": {"target_modules": "("},
    "the adapter names no model": {"base_model_name_or_path": {"a": []}},
    "the adapter names no task": {"task_type": ["CAUSAL_LM"]},
    "the adapter is not a LoRA": {"peft_type": {}},
}


@pytest.mark.parametrize("says", FAULTS)
def test_settings_that_no_run_has_written_are_refused(
    says: str, bases: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    adapter = changed(saved(bases["llama"], tmp_path / "adapter"), **FAULTS[says])
    assert says in refusal(adapter, tmp_path / "merged", capfd)


@pytest.mark.parametrize("names", [["a"], {"0": "a", "2": "b"}, {"x": "a"}, 5])
def test_labels_that_cannot_be_read_are_refused(
    names: Any, bases: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    adapter = saved(bases["llama"], tmp_path / "adapter")
    config = json.loads((bases["llama"] / "config.json").read_text())
    (adapter / "config.json").write_text(json.dumps(config | {"id2label": names}))
    assert str(adapter / "config.json") in refusal(adapter, tmp_path / "merged", capfd)


SLOW = "(.*.*.*.*.*.*.*.*.*.*)*x"


@pytest.mark.parametrize(
    "setting", [{"target_modules": SLOW}, {"rank_pattern": {SLOW: 2}}, {"modules_to_save": [SLOW]}]
)
def test_regular_expression_without_an_end_is_refused_within_seconds(
    setting: dict[str, Any], bases: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("whet.models.loading.adapter._PATTERN_S", 0.3)
    adapter = changed(saved(bases["llama"], tmp_path / "adapter"), **setting)
    began = time.monotonic()
    said = refusal(adapter, tmp_path / "merged", capfd)
    assert "a regular expression of the adapter does not end" in said
    assert str(adapter / "adapter_config.json") in said
    assert time.monotonic() - began < 5
