"""What a run of `whet classify` says of each text: every prediction, the errors with the worst first, the terminal."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from text_tasks import load, load_lines, topic_rows, words, write_csv, write_lines
from whet.cli.main import run
from whet.errors import EXIT_BAD_CONFIG, EXIT_BAD_DATA
from whet.jobs.judging import LEAST_SURE, Judged, write

CLOSE = 1e-4
"""Logits of whet's operators and of transformers' differ by float32 rounding, through two layers."""
WRONG = {3: "garden", 8: "sailing"}
"""Rows of the corpus, counted from 0, and the label that `mislabelled` gives them."""


def mislabelled() -> list[dict[str, Any]]:
    """The sentences that the model has learnt, two of them with the label of another topic."""
    return [row | ({"label": WRONG[n]} if n in WRONG else {}) for n, row in enumerate(topic_rows())]


@pytest.fixture(scope="module")
def trained(sentence_encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a run that learns twelve sentences by heart."""
    folder = tmp_path_factory.mktemp("runs") / "out"
    file = write_csv(folder.parent / "topics.csv", topic_rows())
    options = {"train_file": file, "num_train_epochs": 60, "learning_rate": 1e-2}
    assert run(words("classify", sentence_encoder, folder, "--do_train", **options)) == 0
    return folder


def _evaluated(trained: Path, folder: Path, rows: list[dict[str, Any]], *flags: str, **options: Any) -> list[Any]:
    """Evaluate the model on these rows, and return the lines of the errors."""
    file = write_lines(folder / "validation.jsonl", rows)
    assert run(words("classify", trained, folder / "out", "--do_eval", *flags, validation_file=file, **options)) == 0
    return load_lines(folder / "out" / "errors.jsonl")


