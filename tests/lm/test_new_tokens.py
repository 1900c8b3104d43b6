"""Tokens that were added to a tokenizer get rows in the embedding tables: trained and saved, with LoRA too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PhiConfig, PhiForCausalLM

from saved_decoder import save_decoder
from text_tasks import (
    QUESTIONS,
    TAGS,
    TOPICS,
    load,
    load_lines,
    save_encoder,
    topic_rows,
    words,
    write_csv,
    write_lines,
)
from whet.cli.main import run
from whet.errors import EXIT_BAD_CONFIG

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

NEW = ["<|ferry|>", "<|port|>"]
CLOSE = 1e-4
"""Of a loss: float32 rounding, through two layers."""


def with_new_tokens(folder: Path) -> Path:
    """Add tokens to the folder's tokenizer, as a user does before a training."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.add_tokens(NEW, special_tokens=True) == len(NEW)
    tokenizer.save_pretrained(folder)
    return folder


def decoder(folder: Path, *, tied: bool) -> Path:
    save_decoder(folder)
    if tied:
        path = folder / "config.json"
        path.write_text(json.dumps(load(folder, path.name) | {"tie_word_embeddings": True}), "utf-8")
        weights = load_file(folder / "model.safetensors")
        del weights["lm_head.weight"]
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return with_new_tokens(folder)


def texts(folder: Path) -> Path:
    """Write texts with the new tokens."""
    rows = [{"text": f"{NEW[0]} {text} {NEW[1]}"} for group in TOPICS.values() for text in group]
    return write_lines(folder / "texts.jsonl", rows)


def examples(command: str, folder: Path) -> Path:
    """Write examples of the task, each with new tokens."""
    if command == "lm":
        return texts(folder)
    if command == "classify":
        rows = [row | {"text": f"{NEW[0]} {row['text']}"} for row in topic_rows()]
        return write_csv(folder / "rows.csv", rows)
    if command == "tag":
        rows = [{"tokens": [*row["tokens"], NEW[1]], "ner_tags": [*row["ner_tags"], "O"]} for row in TAGS]
        return write_lines(folder / "rows.jsonl", rows)
    return write_lines(folder / "rows.jsonl", [row | {"question": f"{row['question']} {NEW[0]}"} for row in QUESTIONS])


def line(command: str, model: Path, folder: Path, *flags: str, **options: Any) -> list[str]:
    usual: dict[str, Any] = {"train_file": examples(command, folder), "max_steps": 3}
    usual |= {"doc_stride": 8} if command == "qa" else {}
    found = words(command, model, folder / "out", "--do_train", *flags, **(usual | options))
    if command == "lm":
        found[found.index("--max_seq_length")] = "--max_length"
    return found


def table(model: Any) -> torch.Tensor:
    return model.get_input_embeddings().weight.detach()


