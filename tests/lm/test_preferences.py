"""`whet lm --loss dpo`: the loss and the metrics of the formula, every form of rows, adapters, resume, refusals."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from dpo_runs import CHOSEN, MARGIN, PAIRS, by_formula, without_dropout
from transformers import AutoModelForCausalLM

from text_tasks import load, words, write_lines
from whet.cli.main import run
from whet.engine.trials import precision
from whet.errors import EXIT_BAD_CONFIG, EXIT_BAD_DATA
from whet.precision import compare
from whet.tasks.lm.examples import preference_of

CLOSE = 1e-5
"""Of a loss near 0.7: float32 sums in another order, over fifty steps."""
BOTH_ALIKE = 1e-4
"""Weights that move both rewards of a pair alike have gradients of rounding alone."""
RATE, N_STEPS, EPSILON = 1e-3, 50, 1e-4
"""With Adam's usual epsilon, weights whose gradient is rounding alone take steps as large as the others."""
_USUAL = {
    "loss": "dpo", "max_length": 48, "max_seq_length": 48, "learning_rate": RATE, "lr_scheduler_type": "constant",
    "weight_decay": 0.0, "adam_epsilon": EPSILON, "logging_steps": 1,
    "per_device_train_batch_size": len(PAIRS), "max_steps": N_STEPS,
}  # fmt: skip


@pytest.fixture(scope="module")
def plain(decoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny decoder without dropout."""
    return without_dropout(decoder, tmp_path_factory.mktemp("plain") / "decoder")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight pairs as JSON lines."""
    return write_lines(tmp_path_factory.mktemp("data") / "pairs.jsonl", PAIRS)


def line(model: Path, output: Path, *flags: str, **options: Any) -> list[str]:
    """The words of a run with all pairs in each step."""
    options = {name: value for name, value in (_USUAL | options).items() if name != "max_seq_length"}
    made = words("lm", model, output, *flags, **options)
    at = made.index("--max_seq_length")
    return made[:at] + made[at + 2 :]


def logged(folder: Path) -> list[dict[str, float]]:
    """The entries of the log that hold a loss."""
    return [entry for entry in load(folder, "trainer_state.json")["log_history"] if "loss" in entry]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "formula"), [({}, {}), ({"beta": 0.5, "label_smoothing": 0.2}, {"beta": 0.5, "smoothing": 0.2})]
)
def test_losses_and_metrics_are_those_of_the_formula(
    plain: Path, data: Path, tmp_path: Path, options: dict[str, float], formula: dict[str, float]
) -> None:
    assert run(line(plain, tmp_path / "out", "--do_train", train_file=data, **options)) == 0
    found, wanted = logged(tmp_path / "out"), by_formula(plain, N_STEPS, RATE, EPSILON, **formula)
    assert len(found) == N_STEPS
    assert found[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)  # the model is its own reference
    for name, within in (("loss", CLOSE), (MARGIN, CLOSE), (CHOSEN, BOTH_ALIKE)):
        scale = max(abs(step[name]) for step in wanted)
        assert [step[name] for step in found] == pytest.approx([step[name] for step in wanted], abs=within * scale)
    assert found[-1]["rewards/accuracies"] == 1.0
    last = found[-1]
    assert last[MARGIN] == pytest.approx(last[CHOSEN] - last["rewards/rejected"], rel=1e-4)


def test_accumulation_and_dropout_give_one_curve(decoder: Path, data: Path, tmp_path: Path) -> None:
    curves = []
    for rows, n in ((8, 1), (2, 4)):
        options = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": n, "max_steps": 5}
        assert run(line(decoder, tmp_path / str(n), "--do_train", train_file=data, **options)) == 0
        curves.append([step["loss"] for step in logged(tmp_path / str(n))])
    assert curves[0] == pytest.approx(curves[1], abs=CLOSE)


