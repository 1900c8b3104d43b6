"""What a run of `whet lm` says of each text: its loss, and the stretch of tokens that the model expects least."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from dpo_runs import PAIRS
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from text_tasks import BAKING, GARDEN, SAILING, load, load_lines, words, write_lines
from whet.cli.main import run

CLOSE = 1e-4
"""Relative: float32 rounding, through two layers."""
_STRETCH = 16


@pytest.fixture(scope="module")
def trained(decoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a run that learns four sentences by heart."""
    folder = tmp_path_factory.mktemp("runs") / "out"
    file = write_lines(folder.parent / "texts.jsonl", [{"text": text} for text in SAILING])
    options = {"train_file": file, "num_train_epochs": 40, "max_seq_length": 48}
    assert run(words("lm", decoder, folder, "--do_train", **options)) == 0
    return folder


def _evaluated(trained: Path, folder: Path, file: Path, *flags: str, **options: Any) -> list[Any]:
    """Evaluate the model on this file, and return the lines of all predictions."""
    given = {"validation_file": file, "max_seq_length": 48} | options
    assert run(words("lm", trained, folder, "--do_eval", *flags, **given)) == 0
    return load_lines(folder / "eval_predictions.jsonl")


class _Reference:
    """transformers' own model and tokenizer."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()

    def judge(self, ids: list[int], first: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of each token of a row from the `first` on, and the likeliest token in its place."""
        with torch.no_grad():
            logits = self.model(torch.tensor([ids])).logits[0, :-1]
        losses = cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
        return losses[first - 1 :], logits.argmax(-1)[first - 1 :]

    def words(self, ids: Any) -> str:
        return self.tokenizer.decode(ids)


@pytest.mark.parametrize("attention", [None, "sdpa"], ids=["packed", "padded"])
def test_each_text_has_its_loss_and_its_worst_stretch(attention: str | None, trained: Path, tmp_path: Path) -> None:
    texts = [*SAILING, *BAKING, "we set the sail at dawn and the dough rose in the oven over the fence by the tree"]
    file = write_lines(tmp_path / "texts.jsonl", [{"text": text} for text in texts])
    options = {"per_device_eval_batch_size": 2} | ({} if attention is None else {"attn_implementation": attention})
    every = _evaluated(trained, tmp_path / "out", file, **options)
    reference = _Reference(trained)
    assert [line["text"] for line in every] == texts
    assert [line["row"] for line in every] == [f"line {n + 1}" for n in range(len(texts))]
    for line in every:
        ids = [*reference.tokenizer(line["text"])["input_ids"], reference.tokenizer.eos_token_id]
        losses, best = reference.judge(ids)
        assert line["loss"] == pytest.approx(float(losses.mean()), rel=CLOSE)
        assert line["perplexity"] == pytest.approx(math.exp(line["loss"]))
        assert line["targets"] == len(losses)
        width = min(_STRETCH, len(losses))
        first = int(losses.unfold(0, width, 1).mean(-1).argmax())
        assert line["expected"] == reference.words(ids[1 + first : 1 + first + width])
        assert line["predicted"] == reference.words(best[first : first + width])
    results = load(tmp_path / "out", "eval_results.json")
    total = sum(line["loss"] * line["targets"] for line in every) / sum(line["targets"] for line in every)
    assert total == pytest.approx(results["eval_loss"], rel=CLOSE)
    assert results["eval_examples_listed"] == results["eval_examples_judged"] == len(texts)
    errors = load_lines(tmp_path / "out" / "errors.jsonl")
    assert errors == sorted(every, key=lambda line: -line["loss"])
    assert {line["text"] for line in errors[-4:]} == set(SAILING)


