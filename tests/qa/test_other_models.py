"""Models that are no plain encoder: each trains, or is refused by its name with a way that works."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from tiny_qa import command, squad, trained_tokenizer, write_json

from whet.cli.main import run
from whet.errors import EXIT_BAD_CONFIG

_SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
_T5 = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2, "pad_token_id": 0,
       "decoder_start_token_id": 0}  # fmt: skip
_BART = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "pad_token_id": 0,
         "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 128,
         "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 3, "forced_eos_token_id": 3}  # fmt: skip
_XLM = {"emb_dim": 32, "n_layers": 1, "n_heads": 2, "max_position_embeddings": 128, "pad_index": 0, "pad_token_id": 0,
        "bos_token_id": 2, "eos_token_id": 3, "n_langs": 1}  # fmt: skip
TRAINED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "T5": ("T5Config", "T5ForConditionalGeneration", _T5),
    "MT5": ("MT5Config", "MT5ForConditionalGeneration", _T5),
    "BART": ("BartConfig", "BartModel", _BART),
    "GPT-2": ("GPT2Config", "GPT2Model", {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 128,
                                          "bos_token_id": 2, "eos_token_id": 3}),
    "Llama": ("LlamaConfig", "LlamaModel", _SMALL),
    "XLM": ("XLMConfig", "XLMModel", _XLM),
    "Flaubert": ("FlaubertConfig", "FlaubertModel", _XLM),
    "XLNet": ("XLNetConfig", "XLNetModel", {"d_model": 32, "n_layer": 1, "n_head": 2, "d_inner": 64, "pad_token_id": 0,
                                            "bos_token_id": 2, "eos_token_id": 3}),
    "BERT as a decoder": ("BertConfig", "BertLMHeadModel", {**_SMALL, "is_decoder": True}),
}  # fmt: skip
REFUSED: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "ViT": ("ViTConfig", "ViTModel", _SMALL, "vit models have no head for extractive question answering"),
    "Longformer without its separators": (
        "LongformerConfig", "LongformerModel", {**_SMALL, "attention_window": [16], "max_position_embeddings": 128},
        "LongformerForQuestionAnswering cannot read rows of a question and its context",
    ),
}  # fmt: skip


def _words(folder: Path, config: str, model: str, settings: dict[str, Any]) -> list[str]:
    tokenizer = trained_tokenizer()
    sizes = {} if config == "ViTConfig" else {"vocab_size": len(tokenizer)}
    made: Callable[..., Any] = getattr(transformers, model)
    made(getattr(transformers, config)(**settings, **sizes)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    data = write_json(folder / "train.json", squad())
    return command(folder / "model", folder / "out", "--do_train", "--do_eval", train_file=data, validation_file=data,
                   max_steps=2, per_device_train_batch_size=4)  # fmt: skip


@pytest.mark.parametrize("kind", TRAINED)
def test_models_with_a_question_answering_head_train(kind: str, tmp_path: Path) -> None:
    assert run(_words(tmp_path, *TRAINED[kind])) == 0
    assert (tmp_path / "out" / "eval_results.json").exists()


@pytest.mark.parametrize("kind", REFUSED)
def test_model_without_a_question_answering_head_is_refused(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    *parts, message = REFUSED[kind]
    assert run(_words(tmp_path, *parts)) == EXIT_BAD_CONFIG
    told = capsys.readouterr().err
    assert message in told
    assert "albert, bert, camembert, data2vec-text, deberta" in told
