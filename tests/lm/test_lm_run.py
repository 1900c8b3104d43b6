"""`whet lm` and `whet generate` from the command line to the files."""

from __future__ import annotations

import io
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, MPNetConfig, MPNetModel

from text_tasks import SAILING, load, load_lines, words, write_lines
from whet.cli.main import run
from whet.errors import EXIT_BAD_CONFIG, EXIT_BAD_DATA

CLOSE = 1e-4
"""Relative: float32 rounding, through two layers."""


def line(model: Path, output: Path, *flags: str, **options: Any) -> list[str]:
    """The words of a run of language modelling."""
    return words("lm", model, output, *flags, **({"max_seq_length": 48} | options))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four sentences as JSON lines."""
    return write_lines(tmp_path_factory.mktemp("data") / "texts.jsonl", [{"text": text} for text in SAILING])


@pytest.fixture(scope="module")
def trained(decoder: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a run that learns four sentences by heart."""
    folder = tmp_path_factory.mktemp("runs") / "out"
    options = {"train_file": texts, "validation_file": texts, "test_file": texts, "num_train_epochs": 60}
    assert run(line(decoder, folder, "--do_train", "--do_eval", "--do_predict", **options)) == 0
    return folder


def test_run_writes_a_model_its_metrics_and_its_card(decoder: Path, texts: Path, trained: Path, tmp_path: Path) -> None:
    assert run(line(decoder, tmp_path / "before", "--do_eval", validation_file=texts)) == 0
    before = load(tmp_path / "before", "eval_results.json")["eval_perplexity"]
    results = {f"{part}_results.json" for part in ("train", "eval", "predict", "all")}
    model = {"model.safetensors", "config.json", "tokenizer.json", "README.md", "whet_task.json", "trainer_state.json"}
    assert results | model <= {path.name for path in trained.iterdir()}
    found = load(trained, "all_results.json")
    assert found["eval_perplexity"] == pytest.approx(math.exp(found["eval_loss"]))
    assert found["eval_perplexity"] == found["predict_perplexity"] < 4 < 100 < before


def test_perplexity_of_a_loss_that_is_no_number_is_none_either(decoder: Path, texts: Path, tmp_path: Path) -> None:
    """Not infinity: that is the perplexity of a loss which is too large."""
    model: Any = AutoModelForCausalLM.from_pretrained(decoder)
    with torch.no_grad():
        for weight in (model.lm_head.weight, model.model.norm.weight):
            weight.fill_(1e38)
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(decoder).save_pretrained(tmp_path / "model")
    run(line(tmp_path / "model", tmp_path / "out", "--do_eval", validation_file=texts))
    found = load(tmp_path / "out", "eval_results.json")
    assert found["eval_loss"] == found["eval_perplexity"] == "NaN"


@pytest.mark.parametrize("attention", [None, "sdpa"], ids=["packed", "padded"])
def test_perplexity_and_accuracy_are_those_of_transformers_token_by_token(
    attention: str | None, decoder: Path, texts: Path, tmp_path: Path
) -> None:
    """Means over all tokens that follow another one, not means of means of rows."""
    options = {"train_file": texts, "max_steps": 4, "per_device_train_batch_size": 4}
    assert run(line(decoder, tmp_path / "trained", "--do_train", **options)) == 0
    trained = tmp_path / "trained"
    tokenizer, model = AutoTokenizer.from_pretrained(trained), AutoModelForCausalLM.from_pretrained(trained).eval()
    losses, hits = [], []
    for text in SAILING:
        ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
        with torch.no_grad():
            logits = model(ids).logits[0, :-1]
        losses += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none").tolist()
        hits += (logits.argmax(-1) == ids[0, 1:]).tolist()
    options = {"validation_file": texts, "per_device_eval_batch_size": 3}
    options |= {} if attention is None else {"attn_implementation": attention}
    assert run(line(trained, tmp_path / "eval", "--do_eval", **options)) == 0
    found = load(tmp_path / "eval", "eval_results.json")
    assert found["eval_perplexity"] == pytest.approx(math.exp(sum(losses) / len(losses)), rel=CLOSE)
    assert found["eval_mean_token_accuracy"] == pytest.approx(sum(hits) / len(hits))
    assert 0.1 < sum(hits) / len(hits) < 0.9


