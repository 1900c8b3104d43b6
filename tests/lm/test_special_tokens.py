"""The special tokens of a tokenizer in the model that is trained with it, and in the texts that it then writes."""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, RobertaConfig

import engine
from saved_decoder import TEMPLATE
from text_tasks import SAILING, load, words, write_lines
from tiny import arguments
from tiny_decoders import collate
from whet.cli.main import run
from whet.models.loading.adapter import load_trained
from whet.models.loading.heads import CAUSAL_LM

IDS = ("eos_token_id", "bos_token_id", "pad_token_id")


def rows() -> list[dict[str, Any]]:
    return [{"input_ids": [20, 30, 40, 50], "labels": [20, 30, 40, 50]}] * 4


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("adapter", [False, True])
def test_saved_model_has_the_special_tokens_of_its_tokenizer_as_in_transformers(
    decoder: Path, tmp_path: Path, adapter: bool
) -> None:
    """A chat tokenizer on a base model: its turns end with another token than the model's texts."""
    tokenizer = AutoTokenizer.from_pretrained(decoder)
    tokenizer.eos_token = tokenizer.pad_token = "<|end|>"
    found = []
    for name in ("theirs", "ours"):
        model = AutoModelForCausalLM.from_pretrained(decoder)
        if adapter:
            peft = pytest.importorskip("peft")
            model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
        given: dict[str, Any] = {"train_dataset": rows(), "data_collator": collate, "processing_class": tokenizer}
        if name == "ours":
            trainer: Any = engine.Trainer(model=model, args=arguments(tmp_path / name, max_steps=1), **given)
        else:
            args = transformers.TrainingArguments(
                output_dir=str(tmp_path / name), max_steps=1, use_cpu=True, report_to="none", save_strategy="no"
            )
            trainer = transformers.Trainer(model=model, args=args, **given)
        trainer.train()
        base: Any = trainer.model.get_base_model() if adapter else trainer.model
        base.save_pretrained(tmp_path / name / "saved")
        files = [load(tmp_path / name / "saved", file) for file in ("config.json", "generation_config.json")]
        found.append([{key: file.get(key) for key in IDS} for file in files])
    assert found[1] == found[0]
    assert found[1][0]["eos_token_id"] == tokenizer.eos_token_id == 2


def test_positions_that_count_from_the_padding_token_stay(tmp_path: Path, decoder: Path) -> None:
    """RoBERTa's first position is the one after its padding token: the tokenizer's number would move them all."""
    tokenizer = AutoTokenizer.from_pretrained(decoder)
    tokenizer.pad_token = "<|end|>"
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    config = RobertaConfig(vocab_size=400, max_position_embeddings=40, pad_token_id=1, **sizes)
    model = transformers.RobertaForSequenceClassification(config)
    data = [{"input_ids": [20, 30], "labels": 1}] * 4
    batch = {"input_ids": torch.tensor([[20, 30]] * 4), "attention_mask": torch.ones(4, 2), "labels": torch.ones(4)}
    batch["labels"] = batch["labels"].long()
    engine.Trainer(
        model=model, args=arguments(tmp_path, max_steps=1), train_dataset=data, processing_class=tokenizer,
        data_collator=lambda _: batch,
    ).train()  # fmt: skip
    assert model.config.pad_token_id == 1


def test_chat_ends_with_the_turn_of_the_assistant(
    decoder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last token is not the model's end-of-text token, as in base models of Qwen."""
    tokenizer, model = AutoTokenizer.from_pretrained(decoder), AutoModelForCausalLM.from_pretrained(decoder)
    turns = [{"role": "user", "content": "the anchor?"}, {"role": "assistant", "content": "held fast"}]
    ids = tokenizer.apply_chat_template([*turns, *turns, *turns], return_dict=False, return_tensors="pt")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("the anchor?\n"))
    assert run(["generate", str(tmp_path), "--chat", "--max_new_tokens", "12"]) == 0
    assert capfd.readouterr().out.strip() == "held fast"


def test_continuation_keeps_the_space_behind_the_prompt(
    decoder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A tokenizer that marks words by the space before them leaves out the first one of what it decodes."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    raw.train_from_iterator(SAILING, trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>"]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE)
    model = AutoModelForCausalLM.from_pretrained(decoder)
    ids = tokenizer(SAILING[0], return_tensors="pt")["input_ids"]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(40):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    n_new = str(ids.shape[1] - len(tokenizer("the boat")["input_ids"]))
    assert run(["generate", str(tmp_path), "--prompt", "the boat", "--max_new_tokens", n_new]) == 0
    assert capfd.readouterr().out.strip() == SAILING[0]


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_adapter_and_merged_model_end_with_the_token_of_their_training(decoder: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    tokenizer = AutoTokenizer.from_pretrained(decoder)
    tokenizer.eos_token = "<|end|>"
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    file = write_lines(tmp_path / "texts.jsonl", [{"text": text} for text in SAILING])
    options = {"tokenizer_name": tmp_path / "tokenizer", "train_file": file, "max_steps": 1, "lora_r": 2}
    out = tmp_path / "out"
    asked = words("lm", decoder, out, "--do_train", **options)
    assert run(asked) == 0
    model, _ = load_trained(str(out), CAUSAL_LM, None)
    assert tokenizer.eos_token_id in model.generation_config.eos_token_id
    assert run(["merge", str(out), "--output_dir", str(tmp_path / "merged")]) == 0
    assert tokenizer.eos_token_id in load(tmp_path / "merged", "generation_config.json")["eos_token_id"]


def test_prompt_is_continued_before_the_end_that_the_tokenizer_adds(
    decoder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(decoder, tmp_path / "model")
    said = []
    for ends in (False, True):
        if ends:
            tokenizer = AutoTokenizer.from_pretrained(decoder)
            tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
                single="<s> $A </s>", pair="<s> $A $B </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
            )
            tokenizer.save_pretrained(tmp_path / "model")
            assert AutoTokenizer.from_pretrained(tmp_path / "model")("the boat")["input_ids"][-1] == 1
        assert run(["generate", str(tmp_path / "model"), "--prompt", "the boat", "--max_new_tokens", "6"]) == 0
        said.append(capfd.readouterr().out)
    assert said[0] == said[1]
