"""`whet doctor MODEL`: whether a model trains without padding, by the code that training uses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    AutoModelForSequenceClassification,
    EuroBertConfig,
    EuroBertForTokenClassification,
    OlmoConfig,
    OlmoModel,
)

import engine
from tiny import arguments, tiny_config, tiny_model
from tiny_decoders import tiny_decoder
from whet.cli.main import run
from whet.kernels.library import library
from whet.objectives.packed_head import PackedHead

_SIZES: dict[str, Any] = {"vocab_size": 200, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_SIZES |= {"intermediate_size": 64, "max_position_embeddings": 80, "pad_token_id": 0, "bos_token_id": 1}
_SIZES |= {"eos_token_id": 2}


def asked(folder: Path, model: Any, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    model.save_pretrained(folder)
    assert run(["doctor", str(folder), *more]) == 0
    return capsys.readouterr().out


def test_a_known_family_is_named_with_its_fused_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = asked(tmp_path, tiny_model("bert"), capsys)
    assert "runs without padding: whet knows the family bert" in text
    assert "reads packed rows" in text
    assert "2 BertSelfAttention" in text or library() is None


def test_an_unknown_family_is_proven(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = EuroBertForTokenClassification(EuroBertConfig(**_SIZES, mask_token_id=3))
    found = json.loads(asked(tmp_path, model, capsys, "--json"))
    assert found["packed"]
    assert found["how"].startswith("proven")
    assert found["head"] == "reads packed rows"
    assert found["fused"] == {} if library() is None else found["fused"]["EuroBertRMSNorm"] == 5


def test_a_model_that_needs_its_padding_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(asked(tmp_path, OlmoModel(OlmoConfig(**_SIZES)), capsys, "--json"))
    assert not found["packed"]
    assert "causal" in found["how"]
    assert found["fused"] == {}


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_language_model_has_its_head(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_decoder(family)
    found = json.loads(asked(tmp_path, model, capsys, "--json"))
    assert found["packed"]
    assert found["model_class"] == type(model).__name__
    assert found["head"] == "reads packed rows"
    bare = json.loads(asked(tmp_path / "bare", model.base_model, capsys, "--json"))
    assert bare["head"] == "none: the model is loaded without one"


_XLM = {"vocab_size": 200, "emb_dim": 32, "n_layers": 1, "n_heads": 2}


@pytest.mark.parametrize(
    ("config", "head"),
    [
        (transformers.FlaubertConfig(**_XLM), "FlaubertWithLMHeadModel"),
        (transformers.XLMConfig(**_XLM), "XLMWithLMHeadModel"),
        (transformers.XLNetConfig(vocab_size=200, d_model=32, n_layer=1, n_head=2, d_inner=64), "XLNetLMHeadModel"),
        (tiny_config("bert"), "BertForMaskedLM"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_head_that_an_encoder_was_pretrained_with_is_left_out(
    config: Any, head: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = getattr(transformers, head)(config)
    found = json.loads(asked(tmp_path, model, capsys, "--json"))
    assert found["model_class"] == type(model.base_model).__name__
    assert found["head"] == "none: the model is loaded without one"


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_way_of_a_language_model_to_llama_cpp_is_named(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_decoder(family).save_pretrained(tmp_path)
    assert run(["export", str(tmp_path), "--to", "gguf"]) == 78
    assert f"convert_hf_to_gguf.py on {tmp_path}" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("family", ["bert", "eurobert"])
def test_the_doctor_says_what_the_trainer_does(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    config = tiny_config("bert") if family == "bert" else EuroBertConfig(**_SIZES, mask_token_id=3)
    model = AutoModelForSequenceClassification.from_config(config)
    found = json.loads(asked(tmp_path / "model", model, capsys, "--json"))
    trained = engine.Trainer(model=model, args=arguments(tmp_path / "out"))
    assert found["packed"] == (trained.objective.packed_model is not None)
    assert (found["head"] == "reads packed rows") == isinstance(trained.objective, PackedHead)


def test_a_folder_without_a_model_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", str(tmp_path / "nowhere")]) != 0
    assert "MODEL" in capsys.readouterr().err


def test_a_model_and_kernels_are_two_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", str(tmp_path), "--kernels"]) == 78
    assert "two commands" in capsys.readouterr().err


def test_a_folder_with_code_of_its_own_is_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_model("bert").save_pretrained(tmp_path)
    (tmp_path / "modeling_evil.py").write_text("import sys\nsys.whet_was_here = True\n")
    config = json.loads((tmp_path / "config.json").read_text())
    config["auto_map"] = {"AutoModel": "modeling_evil.Evil"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    run(["doctor", str(tmp_path)])
    capsys.readouterr()
    assert not hasattr(sys, "whet_was_here")