def test_perplexity_is_that_of_the_labels_as_they_are(trained: Path, texts: Path, tmp_path: Path) -> None:
    """Smoothed labels change the loss, and not what the model expects."""
    found = []
    for name, options in (("plain", {}), ("smoothed", {"label_smoothing_factor": 0.2})):
        assert run(line(trained, tmp_path / name, "--do_eval", validation_file=texts, **options)) == 0
        found.append(load(tmp_path / name, "eval_results.json"))
    assert found[1]["eval_loss"] > found[0]["eval_loss"] + 0.1
    assert found[1]["eval_perplexity"] == pytest.approx(found[0]["eval_perplexity"], rel=CLOSE)


def test_trained_model_continues_a_text_it_has_learnt(trained: Path, capfd: pytest.CaptureFixture[str]) -> None:
    begin = " ".join(SAILING[0].split()[:3])
    assert run(["generate", str(trained), "--prompt", begin, "--max_new_tokens", "30"]) == 0
    assert SAILING[0] in capfd.readouterr().out


@pytest.mark.slow
def test_chat_answers_each_line_of_standard_input(
    decoder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chats = [
        {"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]}
        for ask, answer in (("the boat?", "in the harbour"), ("the anchor?", "held fast"))
    ]
    file = write_lines(tmp_path / "chats.jsonl", chats)
    options = {"train_file": file, "num_train_epochs": 120, "per_device_train_batch_size": 2}
    assert run(line(decoder, tmp_path / "out", "--do_train", **options)) == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO("the anchor?\n"))
    assert run(["generate", str(tmp_path / "out"), "--chat", "--max_new_tokens", "30"]) == 0
    assert "held fast" in capfd.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.StringIO("the anchor?\n" * 12))
    assert run(["generate", str(tmp_path / "out"), "--chat", "--max_new_tokens", "30"]) == 0  # more than fits
    found = capfd.readouterr()
    assert len(found.out.splitlines()) == 12
    assert found.out.splitlines()[-1].strip() == found.out.splitlines()[0].strip()
    assert "oldest 2 turns are left out" in found.err
    assert run(["generate", str(tmp_path / "out"), "--chat", "--prompt", "the anchor?", "--max_new_tokens", "1"]) == 0
    assert "cut after 1 tokens, by --max_new_tokens" in capfd.readouterr().err
    monkeypatch.setattr(sys, "stdin", io.StringIO("the anchor?\n" + "the boat " * 80 + "\n"))
    assert run(["generate", str(tmp_path / "out"), "--chat"]) == EXIT_BAD_CONFIG
    assert "say it in fewer words" in capfd.readouterr().err


