"""`whet classify` from the command line to the files: each kind of labels, pairs, windows, prediction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from text_tasks import load, load_lines, topic_rows, words, write_csv, write_lines
from whet.cli.main import run
from whet.errors import EXIT_BAD_CONFIG, EXIT_BAD_DATA, EXIT_OTHER
from whet.jobs.tokenising.rows import RowOptions, make_rows
from whet.store import find

CLOSE = 1e-4
"""Logits of whet's operators and of transformers' differ by float32 rounding, through two layers."""


@pytest.fixture(scope="module")
def topics(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CSV file of sentences with topics."""
    return write_csv(tmp_path_factory.mktemp("data") / "topics.csv", topic_rows())


@pytest.fixture(scope="module")
def trained(sentence_encoder: Path, topics: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a run that learns twelve sentences by heart."""
    folder = tmp_path_factory.mktemp("runs") / "out"
    test = write_lines(folder.parent / "test.jsonl", [{"text": "we set the sail"}, {"text": "sweet bread"}])
    code = run(
        words("classify", sentence_encoder, folder, "--do_train", "--do_eval", "--do_predict", train_file=topics,
              validation_file=topics, test_file=test, num_train_epochs=40, learning_rate=1e-2)
    )  # fmt: skip
    assert code == 0
    return folder


def _said(capsys: pytest.CaptureFixture[str]) -> str:
    """Everything that was printed."""
    printed = capsys.readouterr()
    return printed.out + printed.err


def _logits(folder: Path, *texts: Any, **options: Any) -> np.ndarray:
    """The logits of transformers' own model and tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(**tokenizer(*texts, padding=True, return_tensors="pt", **options)).logits.numpy()


def test_head_that_is_kept_for_other_labels_is_named(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row | {"label": {"baking": "0", "garden": "1", "sailing": "2"}[row["label"]]} for row in topic_rows()]
    data = write_csv(tmp_path / "numbers.csv", rows)
    assert run(words("classify", trained, tmp_path / "out", "--do_train", train_file=data, max_steps=1)) == 0
    said = " ".join(_said(capsys).split())
    assert "trained for other labels (baking, garden, sailing) and is kept for 0, 1, 2" in said


def test_every_file_of_a_run_is_there(trained: Path) -> None:
    results = {f"{part}_results.json" for part in ("train", "eval", "predict", "all")}
    predictions = {"eval_predictions.jsonl", "predict_predictions.jsonl", "predict_results.txt", "eval_confusion.csv"}
    model = {"model.safetensors", "config.json", "tokenizer.json", "README.md", "whet_task.json"}
    assert results | predictions | model <= {path.name for path in trained.iterdir()}


def test_a_run_learns_and_reports_its_metrics(trained: Path) -> None:
    results = load(trained, "all_results.json")
    assert results["eval_accuracy"] == results["eval_f1_macro"] == results["eval_matthews_correlation"] == 1.0
    assert results["train_samples"] == results["eval_samples"] == 12
    assert (trained / "eval_confusion.csv").read_text().splitlines()[1:] == [
        "baking,4,0,0",
        "garden,0,4,0",
        "sailing,0,0,4",
    ]


def test_transformers_reads_labels_and_weights(trained: Path) -> None:
    config = AutoModelForSequenceClassification.from_pretrained(trained).config
    assert config.id2label == {0: "baking", 1: "garden", 2: "sailing"}
    assert config.problem_type == "single_label_classification"
    logits = _logits(trained, ["we set the sail", "sweet bread"])
    lines = load_lines(trained / "predict_predictions.jsonl")
    assert [line["label"] for line in lines] == [config.id2label[int(row.argmax())] for row in logits]
    scores = torch.tensor(logits).softmax(1).max(1).values.tolist()
    assert [line["score"] for line in lines] == pytest.approx(scores, abs=CLOSE)


def test_evaluating_a_trained_model_gives_the_same_metrics(trained: Path, topics: Path, tmp_path: Path) -> None:
    assert run(words("classify", trained, tmp_path / "again", "--do_eval", validation_file=topics)) == 0
    again, first = load(tmp_path / "again", "eval_results.json"), load(trained, "eval_results.json")
    assert again["eval_accuracy"] == first["eval_accuracy"]
    assert again["eval_loss"] == pytest.approx(first["eval_loss"], abs=CLOSE)


def test_evaluation_labels_that_are_unknown_end_the_run(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_csv(tmp_path / "more.csv", [*topic_rows(), {"text": "a new thing", "label": "cooking"}])
    assert run(words("classify", trained, tmp_path / "out", "--do_eval", validation_file=file)) == EXIT_BAD_DATA
    told = capsys.readouterr().err
    assert "line 14: label is a label that the model does not know" in told
    assert "got: cooking" in told


def test_a_column_of_ids_is_warned_of(
    sentence_encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"text": row["text"], "label": 1000 + n} for n, row in enumerate(topic_rows())]
    file = write_csv(tmp_path / "ids.csv", rows)
    options = {"train_file": file, "validation_file": file, "max_steps": 1}
    assert run(words("classify", sentence_encoder, tmp_path / "out", "--do_train", "--do_eval", **options)) == 0
    told = capsys.readouterr()
    assert "12 texts, 12 labels" in told.err
    assert "Is the column label an id?" in told.err
    assert " 1 of 1" not in told.out  # of a label
    assert "each is the only one of its own label" in told.out


def test_rows_of_one_label_are_refused_though_the_file_has_others(
    sentence_encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_csv(tmp_path / "sorted.csv", sorted(topic_rows(), key=lambda row: row["label"]))
    asked = words("classify", sentence_encoder, tmp_path / "out", "--do_train", train_file=file, max_train_samples=3)
    assert run(asked) == EXIT_BAD_DATA
    assert "all examples have the same label" in capsys.readouterr().err


@pytest.mark.parametrize("same", [[], ["bread", "cake"]])
def test_rows_of_the_same_labels_are_refused(
    same: list[str], sentence_encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row | {"label": same if n % 2 else same[::-1]} for n, row in enumerate(topic_rows())]
    file = write_lines(tmp_path / "same.jsonl", rows)
    assert run(words("classify", sentence_encoder, tmp_path / "out", "--do_train", train_file=file)) == EXIT_BAD_DATA
    said = capsys.readouterr().err
    assert "all examples have the same label" in said
    assert f"got: label: {json.dumps(same)}" in said


def test_a_head_of_another_size_is_replaced_only_on_request(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"text": row["text"], "label": "ab"[n % 2]} for n, row in enumerate(topic_rows())]
    file = write_csv(tmp_path / "two.csv", rows)
    line = words("classify", trained, tmp_path / "out", "--do_train", train_file=file, max_steps=1)
    assert run(line) == EXIT_BAD_CONFIG
    assert "--ignore_mismatched_sizes" in _said(capsys)
    assert run([*line, "--ignore_mismatched_sizes"]) == 0
    assert load(tmp_path / "out", "config.json")["id2label"] == {"0": "a", "1": "b"}


@pytest.mark.slow
def test_multi_label_rows_learn_several_labels(sentence_encoder: Path, tmp_path: Path) -> None:
    rows = [{"text": row["text"], "label": [row["label"], "land"] if row["label"] != "sailing" else ["sailing"]}
            for row in topic_rows()]  # fmt: skip
    file = write_lines(tmp_path / "several.jsonl", rows)
    code = run(
        words("classify", sentence_encoder, tmp_path / "out", "--do_train", "--do_eval", train_file=file,
              validation_file=file, num_train_epochs=150)
    )  # fmt: skip
    assert code == 0
    assert load(tmp_path / "out", "eval_results.json")["eval_f1_micro"] == 1.0
    config = load(tmp_path / "out", "config.json")
    assert config["problem_type"] == "multi_label_classification"
    assert list(config["id2label"].values()) == ["baking", "garden", "land", "sailing"]
    assert load_lines(tmp_path / "out" / "eval_predictions.jsonl")[0]["labels"] == ["sailing"]


@pytest.mark.parametrize("kind", ["regression", "multi_label_classification"])
def test_labels_of_which_none_is_the_right_one_are_not_smoothed(
    kind: str, sentence_encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = [0.5, 1.5] if kind == "regression" else [["sailing"], ["baking", "sailing"]]
    file = write_lines(tmp_path / "rows.jsonl", [row | {"label": labels[n % 2]} for n, row in enumerate(topic_rows())])
    line = words("classify", sentence_encoder, tmp_path / "out", "--do_train", train_file=file, max_steps=1)
    assert run([*line, "--label_smoothing_factor", "0.1"]) == EXIT_BAD_CONFIG
    assert f"label_smoothing_factor does not go with {kind}" in _said(capsys)


@pytest.mark.slow
def test_numbers_are_learnt_by_regression(sentence_encoder: Path, tmp_path: Path) -> None:
    value = {"sailing": 0.5, "baking": 1.5, "garden": 2.5}
    rows = [{"text": row["text"], "label": value[row["label"]]} for row in topic_rows()]
    file = write_csv(tmp_path / "numbers.csv", rows)
    code = run(
        words("classify", sentence_encoder, tmp_path / "out", "--do_train", "--do_eval", train_file=file,
              validation_file=file, num_train_epochs=150)
    )  # fmt: skip
    assert code == 0
    results = load(tmp_path / "out", "eval_results.json")
    assert results["eval_pearson"] > 0.9
    assert results["eval_mse"] == pytest.approx(results["eval_loss"], abs=CLOSE)
    lines = load_lines(tmp_path / "out" / "eval_predictions.jsonl")
    found = _logits(tmp_path / "out", [row["text"] for row in rows])[:, 0]
    assert [line["value"] for line in lines] == pytest.approx(found.tolist(), abs=CLOSE)


def test_pairs_are_read_as_the_tokenizer_joins_them(sentence_encoder: Path, tmp_path: Path) -> None:
    texts = [row["text"] for row in topic_rows()]
    rows = [{"sentence1": a, "sentence2": b, "label": str(n % 2)}
            for n, (a, b) in enumerate(zip(texts, texts[3:], strict=False))]  # fmt: skip
    file = write_csv(tmp_path / "pairs.csv", rows)
    line = words("classify", sentence_encoder, tmp_path / "out", "--do_train", "--do_predict", train_file=file,
                 test_file=file, max_steps=2, max_seq_length=12)  # fmt: skip
    assert run(line) == 0
    logits = _logits(tmp_path / "out", [row["sentence1"] for row in rows], [row["sentence2"] for row in rows],
                     truncation=True, max_length=12)  # fmt: skip
    scores = torch.tensor(logits).softmax(1).max(1).values.tolist()
    lines = load_lines(tmp_path / "out" / "predict_predictions.jsonl")
    assert [line["score"] for line in lines] == pytest.approx(scores, abs=CLOSE)


def test_long_texts_are_judged_by_the_mean_of_their_windows(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = " ".join(row["text"] for row in topic_rows())
    file = write_lines(tmp_path / "long.jsonl", [{"text": long}, {"text": "we set the sail"}])
    line = words("classify", trained, tmp_path / "out", "--do_predict", test_file=file, max_seq_length=16, doc_stride=4)
    assert run(line) == 0
    assert "1 of 2 texts are longer than a row and were read in windows" in _said(capsys)
    windows = _logits(trained, long, truncation=True, max_length=16, stride=4, return_overflowing_tokens=True)
    wanted = torch.tensor(windows.mean(axis=0)).softmax(0).max().item()
    assert load_lines(tmp_path / "out" / "predict_predictions.jsonl")[0]["score"] == pytest.approx(wanted, abs=CLOSE)


def test_texts_that_are_cut_are_counted(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_lines(tmp_path / "long.jsonl", [{"text": "bread " * 50}, {"text": "flour"}])
    assert run(words("classify", trained, tmp_path / "out", "--do_predict", test_file=file)) == 0
    assert "1 of 2 texts are longer than a row and were cut at max_seq_length 32" in _said(capsys)


def test_bad_rows_are_left_out_with_skip_bad(sentence_encoder: Path, tmp_path: Path) -> None:
    file = write_csv(tmp_path / "some_bad.csv", [*topic_rows(), {"text": "", "label": "garden"}])
    line = words("classify", sentence_encoder, tmp_path / "out", "--do_train", train_file=file, max_steps=1)
    assert run(line) == EXIT_BAD_DATA
    assert run([*line, "--skip_bad"]) == 0
    assert load(tmp_path / "out", "train_results.json")["train_examples_left_out"] == 1
    (left_out,) = load(tmp_path / "out", "train_left_out.json")
    assert left_out["what"] == f"{file}: line 14: text is empty"


@pytest.mark.parametrize("lengths", [{"max_seq_length": 2}, {"max_seq_length": 16, "doc_stride": 14}])
def test_rows_without_room_for_text_are_refused(
    trained: Path, topics: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], lengths: dict[str, int]
) -> None:
    """Two special tokens take their places: the tokenizer itself would make rows longer than asked for, or panic."""
    line = words("classify", trained, tmp_path / "out", "--do_predict", test_file=topics, **lengths)
    assert run(line) == EXIT_BAD_CONFIG
    assert "--max_seq_length" in _said(capsys)


def test_windows_of_a_pair_need_room_behind_its_first_text(
    sentence_encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"sentence1": "bread " * 12, "sentence2": "the cake was sweet " * 5, "label": n % 2} for n in range(4)]
    file = write_csv(tmp_path / "pairs.csv", rows)
    options = {"train_file": file, "max_steps": 1, "doc_stride": 2}
    line = words("classify", sentence_encoder, tmp_path / "out", "--do_train", **options)
    assert run([*line, "--max_seq_length", "16"]) == EXIT_BAD_CONFIG
    assert "use --max_seq_length 18 or more" in _said(capsys)
    assert run([*line, "--max_seq_length", "18"]) == 0


@pytest.mark.parametrize(("policy", "code"), [("stop", 74), ("continue", 0)])
def test_file_that_cannot_be_written_follows_the_policy(
    policy: str, code: int, trained: Path, topics: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("eval_predictions.jsonl", "eval_confusion.csv"):
        (tmp_path / "out" / name / "in the way").mkdir(parents=True)
    asked = words("classify", trained, tmp_path / "out", "--do_eval", validation_file=topics, save_error_policy=policy)
    assert run(asked) == code
    said = _said(capsys)
    assert "eval_confusion.csv cannot be written" in said
    assert ("eval_predictions.jsonl cannot be written" in said) == (policy == "continue")
    assert (tmp_path / "out" / "eval_results.json").exists() == (policy == "continue")


def test_run_that_memory_runs_out_for_names_its_checkpoint_and_the_command(
    sentence_encoder: Path,
    topics: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After the last step, when the results are written: no machine has that much."""
    monkeypatch.setattr("whet.engine.engine.Engine.save_metrics", lambda *_args, **_more: bytearray(1 << 62))
    options = {"train_file": topics, "max_steps": 2, "save_strategy": "steps", "save_steps": 2}
    assert run(words("classify", sentence_encoder, tmp_path / "out", "--do_train", **options)) == EXIT_OTHER
    said = _said(capsys)
    assert "error: there is not enough memory" in said
    assert f"the newest complete checkpoint is {tmp_path / 'out' / find.folder_name(2)}" in said
    assert "whet: continue with:" in said
    assert said.rstrip().endswith("--resume_from_checkpoint auto")


@pytest.mark.parametrize(
    ("labels", "metric", "seeds"),
    [(("boats", "bread"), "f1_micro", 1), (("boats", "bread"), "mse", 2), ((0.5, 1.5), "accuracy", 1)],
)
def test_best_metric_that_the_labels_do_not_have_is_refused_before_the_training(
    labels: tuple[Any, Any], metric: str, seeds: int, sentence_encoder: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    rows = [{"text": row["text"], "label": labels[n % 2]} for n, row in enumerate(topic_rows())]
    file = write_lines(tmp_path / "rows.jsonl", rows)
    options = {"train_file": file, "validation_file": file, "eval_strategy": "epoch", "save_strategy": "epoch"}
    asked = ("--do_train", "--do_eval", "--load_best_model_at_end")
    line = words("classify", sentence_encoder, tmp_path / "out", *asked, **options, metric_name=metric, seeds=seeds)
    assert run(line) == EXIT_BAD_CONFIG
    said = " ".join(_said(capsys).split())
    assert "metric_name names no metric of this data" in said
    assert "an evaluation then computes " in said
    assert not [*(tmp_path / "out").rglob("checkpoint-*")]


def test_windows_of_a_pair_have_the_token_types_of_the_tokenizer(sentence_encoder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(sentence_encoder)
    first, second = "the boat", "we set the sail at dawn " * 4
    options = RowOptions(max_seq_length=16, doc_stride=4)
    found = make_rows([first], [second], tokenizer, options).rows
    wanted = tokenizer(first, second, truncation="only_second", max_length=16, stride=4, return_overflowing_tokens=True)
    assert [found[n]["token_type_ids"] for n in range(len(found))] == wanted["token_type_ids"]
    assert len(found) > 2