@pytest.mark.parametrize("command", ["qa", "classify", "tag", "lm"])
def test_new_rows_of_every_task_are_trained_and_saved(
    command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = decoder(tmp_path / "model", tied=False) if command == "lm" else tmp_path / "model"
    if command != "lm":
        save_encoder(model)
        with_new_tokens(model)
    n_before = load(model, "config.json")["vocab_size"]
    assert run(line(command, model, tmp_path, logging_steps=1)) == 0
    assert f"tokens: 2 new in the embedding tables, now {n_before + 2} rows: '<|ferry|>'" in capfd.readouterr().out
    out = tmp_path / "out"
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert len(tokenizer) == load(out, "config.json")["vocab_size"] == n_before + 2
    saved = load_file(out / "model.safetensors")
    rows = next(one for name, one in saved.items() if name.endswith(("word_embeddings.weight", "embed_tokens.weight")))
    assert rows.shape[0] == n_before + 2
    tables = [rows, saved["lm_head.weight"]] if command == "lm" else [rows]
    assert all(not torch.equal(one[-1], one[-2]) and torch.isfinite(one).all() for one in tables)


def test_new_rows_learn_more_than_they_begin_with(tmp_path: Path) -> None:
    """Trained for no time at all they are the rows that were drawn, around the mean; one step moves those in use."""
    model = decoder(tmp_path / "model", tied=False)
    found = []
    for rate in (1e-12, 1e-2):
        (tmp_path / f"at-{rate}").mkdir()
        assert run(line("lm", model, tmp_path / f"at-{rate}", learning_rate=rate, max_steps=1)) == 0
        trained = AutoModelForCausalLM.from_pretrained(tmp_path / f"at-{rate}" / "out")
        found.append((table(trained)[-2:], trained.lm_head.weight.detach()[-2:]))
    (drawn, drawn_out), (learnt, learnt_out) = found
    assert (learnt - drawn).abs().min() > 1e-4
    assert (learnt_out - drawn_out).abs().min() > 1e-4
    assert (drawn - table(AutoModelForCausalLM.from_pretrained(model)).mean(0)).abs().max() < 0.1


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_adapter_trains_and_saves_the_new_rows_alone(
    tied: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    peft = pytest.importorskip("peft")
    model = decoder(tmp_path / "model", tied=tied)
    file = texts(tmp_path)
    asked = line("lm", model, tmp_path, "--do_eval", validation_file=file, lora_r=2, learning_rate=1e-2)
    assert run(asked) == 0
    out, saved = tmp_path / "out", load_file(tmp_path / "out" / "adapter_model.safetensors")
    rows = {name: one.shape[0] for name, one in saved.items() if "lora_" not in name}
    assert set(rows.values()) == {len(NEW)}
    assert len(rows) == (1 if tied else 2)

    base = AutoModelForCausalLM.from_pretrained(model)
    n_before, frozen = base.config.vocab_size, table(base).clone()
    base.resize_token_embeddings(len(AutoTokenizer.from_pretrained(out)))
    wrapped = peft.PeftModel.from_pretrained(base, out).eval()
    assert torch.equal(table(base)[:n_before], frozen)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert run(["merge", str(out), "--output_dir", str(tmp_path / "merged")]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert merged.config.vocab_size == n_before + len(NEW)
    ids = tokenizer(f"{NEW[0]} {TOPICS['sailing'][0]} {NEW[1]}", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        wanted = wrapped(ids, labels=ids)
        assert torch.allclose(merged(ids).logits, wanted.logits, atol=CLOSE)
    losses = [_loss(wrapped, tokenizer, row["text"]) for row in load_lines(file)]
    total, count = (sum(part) for part in zip(*losses, strict=True))
    assert load(out, "eval_results.json")["eval_loss"] == pytest.approx(total / count, abs=CLOSE)

    capfd.readouterr()
    prompt = ["--prompt", f"{NEW[0]} the", "--max_new_tokens", "5"]
    assert run(["generate", str(out), *prompt]) == 0
    first = capfd.readouterr().out
    assert run(["generate", str(tmp_path / "merged"), *prompt]) == 0
    assert capfd.readouterr().out == first


def _loss(model: Any, tokenizer: Any, text: str) -> tuple[float, int]:
    """Return the sum of the losses of a text's tokens, and their number."""
    ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
    with torch.no_grad():
        loss = model(ids, labels=ids).loss
    return float(loss) * (ids.shape[1] - 1), ids.shape[1] - 1


@pytest.mark.parametrize("lora", [{}, {"lora_r": 2}], ids=["all weights", "adapter"])
def test_stopped_run_with_new_tokens_resumes_bitwise(lora: dict[str, int], tmp_path: Path) -> None:
    if lora:
        pytest.importorskip("peft")
    model = decoder(tmp_path / "model", tied=True)
    found = []
    for name, parts in (("once", [6]), ("twice", [3, 6])):
        folder = tmp_path / name
        folder.mkdir()
        for last in parts:
            more = {} if last == parts[0] else {"resume_from_checkpoint": "auto"}
            options: dict[str, Any] = {"max_steps": last, "save_strategy": "steps", "save_steps": 3, **lora, **more}
            options |= {"lr_scheduler_type": "constant"}
            assert run(line("lm", model, folder, **options)) == 0
        (weights,) = (folder / "out").glob("*model.safetensors")
        found.append(load_file(weights))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(one, found[1][name]) for name, one in found[0].items())


def _other_vocabulary(folder: Path) -> Path:
    """A tokenizer with more words than the model has rows, none of them added."""
    model = LlamaForCausalLM.from_pretrained(save(folder))
    model.resize_token_embeddings(300)
    model.save_pretrained(folder)
    return folder


def save(folder: Path) -> Path:
    save_decoder(folder)
    return folder


def test_vocabulary_of_another_model_needs_the_flag(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = _other_vocabulary(tmp_path / "model")
    assert run(line("lm", model, tmp_path)) == EXIT_BAD_CONFIG
    shown = capfd.readouterr().err
    assert "the tokenizer has tokens that the model does not know" in shown
    assert "--resize_token_embeddings true" in shown
    assert run(line("lm", model, tmp_path, resize_token_embeddings="true")) == 0
    assert load(tmp_path / "out", "config.json")["vocab_size"] == len(AutoTokenizer.from_pretrained(model))


def _phi(folder: Path) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(save(folder))
    config = PhiConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    PhiForCausalLM(config).save_pretrained(folder)
    return with_new_tokens(folder)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"resize_token_embeddings": "false"}, "the tokenizer has tokens that the model does not know"),
        ({"freeze_layers": 0}, "freeze_layers would freeze the rows of new tokens"),
        ({"methods": "freeze_tables"}, "methods would freeze the rows of new tokens"),
        ({"lora_r": 2, "phi": True}, "its output layer has a bias"),
    ],
)
def test_new_tokens_that_would_not_be_learnt_are_refused(
    options: dict[str, Any], said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    of_phi = options.pop("phi", False) if "phi" in options else False
    if "lora_r" in options:
        pytest.importorskip("peft")
    model = _phi(tmp_path / "model") if of_phi else decoder(tmp_path / "model", tied=False)
    assert run(line("lm", model, tmp_path, **options)) == EXIT_BAD_CONFIG
    assert said in capfd.readouterr().err


def test_evaluation_alone_gives_no_rows(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = decoder(tmp_path / "model", tied=False)
    asked = line("lm", model, tmp_path, "--do_eval", validation_file=texts(tmp_path))
    asked.remove("--do_train")
    at = asked.index("--max_steps")
    del asked[at : at + 2]
    at = asked.index("--train_file")
    del asked[at : at + 2]
    assert run(asked) == EXIT_BAD_CONFIG
    assert "the tokenizer has tokens that the model does not know" in capfd.readouterr().err
    assert run([*asked, "--resize_token_embeddings", "true"]) == EXIT_BAD_CONFIG
    assert "resize_token_embeddings has nothing to train" in capfd.readouterr().err


def test_adapter_of_peft_with_resized_tables_is_read(tmp_path: Path) -> None:
    """peft saves the resized tables with it, completely."""
    peft = pytest.importorskip("peft")
    folder = decoder(tmp_path / "model", tied=False)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(len(tokenizer))
    wrapped = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM"))
    with pytest.warns(UserWarning, match="save_embedding_layers"):
        wrapped.save_pretrained(tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text("utf-8"))["r"] == 8
    asked = ["generate", str(tmp_path / "adapter"), "--prompt", f"{NEW[0]} the", "--max_new_tokens", "3"]
    assert run(asked) == 0


def _padded(folder: Path, *, in_place: bool) -> tuple[Path, Path]:
    """A model whose tables have rows left over, and the folder of a tokenizer whose new tokens take some of them."""
    model, other = save(folder / "model"), folder / ("model" if in_place else "tokenizer")
    larger = LlamaForCausalLM.from_pretrained(model)
    larger.resize_token_embeddings(larger.config.vocab_size + 8)
    larger.save_pretrained(model)
    if not in_place:
        save(other)
    return model, with_new_tokens(other)


def test_adapter_trains_new_tokens_in_rows_that_were_left_over(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Vocabularies are padded: Qwen2.5 has some 270 rows more than tokens, frozen with the others."""
    pytest.importorskip("peft")
    model, tokenizer = _padded(tmp_path, in_place=False)
    asked = line("lm", model, tmp_path, tokenizer_name=tokenizer, lora_r=2)
    assert run(asked) == 0
    assert "tokens: 2 new in the embedding tables" in capfd.readouterr().out
    saved = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {one.shape[0] for name, one in saved.items() if "lora_" not in name} == {len(NEW)}
    assert run(["generate", str(tmp_path / "out"), "--prompt", f"{NEW[0]} the", "--max_new_tokens", "3"]) == 0


def test_frozen_layers_refuse_new_tokens_in_rows_that_were_left_over(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model, tokenizer = _padded(tmp_path, in_place=False)
    assert run(line("lm", model, tmp_path, tokenizer_name=tokenizer, freeze_layers=1)) == EXIT_BAD_CONFIG
    assert "freeze_layers would freeze the rows of new tokens" in capfd.readouterr().err
    assert run(line("lm", model, tmp_path, tokenizer_name=tokenizer)) == 0


def test_frozen_rows_of_added_tokens_are_named_if_nothing_says_which_are_new(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("peft")
    model, _ = _padded(tmp_path, in_place=True)
    assert run(line("lm", model, tmp_path, lora_r=2)) == 0
    said = " ".join(capfd.readouterr().out.split())
    assert "also the rows of the added tokens '<|port|>' '<|ferry|>'" in said