def test_continuation_that_fills_the_positions_is_marked(decoder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = AutoModelForCausalLM.from_pretrained(decoder)
    assert model.config.max_position_embeddings == 64
    assert run(["generate", str(decoder), "--prompt", "the boat lay", "--max_new_tokens", "100"]) == 0
    assert "it fills the model's positions" in capfd.readouterr().err


def test_second_run_reads_cached_rows(decoder: Path, texts: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    options = {"train_file": texts, "max_steps": 2}
    assert run(line(decoder, tmp_path / "a", "--do_train", **options)) == 0
    (kept,) = (tmp_path / "cache" / "whet").glob("rows-*.safetensors")
    written = kept.stat().st_mtime_ns
    assert run(line(decoder, tmp_path / "b", "--do_train", **options)) == 0
    assert kept.stat().st_mtime_ns == written
    losses = [load(tmp_path / name, "train_results.json")["train_loss"] for name in ("a", "b")]
    assert losses[0] == losses[1]


def test_run_resumes_from_its_checkpoint_with_the_same_weights(decoder: Path, texts: Path, tmp_path: Path) -> None:
    options = {"train_file": texts, "per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 3}
    assert run(line(decoder, tmp_path / "whole", "--do_train", max_steps=8, **options)) == 0
    assert run(line(decoder, tmp_path / "cut", "--do_train", max_steps=8, **options)) == 0
    for name in ("checkpoint-6", "model.safetensors", "checkpoint-8"):
        path = tmp_path / "cut" / name
        if path.is_dir():
            path.rename(tmp_path / f"gone-{name}")
        elif path.exists():
            path.unlink()
    again = line(decoder, tmp_path / "cut", "--do_train", max_steps=8, resume_from_checkpoint="auto", **options)
    assert run(again) == 0
    found, wanted = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("cut", "whole"))
    assert found == wanted


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"max_length": 1, "max_seq_length": None}, "max_length"),
        ({"max_seq_length": 65}, "--max_length 64 or less"),
        ({"metric_for_best_model": "accuracy"}, "metric_for_best_model names no metric"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    decoder: Path, texts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], flags: dict[str, Any], says: str
) -> None:
    given = {name: value for name, value in ({"max_seq_length": 48} | flags).items() if value is not None}
    asked = [*words("lm", decoder, tmp_path / "out", "--do_train", train_file=texts)]
    at = asked.index("--max_seq_length")
    asked = asked[:at] + asked[at + 2 :] + [str(word) for name, value in given.items() for word in (f"--{name}", value)]
    assert run(asked) == EXIT_BAD_CONFIG
    assert says in capfd.readouterr().err


def test_bad_data_ends_the_run_before_the_model_is_loaded(
    decoder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = write_lines(tmp_path / "bad.jsonl", [{"text": "good"}, {"text": None}])
    assert run(line(decoder, tmp_path / "out", "--do_train", train_file=file)) == EXIT_BAD_DATA
    assert "line 2: text is null" in capfd.readouterr().err


def test_encoder_without_a_language_head_is_refused(
    decoder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    MPNetModel(MPNetConfig(vocab_size=400, **sizes)).save_pretrained(tmp_path / "model")
    file = write_lines(tmp_path / "t.jsonl", [{"text": "one two"}])
    asked = line(tmp_path / "model", tmp_path / "out", "--do_train", train_file=file, tokenizer_name=decoder)
    assert run(asked) == EXIT_BAD_CONFIG
    said = capfd.readouterr().err
    assert "have no head for next tokens" in said
    assert "a decoder" in said
    assert "llama" in said.replace("\n", " ")


@pytest.mark.slow
@pytest.mark.reliability
def test_two_ranks_have_the_curve_of_one(decoder: Path, texts: Path, tmp_path: Path) -> None:
    """With dropout on; the perplexity of an evaluation that ranks share is that of one rank, and so is each text's."""
    found, judged = [], []
    for n_ranks in (1, 2):
        options = {"train_file": texts, "validation_file": texts, "max_steps": 4, "logging_steps": 1}
        options |= {"per_device_train_batch_size": 4 // n_ranks, "learning_rate": 3e-4, "per_device_eval_batch_size": 1}
        asked = line(decoder, tmp_path / str(n_ranks), "--do_train", "--do_eval", **options)
        start = ["-m", "torch.distributed.run", "--nproc_per_node", str(n_ranks)] if n_ranks > 1 else []
        done = subprocess.run(
            [sys.executable, *start, "-m", "whet", *asked], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        found.append(load(tmp_path / str(n_ranks), "all_results.json"))
        judged.append(load_lines(tmp_path / str(n_ranks) / "eval_predictions.jsonl"))
    assert [line["text"] for line in judged[1]] == [line["text"] for line in judged[0]] == SAILING
    losses = [[line["loss"] for line in lines] for lines in judged]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    for name in ("train_loss", "eval_perplexity"):  # float32 sums in another order
        assert found[1][name] == pytest.approx(found[0][name], rel=1e-5)