def test_long_texts_and_texts_without_a_target_do_not_shift_the_others(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = " ".join([*GARDEN, *BAKING, *SAILING, *GARDEN])
    rows = [{"text": SAILING[0]}, {"text": None}, {"text": long}, {"text": SAILING[1]}, {"text": BAKING[0]}]
    file = write_lines(tmp_path / "texts.jsonl", rows)
    every = _evaluated(trained, tmp_path / "out", file, "--skip_bad", max_eval_samples=4)
    assert [line["row"] for line in every] == ["line 1", "line 3", "line 4"]
    assert [line["text"] for line in every] == [SAILING[0], long, SAILING[1]]
    reference = _Reference(trained)
    ids = [*reference.tokenizer(long)["input_ids"], reference.tokenizer.eos_token_id]
    parts = [reference.judge(ids[first : first + 48])[0] for first in range(0, len(ids), 48) if ids[first + 1 :]]
    assert len(parts) > 1
    assert every[1]["loss"] == pytest.approx(float(torch.cat(parts).mean()), rel=CLOSE)
    assert load_lines(tmp_path / "out" / "errors.jsonl")[0]["row"] == "line 3"
    said = capsys.readouterr().out
    assert "the worst of 3 examples first in errors.jsonl" in said
    assert max(map(len, said.splitlines()[-4:])) <= 80


def test_completions_alone_are_judged_and_prompts_that_fill_a_row_have_no_loss(trained: Path, tmp_path: Path) -> None:
    rows = [
        {"prompt": "the boat lay", "completion": " in the harbour"},
        {"prompt": "the sail " * 40, "completion": "at dawn"},
        {"prompt": "we set", "completion": " the dough in the oven"},
    ]
    file = write_lines(tmp_path / "pairs.jsonl", rows)
    every = _evaluated(trained, tmp_path / "out", file)
    assert [line["text"] for line in every] == [row["prompt"] + row["completion"] for row in rows]
    assert [line["loss"] is None for line in every] == [False, True, False]
    reference = _Reference(trained)
    for n in (0, 2):
        prompt = reference.tokenizer(rows[n]["prompt"])["input_ids"]
        ids = [*reference.tokenizer(every[n]["text"])["input_ids"], reference.tokenizer.eos_token_id]
        losses, _ = reference.judge(ids, len(prompt))
        assert every[n]["loss"] == pytest.approx(float(losses.mean()), rel=CLOSE)
        assert every[n]["expected"] == f"{rows[n]['completion']}</s>"
    assert [line["row"] for line in load_lines(tmp_path / "out" / "errors.jsonl")] == ["line 3", "line 1"]


@pytest.mark.parametrize("packing", [None, False])
def test_plain_text_is_judged_by_block_or_by_line(packing: bool | None, trained: Path, tmp_path: Path) -> None:
    lines = [SAILING[0], "", *GARDEN, BAKING[1], SAILING[2]]
    (tmp_path / "book.txt").write_text("\n".join(lines) + "\n", "utf-8")
    options = {} if packing is None else {"packing": "false"}
    every = _evaluated(trained, tmp_path / "out", tmp_path / "book.txt", max_seq_length=18, **options)
    if packing is None:
        assert [line["row"] for line in every] == [f"block {n + 1}" for n in range(len(every))]
        assert "".join(line["text"] for line in every) == "<s>" + "\n".join(lines) + "\n</s>"
        assert len(every) > 2
    else:
        kept = [n for n, line in enumerate(lines) if line]
        assert [line["row"] for line in every] == [f"line {n + 1}" for n in kept]
        assert [line["text"] for line in every] == [lines[n] for n in kept]
    assert all(line["expected"] and line["loss"] > 0 for line in every)


def test_rows_from_the_cache_know_their_texts(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = write_lines(tmp_path / "texts.jsonl", [{"text": text} for text in (*GARDEN, " ".join(SAILING * 3))])
    first = _evaluated(trained, tmp_path / "a", file)
    assert _evaluated(trained, tmp_path / "b", file) == first
    assert len([*(tmp_path / "cache" / "whet").glob("rows-*.safetensors")]) == 1


def test_pairs_that_are_ranked_wrongly_come_first(decoder: Path, tmp_path: Path, capsys: Any) -> None:
    """Half of the validation pairs are those of the training, turned round."""
    turned = [pair | {"chosen": pair["rejected"], "rejected": pair["chosen"]} for pair in PAIRS[::2]]
    validation = [one for pair, other in zip(PAIRS[1::2], turned, strict=True) for one in (pair, other)]
    filled = {"prompt": "boat " * 80, "chosen": " in", "rejected": " out"}
    rows = [filled, *validation]
    options = {"train_file": write_lines(tmp_path / "train.jsonl", PAIRS), "num_train_epochs": 20, "beta": 0.5}
    options |= {"validation_file": write_lines(tmp_path / "validation.jsonl", rows), "per_device_eval_batch_size": 3}
    asked = words("lm", decoder, tmp_path / "out", "--do_train", "--do_eval", "--loss", "dpo", **options)
    at = asked.index("--max_seq_length")
    assert run([*asked[:at], "--max_length", "48", *asked[at + 2 :]]) == 0
    every = load_lines(tmp_path / "out" / "eval_predictions.jsonl")
    assert [(line["text"], line["expected"], line["rejected"]) for line in every[1:]] == [
        (row["prompt"], row["chosen"], row["rejected"]) for row in validation
    ]
    assert (every[0]["text"], every[0]["predicted"]) == (filled["prompt"], None)
    results = load(tmp_path / "out", "eval_results.json")
    judged = every[1:]
    losses = [line["loss"] for line in judged]
    assert sum(losses) / len(losses) == pytest.approx(results["eval_loss"], rel=CLOSE)
    right = [line["predicted"] == line["expected"] for line in judged]
    assert right == [line["margin"] > 0 for line in judged] == [n % 2 == 0 for n in range(len(judged))]
    assert results["eval_rewards/accuracies"] == pytest.approx(sum(right) / len(right))
    for line in judged:
        assert line["probability"] == pytest.approx(1 / (1 + math.exp(-line["margin"])))
        assert line["loss"] == pytest.approx(-math.log(line["probability"]), rel=CLOSE)
    errors = load_lines(tmp_path / "out" / "errors.jsonl")
    assert [line["margin"] for line in errors] == sorted(line["margin"] for line in judged)
    assert results["eval_examples_wrong"] == 4
    assert "wrong: 4 of 8 examples, the worst first in errors.jsonl" in capsys.readouterr().out