def _shares(folder: Path, *texts: list[str]) -> torch.Tensor:
    """The log-probabilities by transformers' own model and tokenizer, (texts, labels)."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        return model.eval()(**tokenizer(*texts, padding=True, return_tensors="pt")).logits.log_softmax(-1)


def test_errors_have_the_wrong_texts_first_and_the_least_sure_after_them(trained: Path, tmp_path: Path) -> None:
    rows = mislabelled()
    errors = _evaluated(trained, tmp_path, rows)
    assert {line["row"] for line in errors[:2]} == {f"line {n + 1}" for n in WRONG}
    assert len(errors) == 12
    shares = _shares(trained, [row["text"] for row in rows])
    names = list(load(trained, "config.json")["id2label"].values())
    for line in errors:
        n = int(line["row"].split()[1]) - 1
        assert (line["text"], line["expected"]) == (rows[n]["text"], rows[n]["label"])
        assert line["predicted"] == names[int(shares[n].argmax())] == topic_rows()[n]["label"]
        wanted = float(shares[n, names.index(rows[n]["label"])])
        assert line["loss"] == pytest.approx(-wanted, abs=CLOSE)
        assert line["probability"] == pytest.approx(math.exp(wanted), abs=CLOSE)
    for part in (errors[:2], errors[2:]):
        losses = [line["loss"] for line in part]
        assert losses == sorted(losses, reverse=True)
    results = load(tmp_path / "out", "eval_results.json")
    assert [results[f"eval_examples_{name}"] for name in ("wrong", "judged", "listed")] == [2, 12, 12]
    every = load_lines(tmp_path / "out" / "eval_predictions.jsonl")
    assert [line["text"] for line in every] == [row["text"] for row in rows]
    assert [line["expected"] for line in every] == [row["label"] for row in rows]
    assert all(line["predicted"] == line["label"] for line in every)
    assert np.mean([line["loss"] for line in every]) == pytest.approx(results["eval_loss"], abs=CLOSE)


def test_terminal_shows_the_worst_in_a_line_each(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = mislabelled()
    rows[3] = rows[3] | {"text": rows[3]["text"] + " and\tthen\n\x1b[2J" + " it went on" * 30}
    _evaluated(trained, tmp_path, rows)
    shown = capsys.readouterr().out.splitlines()
    at = next(n for n, line in enumerate(shown) if line.startswith("wrong: 2 of 12 examples"))
    assert shown[at].endswith("the worst first in errors.jsonl")
    assert shown[at + 1].split() == ["expected", "predicted", "text"]
    worst = load_lines(tmp_path / "out" / "errors.jsonl")[:2]
    for line, told in zip(shown[at + 2 : at + 4], worst, strict=True):
        assert line.split()[:2] == [told["expected"], told["predicted"]]
        assert " ".join(told["text"].split()[:3]) in line
    (last,) = shown[at + 4 :]
    assert last.startswith("  report  ")
    assert last.endswith("report.html")
    assert max(map(len, shown[at:])) == 80
    assert "\x1b" not in "".join(shown)


def test_rows_that_are_left_out_do_not_shift_the_others(trained: Path, tmp_path: Path) -> None:
    """Bad rows, a limit, windows of long texts: a line has the text, the label and the prediction of one row."""
    rows = mislabelled()
    rows[5] = rows[5] | {"text": " ".join([rows[5]["text"]] * 6)}
    rows.insert(0, {"text": "", "label": "garden"})
    rows.insert(4, {"text": "no label here", "label": None})
    options = {"max_eval_samples": 11, "max_seq_length": 16, "doc_stride": 4, "per_device_eval_batch_size": 3}
    errors = _evaluated(trained, tmp_path, rows, "--skip_bad", **options)
    every = load_lines(tmp_path / "out" / "eval_predictions.jsonl")
    used = [n for n in range(11) if n not in (0, 4)]
    assert [line["row"] for line in every] == [f"line {n + 1}" for n in used]
    for line in [*every, *errors]:
        row = rows[int(line["row"].split()[1]) - 1]
        assert (line["text"], line["expected"]) == (row["text"], row["label"])
    learnt = {row["text"]: row["label"] for row in topic_rows()}
    learnt[rows[7]["text"]] = topic_rows()[5]["label"]
    assert len(rows[7]["text"].split()) > 16
    assert [line["predicted"] for line in every] == [learnt[line["text"]] for line in every]
    assert len(errors) == len(used)
    results = load(tmp_path / "out", "eval_results.json")
    assert results["eval_examples_left_out"] == 2
    assert results["eval_examples_wrong"] == sum(line["expected"] != learnt[line["text"]] for line in every) == 2


@pytest.mark.slow
@pytest.mark.reliability
def test_two_ranks_write_what_one_writes(trained: Path, tmp_path: Path) -> None:
    file, found = write_lines(tmp_path / "validation.jsonl", mislabelled()), []
    for n_ranks in (1, 2):
        options = {"validation_file": file, "per_device_eval_batch_size": 2}
        asked = words("classify", trained, tmp_path / str(n_ranks), "--do_eval", **options)
        start = ["-m", "torch.distributed.run", "--nproc_per_node", str(n_ranks)] if n_ranks > 1 else []
        done = subprocess.run(
            [sys.executable, *start, "-m", "whet", *asked], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("the worst first in errors.jsonl") == 1
        names = ("errors.jsonl", "eval_predictions.jsonl")
        found.append([load_lines(tmp_path / str(n_ranks) / name) for name in names])
    alone, both = ([line for lines in one for line in lines] for one in found)
    for one, other in zip(alone, both, strict=True):
        for name in ("row", "text", "expected", "predicted"):
            assert other[name] == one[name]
        assert other["loss"] == pytest.approx(one["loss"], abs=1e-6)


def test_errors_of_a_test_split_are_those_of_known_labels(trained: Path, tmp_path: Path) -> None:
    """A label may be missing, or one that the model has never seen; then there are no metrics, but the known ones."""
    rows = mislabelled()
    rows[0].pop("label")
    rows[1]["label"] = "cooking"
    file = write_lines(tmp_path / "test.jsonl", rows)
    asked = words("classify", trained, tmp_path / "out", "--do_predict", test_file=file)
    assert run(asked) == 0
    errors = load_lines(tmp_path / "out" / "predict_errors.jsonl")
    assert {line["row"] for line in errors} == {f"line {n + 1}" for n in range(2, 12)}
    assert {line["row"] for line in errors[:2]} == {f"line {n + 1}" for n in WRONG}
    every = load_lines(tmp_path / "out" / "predict_predictions.jsonl")
    assert [line["expected"] for line in every] == [row.get("label") for row in rows]
    assert [line["loss"] is None for line in every] == [n < 2 for n in range(12)]
    results = load(tmp_path / "out", "predict_results.json")
    assert (results["predict_examples_judged"], results["predict_examples_wrong"]) == (10, 2)
    assert "predict_accuracy" not in results
    assert not (tmp_path / "out" / "errors.jsonl").exists()
    write_lines(file, [{"text": row["text"]} for row in rows])
    assert run(asked) == 0
    assert not (tmp_path / "out" / "predict_errors.jsonl").exists()  # it would tell of another file


def test_pairs_show_both_texts(sentence_encoder: Path, tmp_path: Path) -> None:
    texts = [row["text"] for row in topic_rows()]
    rows = [{"premise": a, "hypothesis": b, "label": str(n % 2)}
            for n, (a, b) in enumerate(zip(texts, texts[3:], strict=False))]  # fmt: skip
    file = write_csv(tmp_path / "pairs.csv", rows)
    options = {"train_file": file, "validation_file": file, "max_steps": 2}
    assert run(words("classify", sentence_encoder, tmp_path / "out", "--do_train", "--do_eval", **options)) == 0
    shares = _shares(tmp_path / "out", [row["premise"] for row in rows], [row["hypothesis"] for row in rows])
    for line in load_lines(tmp_path / "out" / "errors.jsonl"):
        n = int(line["row"].split()[1]) - 2
        assert (line["text"], line["text_pair"], line["expected"]) == tuple(rows[n].values())
        assert line["loss"] == pytest.approx(-float(shares[n, int(rows[n]["label"])]), abs=CLOSE)


@pytest.mark.slow
def test_several_labels_are_wrong_if_one_of_them_is(sentence_encoder: Path, tmp_path: Path) -> None:
    rows = [{"text": row["text"], "label": [row["label"], "land"] if row["label"] != "sailing" else ["sailing"]}
            for row in topic_rows()]  # fmt: skip
    file = write_lines(tmp_path / "several.jsonl", rows)
    changed = [rows[0] | {"label": ["sailing", "land"]}, *rows[1:]]
    options = {"train_file": file, "validation_file": write_lines(tmp_path / "changed.jsonl", changed)}
    flags = ("--do_train", "--do_eval")
    assert run(words("classify", sentence_encoder, tmp_path / "out", *flags, **options, num_train_epochs=150)) == 0
    worst, *others = load_lines(tmp_path / "out" / "errors.jsonl")
    assert (worst["row"], worst["expected"], worst["predicted"]) == ("line 1", ["sailing", "land"], ["sailing"])
    assert all(set(line["expected"]) == set(line["predicted"]) for line in others)
    every = load_lines(tmp_path / "out" / "eval_predictions.jsonl")
    loss = load(tmp_path / "out", "eval_results.json")["eval_loss"]
    assert np.mean([line["loss"] for line in every]) == pytest.approx(loss, abs=CLOSE)
    assert worst["probability"] == pytest.approx(math.exp(-4 * worst["loss"]))  # of all four labels together


def test_numbers_are_ordered_by_their_distance(
    sentence_encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"text": row["text"], "label": float(n)} for n, row in enumerate(topic_rows())]
    file = write_lines(tmp_path / "numbers.jsonl", rows)
    options = {"train_file": file, "validation_file": file, "max_steps": 3}
    flags = ("--do_train", "--do_eval", "--do_regression")
    assert run(words("classify", sentence_encoder, tmp_path / "out", *flags, **options)) == 0
    lines = load_lines(tmp_path / "out" / "errors.jsonl")
    distances = [abs(line["expected"] - line["predicted"]) for line in lines]
    assert distances == sorted(distances, reverse=True)
    assert [line["loss"] for line in lines] == pytest.approx([one**2 for one in distances], rel=CLOSE)
    results = load(tmp_path / "out", "eval_results.json")
    assert results["eval_examples_listed"] == len(lines) == 12
    assert "eval_examples_wrong" not in results
    assert "the worst of 12 examples first in errors.jsonl" in capsys.readouterr().out


@pytest.mark.parametrize(("policy", "code"), [("stop", 74), ("continue", 0)])
def test_file_of_errors_that_cannot_be_written_follows_the_policy(
    policy: str, code: int, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out" / "errors.jsonl" / "in the way").mkdir(parents=True)
    file = write_lines(tmp_path / "validation.jsonl", mislabelled())
    options = {"validation_file": file, "save_error_policy": policy}
    assert run(words("classify", trained, tmp_path / "out", "--do_eval", **options)) == code
    assert "errors.jsonl cannot be written" in capsys.readouterr().err


def test_link_in_the_place_of_the_file_is_replaced(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine", "utf-8")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "errors.jsonl").symlink_to(tmp_path / "victim")
    assert len(_evaluated(trained, tmp_path, mislabelled())) == 12
    assert (tmp_path / "victim").read_text("utf-8") == "mine"


def _judged(n: int, *, wrong: bool | None = None, loss: float | None = None, text: str = "a text") -> Judged:
    badness = None if loss is None else (loss,)
    return Judged(row=f"line {n}", shown={"text": text}, predicted="x", loss=loss, badness=badness, wrong=wrong)


def test_every_wrong_example_is_written_and_so_many_of_the_others(tmp_path: Path) -> None:
    wrong = [_judged(n, wrong=True, loss=1.0 + n) for n in range(2 * LEAST_SURE)]
    right = [_judged(1000 + n, wrong=False, loss=2.0 + n) for n in range(2 * LEAST_SURE)]
    counts = write([*right, *wrong], "eval", "examples", tmp_path, "stop").counts
    lines = load_lines(tmp_path / "errors.jsonl")
    assert [line["row"] for line in lines[: len(wrong)]] == [one.row for one in reversed(wrong)]
    assert [line["row"] for line in lines[len(wrong) :]] == [one.row for one in reversed(right)][:LEAST_SURE]
    assert counts == {"eval_examples_wrong": 200, "eval_examples_judged": 400, "eval_examples_listed": 300}
    assert len(load_lines(tmp_path / "eval_predictions.jsonl")) == 400


def test_numbers_that_are_not_finite_are_null_and_come_first(tmp_path: Path) -> None:
    odd = [_judged(1, wrong=True, loss=3.0), _judged(2, wrong=True, loss=math.nan), _judged(3, wrong=False, loss=0.1)]
    write(odd, "eval", "examples", tmp_path, "stop")
    text = (tmp_path / "errors.jsonl").read_text("utf-8")
    assert "NaN" not in text
    found = [json.loads(line) for line in text.splitlines()]
    assert [(line["row"], line["loss"]) for line in found] == [("line 2", None), ("line 1", 3.0), ("line 3", 0.1)]


def test_an_example_is_a_line_whatever_its_text_holds(tmp_path: Path) -> None:
    text = "one\u2028two\x85three\nfour \U0001f9f5 fünf"
    write([_judged(1, wrong=True, loss=1.0, text=text)], "eval", "examples", tmp_path, "stop")
    (line,) = (tmp_path / "errors.jsonl").read_text("utf-8").splitlines()
    assert json.loads(line)["text"] == text


def test_wide_characters_fit_the_terminal(tmp_path: Path) -> None:
    one = _judged(1, wrong=True, loss=1.0, text="海盗船在港口里" * 20)
    lines = write([one], "eval", "examples", tmp_path, "stop").lines
    (shown,) = [line for line in lines if "海" in line]
    assert 77 <= sum(2 if ord(char) > 0x2E80 else 1 for char in shown) <= 80


@pytest.mark.parametrize("label", ["topic", 0.5])
def test_threshold_is_refused_where_nothing_is_compared_with_it(
    label: Any, sentence_encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row if label == "topic" else {**row, "label": n + label} for n, row in enumerate(topic_rows())]
    train = write_lines(tmp_path / "train.jsonl", rows)
    line = words("classify", sentence_encoder, tmp_path / "out", "--do_train", train_file=train, threshold=0.3)
    assert run(line) == EXIT_BAD_CONFIG
    assert "threshold would change nothing here" in capsys.readouterr().err
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_splits_that_are_not_read_alike_are_refused(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = [{"text1": row["text"], "text2": "the sail", "label": row["label"]} for row in topic_rows()]
    file = write_csv(tmp_path / "pairs.csv", pairs)
    line = words("classify", trained, tmp_path / "out", "--do_eval", validation_file=file)
    assert run(line) == EXIT_BAD_DATA
    assert "training of the model: one text; validation: a pair" in capsys.readouterr().err
    assert run([*line, "--text_column_names", "text1", "--text_pair_column_names", ""]) == 0