def test_pass_of_the_reference_prints_no_lines_of_its_own(
    decoder: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of the training follow at once, and say the same."""
    assert run(line(decoder, tmp_path / "out", "--do_train", train_file=data, max_steps=1)) == 0
    shown = [one.split()[0] for one in capsys.readouterr().out.splitlines()]
    assert [shown.count(label) for label in ("model", "data", "precision")] == [1, 1, 1]


def test_adapter_learns_against_the_model_without_it(plain: Path, data: Path, tmp_path: Path) -> None:
    options = {"train_file": data, "validation_file": data, "lora_r": 4, "lora_dropout": 0.0, "learning_rate": 2e-2}
    assert run(line(plain, tmp_path / "out", "--do_train", "--do_eval", **options)) == 0
    found = logged(tmp_path / "out")
    assert found[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
    results = load(tmp_path / "out", "eval_results.json")
    assert results["eval_rewards/accuracies"] == 1.0
    assert results["eval_loss"] < found[0]["loss"] / 2
    assert "eval_perplexity" not in results  # a pair has none


def test_resumed_run_keeps_the_reference_and_refuses_another_beta(
    decoder: Path, data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = {"train_file": data, "per_device_train_batch_size": 4, "save_strategy": "steps", "save_steps": 2}
    options |= {"max_steps": 4}
    assert run(line(decoder, tmp_path / "straight", "--do_train", **options)) == 0
    place = tmp_path / "straight" / "checkpoint-2"
    resumed = line(decoder, tmp_path / "again", "--do_train", **options, resume_from_checkpoint=place)
    assert run(resumed) == 0
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("straight", "again")]
    assert weights[0] == weights[1]
    capfd.readouterr()
    other = line(decoder, tmp_path / "other", "--do_train", **options, resume_from_checkpoint=place, beta=0.2)
    assert run(other) == EXIT_BAD_CONFIG
    assert "loss.beta: 0.1 in the checkpoint -> 0.2 now" in capfd.readouterr().err


@pytest.mark.parametrize("options", [{}, {"lora_r": 2}], ids=["complete", "adapter"])
def test_run_that_resumes_with_another_reference_is_refused(
    decoder: Path, data: Path, tmp_path: Path, options: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """Another folder in --model_name_or_path, of the same architecture: the checkpoint has all trained weights."""
    options = options | {"train_file": data, "save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    assert run(line(decoder, tmp_path / "out", "--do_train", **options)) == 0
    model = AutoModelForCausalLM.from_pretrained(decoder)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.mul_(1.1)
    shutil.copytree(decoder, tmp_path / "other")
    model.save_pretrained(tmp_path / "other")
    place = tmp_path / "out" / "checkpoint-1"
    for folder, code in ((decoder, 0), (tmp_path / "other", EXIT_BAD_CONFIG)):
        capfd.readouterr()
        again = line(folder, tmp_path / f"of-{folder.name}", "--do_train", **options, resume_from_checkpoint=place)
        assert run(again) == code
    said = " ".join(capfd.readouterr().err.split())
    assert "weights under the adapter" in said if "lora_r" in options else "loss.model_name_or_path: weights" in said


def test_reference_is_computed_in_the_precision_of_the_training(
    plain: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if bf16 were faster in training alone: the model is then still its own reference in the first step."""
    fastest = {compare.FORWARD: "fp32", compare.FORWARD_AND_BACKWARD: "bf16"}
    monkeypatch.setattr(precision.PrecisionChoice, "_measured", lambda _, __, ___, flop: fastest[flop])
    options = {"precision": "auto", "max_steps": 1, "per_device_eval_batch_size": len(PAIRS), "train_file": data}
    assert run(line(plain, tmp_path / "out", "--do_train", **options)) == 0
    (first,) = logged(tmp_path / "out")
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first[CHOSEN] == pytest.approx(0.0, abs=1e-6)


def _chat(prompt: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


FORMS = {
    "conversations": [
        {"prompt": _chat(row["prompt"], "")[:1], "chosen": _chat("", row["chosen"])[1:],
         "rejected": _chat("", row["rejected"])[1:]} for row in PAIRS
    ],
    "conversations that repeat the prompt": [
        {"chosen": _chat(row["prompt"], row["chosen"]), "rejected": _chat(row["prompt"], row["rejected"])}
        for row in PAIRS
    ],
    "the prompt as a text next to conversations": [
        {"prompt": row["prompt"], "chosen": _chat(row["prompt"], row["chosen"]),
         "rejected": _chat(row["prompt"], row["rejected"])} for row in PAIRS
    ],
    "messages of the prompt that both completions repeat": [
        {"prompt": _chat(row["prompt"], "")[:1], "chosen": _chat(row["prompt"], row["chosen"]),
         "rejected": _chat(row["prompt"], row["rejected"])} for row in PAIRS
    ],
    "the prompt as a text next to answers": [
        {"prompt": row["prompt"], "chosen": _chat("", row["chosen"])[1:],
         "rejected": _chat("", row["rejected"])[1:]} for row in PAIRS
    ],
}  # fmt: skip


@pytest.mark.slow
def test_every_form_of_conversations_gives_the_same_run(decoder: Path, tmp_path: Path) -> None:
    curves = {}
    for number, (name, rows) in enumerate(FORMS.items()):
        file = write_lines(tmp_path / f"{number}.jsonl", rows)
        assert run(line(decoder, tmp_path / f"out{number}", "--do_train", train_file=file, max_steps=3)) == 0
        curves[name] = [step["loss"] for step in logged(tmp_path / f"out{number}")]
    assert len({json.dumps(curve) for curve in curves.values()}) == 1
    assert curves["conversations"][-1] < curves["conversations"][0]


def test_texts_that_repeat_the_prompt_give_the_same_run(plain: Path, data: Path, tmp_path: Path) -> None:
    repeated = [{name: f"{row['prompt']}{row[name]}" for name in ("chosen", "rejected")} for row in PAIRS]
    file = write_lines(tmp_path / "repeated.jsonl", repeated)
    for name, train in (("whole", data), ("repeated", file)):
        assert run(line(plain, tmp_path / name, "--do_train", train_file=train, max_steps=2)) == 0
    assert logged(tmp_path / "whole")[1]["loss"] == pytest.approx(logged(tmp_path / "repeated")[1]["loss"], abs=CLOSE)


def test_prompt_that_both_completions_repeat_is_read_once() -> None:
    row = {"prompt": "Q? ", "chosen": "Q? yes", "rejected": "Q? no"}
    assert preference_of(row) == ("Q? ", "yes", "no")
    assert preference_of(row | {"rejected": "no"}) == ("Q? ", "Q? yes", "no")  # one that echoes it keeps its words


def test_text_of_a_prompt_is_a_turn_of_the_user_after_the_systems() -> None:
    system = {"role": "system", "content": "be brief"}
    row = {"prompt": "Q?", "chosen": [system, *_chat("", "yes")[1:]], "rejected": [system, *_chat("", "no")[1:]]}
    asked = [system, {"role": "user", "content": "Q?"}]
    assert preference_of(row) == (asked, _chat("", "yes")[1:], _chat("", "no")[1:])


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"prompt": "a?", "completion": " b"}], "no column chosen or rejected"),
        ([{"prompt": "a?", "chosen": " b", "rejected": ""}], "rejected"),
        ([{"prompt": "a?", "chosen": " b"}], "no column rejected"),
        ([{"chosen": "the same", "rejected": "the same"}], "is empty after the prompt"),
        ([{"prompt": "a?", "chosen": " b", "rejected": " b"}], "completion are the same"),
        (
            [{"prompt": "a?", **dict.fromkeys(("chosen", "rejected"), _chat("", "b")[1:])}],
            "completion are the same",
        ),
        ([{"prompt": "a?", "chosen": "a?", "rejected": "a? b"}], "is empty after the prompt"),
        ([{"prompt": 3, "chosen": _chat("a", "b"), "rejected": _chat("a", "c")}], "prompt is a whole number"),
        ([{"prompt": "else", "chosen": _chat("a", "b"), "rejected": _chat("a", "c")}], "no message repeats"),
        ([{"prompt": "a?", "chosen": _chat("a", "b"), "rejected": "text"}], "chosen"),
    ],
)
def test_bad_pairs_are_named(
    decoder: Path, tmp_path: Path, rows: list[Any], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    file = write_lines(tmp_path / "bad.jsonl", rows)
    assert run(line(decoder, tmp_path / "out", "--do_train", train_file=file)) == EXIT_BAD_DATA
    assert said in capfd.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        {"packing": "true"},
        {"completion_only_loss": "false"},
        {"label_smoothing": 0.5},
        {"label_smoothing_factor": 0.1},
        {"beta": 0},
        {"loss_type": "ipo"},
        {"dataset_text_field": "body"},
        {"loss": "next_tokens", "beta": 0.3},
    ],
)
def test_setting_that_dpo_cannot_honour_is_refused(
    decoder: Path, data: Path, tmp_path: Path, options: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(line(decoder, tmp_path / "out", "--do_train", train_file=data, **options)) == EXIT_BAD_CONFIG
    assert "fix:" in capfd.readouterr().err


def test_preferences_without_the_loss_name_it(
    decoder: Path, data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = {"train_file": data, "loss": "next_tokens"}
    assert run(line(decoder, tmp_path / "out", "--do_train", **options)) == EXIT_BAD_DATA
    assert "add --loss dpo" in capfd.readouterr().err
    assert run(line(decoder, tmp_path / "out", "--do_eval", validation_file=data)) == EXIT_BAD_CONFIG
    assert "add --do_train" in capfd.readouterr().err


def test_memory_of_the_loss_is_that_of_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of the loss has a row of logits for each target."""
    from whet.objectives import next_tokens

    monkeypatch.setattr(next_tokens, "chunk_rows", lambda _: 16)
    head, states = torch.nn.Linear(8, 1000, bias=False), torch.randn(64, 8, requires_grad=True)
    targets, sizes = torch.randint(0, 1000, (64,)), []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: (sizes.append(one.numel()), one)[1], lambda one: one):
        losses = next_tokens.token_losses(states, targets, head)
    assert max(sizes, default=0) < 16 * 1000
    wanted = torch.nn.functional.cross_entropy(head(states), targets, reduction="none")
    assert torch.allclose(losses, wanted, atol=1e-6)
