"""`whet predict` finds the task in the model's configuration and writes predictions with scores, labels or not."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import constants
from tiny_qa import command, load, squad, without_answers, write_json
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hub_cache import cached
from text_tasks import load_lines, overflowing, topic_rows, words, write_csv, write_lines
from whet.cli.main import run
from whet.errors import EXIT_BAD_CONFIG, EXIT_BAD_DATA, EXIT_IO, EXIT_NON_FINITE, NonFiniteError
from whet.jobs.predict import outputs
from whet.jobs.predict.arguments import PredictArguments
from whet.jobs.predict.trained import read_reading

CLOSE = 1e-4
"""Scores of whet's operators and of transformers' differ by float32 rounding, through two layers."""


@pytest.fixture(scope="module")
def classifier(word_encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained classifier; its texts stand in a column of an unusual name, and are read in windows."""
    folder = tmp_path_factory.mktemp("classifier")
    rows = [{"said": row["text"], "topic": row["label"]} for row in topic_rows()]
    options = {"train_file": write_csv(folder / "train.csv", rows), "text_column_names": "said", "max_steps": 60}
    line = words(
        "classify", word_encoder, folder / "out", "--do_train", label_column_name="topic", doc_stride=2, **options
    )
    assert run(line) == 0
    return folder / "out"


def test_texts_are_classified_as_they_were_read_in_training(classifier: Path, tmp_path: Path) -> None:
    texts = [row["text"] for row in topic_rows()]
    file = write_lines(tmp_path / "new.jsonl", [{"id": n, "said": text} for n, text in enumerate(texts)])
    output = tmp_path / "found.jsonl"
    assert run(["predict", str(classifier), "--file", str(file), "--output", str(output), "--top_k", "2"]) == 0
    lines = load_lines(output)
    tokenizer = AutoTokenizer.from_pretrained(classifier)
    model = AutoModelForSequenceClassification.from_pretrained(classifier).eval()
    with torch.no_grad():
        scores = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits.softmax(1).max(1)
    assert [line["label"] for line in lines] == [model.config.id2label[int(n)] for n in scores.indices]
    assert [line["score"] for line in lines] == pytest.approx(scores.values.tolist(), abs=CLOSE)
    assert all(len(line["scores"]) == 2 for line in lines)
    assert lines[3]["row"] == "line 4"


@pytest.fixture(scope="module")
def tagger(word_encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained tagger of plain tags."""
    folder = tmp_path_factory.mktemp("tagger")
    rows = [{"tokens": row["text"].split(), "tags": ["DET" if one == "the" else "X" for one in row["text"].split()]}
            for row in topic_rows()]  # fmt: skip
    train = write_lines(folder / "train.jsonl", rows)
    line = words("tag", word_encoder, folder / "out", "--do_train", train_file=train, num_train_epochs=60)
    assert run(line) == 0
    return folder / "out"


def test_words_are_tagged(tagger: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new.conll"
    file.write_text("the\nboat\n\nsweet\nbread\nthe\n")
    output = tmp_path / "tags.jsonl"
    assert run(["predict", str(tagger), "--file", str(file), "--output", str(output)]) == 0
    first, second = load_lines(output)
    assert (first["tokens"], first["tags"]) == (["the", "boat"], ["DET", "X"])
    assert (second["tags"], second["row"]) == (["X", "X", "DET"], "line 4")
    assert all(0 < score <= 1 for score in second["scores"])
    capsys.readouterr()
    asked = ["predict", str(tagger), "--file", str(file), "--output", str(tmp_path / "again.jsonl")]
    assert run([*asked, "--text_column_names", "form"]) == EXIT_BAD_DATA
    said = capsys.readouterr().err
    assert "write a number, such as --text_column_names 0" in said
    assert "--label_column_name" not in said
    assert run([*asked, "--text_column_names", "0"]) == 0


@pytest.mark.parametrize("command", ["classify", "tag"])
def test_logits_that_are_not_finite_are_neither_predicted_nor_judged(
    command: str, request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained: Path = request.getfixturevalue({"classify": "classifier", "tag": "tagger"}[command])
    model = overflowing(trained, tmp_path / "model")
    rows = {"classify": {"said": "the boat", "topic": "garden"}, "tag": {"tokens": ["the", "boat"], "tags": ["X", "X"]}}
    file, output = write_lines(tmp_path / "rows.jsonl", [rows[command]] * 2), tmp_path / "found.jsonl"
    columns = {"text_column_names": "said", "label_column_name": "topic"} if command == "classify" else {}
    asked = ["predict", str(model), "--file", str(file), "--output", str(output)]
    for line in (
        asked,
        [*asked, "--max_seq_length", "8", "--doc_stride", "2"],
        words(command, model, tmp_path / "out", "--do_eval", validation_file=file, **columns),
    ):
        assert run(line) == EXIT_NON_FINITE
        assert "the model's logits are infinite or not numbers" in capsys.readouterr().err
    assert not output.exists()


def test_numbers_that_are_not_finite_are_not_written(tmp_path: Path) -> None:
    """JSON has no NaN, and readers of arrays would take it for a vector."""
    asked = PredictArguments(model="model", file="file", output=str(tmp_path / "found.jsonl"))
    with pytest.raises(NonFiniteError):
        outputs.write_lines(asked, [{"vector": [float("nan")]}], precision="fp32", padding="with")
    with pytest.raises(NonFiniteError):
        outputs.write_array(asked, np.full((2, 3), np.inf))
    assert not any(tmp_path.iterdir())


def test_questions_are_answered(encoder: Path, tmp_path: Path) -> None:
    document = squad()
    train = write_json(tmp_path / "train.json", document)
    file = write_json(tmp_path / "asked.json", without_answers(document))
    line = command(
        encoder, tmp_path / "out", "--do_train", "--do_predict", train_file=train, test_file=file, max_steps=20
    )
    assert run(line) == 0
    output = tmp_path / "answers.jsonl"
    asked = ["predict", str(tmp_path / "out"), "--file", str(file), "--output", str(output)]
    assert run([*asked, "--max_seq_length", "40", "--doc_stride", "12"]) == 0
    lines = load_lines(output)
    assert {line["id"]: line["answer"] for line in lines} == load(tmp_path / "out", "predict_predictions.json")
    assert all(len(line["answers"]) == 3 for line in lines)

    wrong = squad()
    for question in wrong["data"][0]["paragraphs"][0]["qas"]:
        question["answers"][0]["answer_start"] += 1
    assert run([*asked[:3], str(write_json(tmp_path / "wrong.json", wrong)), *asked[4:]]) == 0, "answers are not read"
    assert {line["id"]: line["answer"] for line in load_lines(output)} == {line["id"]: line["answer"] for line in lines}


def test_no_answer_can_be_turned_off_for_a_model_that_was_trained_with_it(encoder: Path, tmp_path: Path) -> None:
    file = write_json(tmp_path / "train.json", squad(version_2=True))
    line = command(encoder, tmp_path / "out", "--do_train", "--version_2_with_negative", train_file=file, max_steps=1)
    assert run(line) == 0
    output = tmp_path / "answers.jsonl"
    asked = ["predict", str(tmp_path / "out"), "--file", str(file), "--output", str(output), "--top_k", "20"]
    for flags, is_allowed in (([], True), (["--version_2_with_negative", "false"], False)):
        assert run([*asked, *flags]) == 0
        assert any(one["text"] == "" for line in load_lines(output) for one in line["answers"]) == is_allowed


def test_bad_rows_and_bad_places_are_refused(
    classifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_lines(tmp_path / "bad.jsonl", [{"said": "bread"}, {"said": 3}])
    output = str(tmp_path / "found.jsonl")
    assert run(["predict", str(classifier), "--file", str(file), "--output", output]) == EXIT_BAD_DATA
    assert f"{file}: line 2: said is a whole number, not a text" in capsys.readouterr().err
    assert run(["predict", str(classifier), "--file", str(file), "--output", output, "--skip_bad"]) == 0
    assert len(load_lines(Path(output))) == 1
    assert run(["predict", str(classifier), "--file", str(file), "--output", str(file)]) == EXIT_BAD_CONFIG
    assert "would replace the data" in capsys.readouterr().err
    for other in (str(tmp_path / "found.csv"), "-"):
        assert run(["predict", str(classifier), "--file", str(file), "--output", other]) == EXIT_BAD_CONFIG
        assert "output is a file of JSON lines" in capsys.readouterr().err


def test_a_model_without_a_known_head_is_refused(
    word_encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_lines(tmp_path / "a.jsonl", [{"text": "bread"}])
    output = str(tmp_path / "found.jsonl")
    assert run(["predict", str(word_encoder), "--file", str(file), "--output", output]) == EXIT_BAD_CONFIG
    assert "BertModel" in capsys.readouterr().err


def test_predictions_run_without_padding_and_in_the_precision_asked_for(
    classifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_lines(tmp_path / "new.jsonl", [{"said": row["text"]} for row in topic_rows()])
    found = {}
    for precision in ("fp32", "bf16"):
        output = tmp_path / f"{precision}.jsonl"
        asked = ["predict", str(classifier), "--file", str(file), "--output", str(output), "--precision", precision]
        assert run(asked) == 0
        assert f"12 predictions in {output} ({precision}, without padding)" in capsys.readouterr().out
        found[precision] = [line["score"] for line in load_lines(output)]
    assert found["bf16"] != found["fp32"]
    assert found["bf16"] == pytest.approx(found["fp32"], abs=0.05)  # products keep 2 to 3 digits


@pytest.mark.parametrize("pooling", ["mean", "max"])
def test_windows_of_a_long_text_are_pooled_as_asked(classifier: Path, tmp_path: Path, pooling: str) -> None:
    text = " ".join(row["text"] for row in topic_rows()[:4])
    file, output = write_lines(tmp_path / "new.jsonl", [{"said": text}]), tmp_path / "found.jsonl"
    asked = ["predict", str(classifier), "--file", str(file), "--output", str(output), "--window_pooling", pooling]
    assert run([*asked, "--max_seq_length", "12", "--doc_stride", "4"]) == 0
    tokenizer = AutoTokenizer.from_pretrained(classifier)
    model = AutoModelForSequenceClassification.from_pretrained(classifier).eval()
    windows = tokenizer(
        text,
        max_length=12,
        stride=4,
        truncation=True,
        padding=True,
        return_overflowing_tokens=True,
        return_tensors="pt",
    )
    assert len(windows["input_ids"]) > 1
    with torch.no_grad():
        logits = model(input_ids=windows["input_ids"], attention_mask=windows["attention_mask"]).logits
    pooled = logits.mean(0) if pooling == "mean" else logits.max(0).values
    (line,) = load_lines(output)
    assert line["score"] == pytest.approx(float(pooled.softmax(-1).max()), abs=CLOSE)


def test_lines_are_split_by_every_reader(tagger: Path, tmp_path: Path) -> None:
    """Unicode knows more ends of a line than LF, and Python's splitlines splits at them; JSON can escape them."""
    tokens = ["the", "bo\u2028at", "lay\u2029", "\x85there"]
    file, output = write_lines(tmp_path / "new.jsonl", [{"tokens": tokens}] * 2), tmp_path / "tags.jsonl"
    assert run(["predict", str(tagger), "--file", str(file), "--output", str(output)]) == 0
    assert [json.loads(line)["tokens"] for line in output.read_text("utf-8").splitlines()] == [tokens] * 2


def test_settings_come_from_the_training_of_the_model_alone(classifier: Path, tmp_path: Path) -> None:
    """Those of the folder around it belong to another model, unless it is a checkpoint of that training."""
    out = tmp_path / "out"
    shutil.copytree(classifier, out)
    for name in ("mine", "checkpoint-60"):
        shutil.copytree(classifier, out / name, ignore=shutil.ignore_patterns("whet_task.json"))
    rows = [{"said": f"{row['text']} {row['text']}", "text": row["text"]} for row in topic_rows()]
    file, found = write_lines(tmp_path / "new.jsonl", rows), {}
    for name in (".", "mine", "checkpoint-60"):
        output = tmp_path / f"{name}.jsonl"
        asked = ["predict", str(out / name), "--file", str(file), "--output", str(output)]
        assert run([*asked, "--max_seq_length", "32"]) == 0
        found[name] = [line["score"] for line in load_lines(output)]
    assert found["checkpoint-60"] == found["."]  # of said
    assert found["mine"] != found["."]  # of text


def test_settings_of_this_folder_are_not_those_of_a_name_on_the_hub(
    classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(classifier / "whet_task.json", tmp_path)
    monkeypatch.chdir(tmp_path)
    assert read_reading(Path("checkpoint-60")) == read_reading(Path("bert-base-uncased")) == {}


def test_a_model_of_the_hub_reads_as_in_its_training(
    classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The columns and windows of its texts come from the file next to its weights."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    cached(classifier, tmp_path / "cache", "some/classifier")
    rows = [{"said": f"{row['text']} " * 9, "topic": row["label"], "also": row["text"]} for row in topic_rows()]
    file, found = write_lines(tmp_path / "new.jsonl", rows), []
    for model in (str(classifier), "some/classifier"):
        output = tmp_path / "found.jsonl"
        assert run(["predict", model, "--file", str(file), "--output", str(output), "--window_pooling", "max"]) == 0
        found.append(output.read_text("utf-8"))
    assert found[0] == found[1]
    capsys.readouterr()
    pairs = {"validation_file": file, "text_column_names": "said", "text_pair_column_names": "also"}
    line = words("classify", Path("some/classifier"), tmp_path / "out", "--do_eval", label_column_name="topic", **pairs)
    assert run(line) == EXIT_BAD_DATA
    assert "training of the model: one text; validation: a pair" in capsys.readouterr().err


def test_answers_of_a_model_of_the_hub_are_chosen_as_in_its_training(
    encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    file = write_json(tmp_path / "train.json", squad(version_2=True))
    options = {"train_file": file, "max_steps": 1, "null_score_diff_threshold": -1e6}
    assert run(command(encoder, tmp_path / "out", "--do_train", "--version_2_with_negative", **options)) == 0
    cached(tmp_path / "out", tmp_path / "cache", "some/reader")
    (tmp_path / "notes.txt").write_text(squad()["data"][0]["paragraphs"][0]["context"], "utf-8")
    said = []
    for model in (str(tmp_path / "out"), "some/reader"):
        capsys.readouterr()
        asked = ["--context", str(tmp_path / "notes.txt"), "--question", "who?", "--version_2_with_negative"]
        assert run(["ask", model, *asked]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    assert "(no answer in the text)" in said[0].splitlines()[1]


def test_an_export_of_the_hub_is_to_be_downloaded(
    classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    about = {"head": "AutoModelForSequenceClassification", "format": "onnx", "inputs": ["input_ids"]}
    kept = shutil.ignore_patterns("*.safetensors")
    folder = Path(shutil.copytree(classifier, tmp_path / "export", ignore=kept))
    (folder / "export.json").write_text(json.dumps({"whet": about}), "utf-8")
    cached(folder, tmp_path / "cache", "some/export")
    file = write_lines(tmp_path / "new.jsonl", [{"said": "bread"}])
    for line in (["predict", "some/export", "--file", str(file)], ["export", "some/export"]):
        assert run(line) == EXIT_BAD_CONFIG
        assert "fix: download it: hf download some/export --local-dir EXPORT" in capsys.readouterr().err


def _asked(classifier: Path, folder: Path, output: object) -> list[str]:
    file = write_lines(folder / "new.jsonl", [{"said": row["text"]} for row in topic_rows()])
    return ["predict", str(classifier), "--file", str(file), "--output", str(output)]


def test_link_named_as_output_stays_and_its_target_is_written(
    classifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "old.jsonl").write_text("old\n")
    for name in ("old.jsonl", "new.jsonl"):
        link = tmp_path / f"to_{name}"
        link.symlink_to(f"kept/{name}")
        assert run(_asked(classifier, tmp_path, link)) == 0
        assert link.is_symlink()
        assert len(load_lines(kept / name)) == 12
    assert sorted(path.name for path in kept.iterdir()) == ["new.jsonl", "old.jsonl"]
    lost = tmp_path / "lost"
    lost.symlink_to("no_folder/found.jsonl")
    assert run(_asked(classifier, tmp_path, lost)) == EXIT_BAD_CONFIG
    assert "a file in a folder that exists" in capsys.readouterr().err


def test_pipe_named_as_output_is_written_to(classifier: Path, tmp_path: Path) -> None:
    pipe, lines = tmp_path / "pipe", list[str]()
    os.mkfifo(pipe)
    # a descriptor for both directions: nobody waits forever if the predictions go elsewhere
    both = os.open(pipe, os.O_RDWR)
    reader = threading.Thread(target=lambda: lines.extend(pipe.read_text().splitlines()))
    reader.start()
    assert run(_asked(classifier, tmp_path, pipe)) == 0
    assert pipe.is_fifo()
    os.close(both)
    reader.join(60)
    assert len(lines) == 12


def test_open_file_named_as_output_keeps_what_is_in_it(
    classifier: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "collected.jsonl"
    file.write_text("{}\n")
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND)
    link = tmp_path / "link"
    link.symlink_to(f"/dev/fd/{descriptor}")
    for output in (f"/dev/fd/{descriptor}", link):
        assert run(_asked(classifier, tmp_path, output)) == 0
    os.close(descriptor)
    assert len(load_lines(file)) == 1 + 12 + 12
    capfd.readouterr()
    assert run(_asked(classifier, tmp_path, "/dev/fd/1")) == 0
    said = capfd.readouterr()
    assert said.out.count("\n") == said.out.count('{"row"') == 12
    assert "12 predictions in /dev/fd/1" in said.err


def test_output_that_does_not_take_the_predictions_ends_with_74(
    classifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    full = os.open("/dev/full", os.O_WRONLY)
    for descriptor, why in ((writes, "Broken pipe"), (full, "No space left")):
        assert run(_asked(classifier, tmp_path, f"/dev/fd/{descriptor}")) == EXIT_IO
        said = capsys.readouterr().err
        assert f"/dev/fd/{descriptor} cannot be written" in said
        assert why in said
        assert "name a file in --output" in said
        os.close(descriptor)


def test_folder_that_takes_no_file_is_answered_with_the_option_of_predict(
    classifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(_asked(classifier, tmp_path, tmp_path / ("x" * 256))) == EXIT_BAD_CONFIG
    assert "File name too long" in capsys.readouterr().err
    name = "x" * 245 + ".jsonl"  # it fits as it is, and not with what is added until it is complete
    assert run(_asked(classifier, tmp_path, tmp_path / name)) == EXIT_IO
    said = capsys.readouterr().err
    assert "use a shorter --output\n" in said
    assert "checkpoint" not in said


_ARCHITECTURES = {"qa": "QuestionAnswering", "classify": "SequenceClassification", "tag": "TokenClassification"}


@pytest.mark.parametrize(
    ("task", "flags", "said"),
    [
        *(("qa", f"--{name} x", f"{name} would change nothing here") for name in (
            "text_column_names", "text_pair_column_names", "corpus_file"
        )),
        ("qa", "--csv_delimiter ;", "csv_delimiter would change nothing here"),
        ("qa", "--window_pooling max", "window_pooling would change nothing here"),
        ("tag", "--top_k 5 --text_pair_column_names x", "text_pair_column_names and top_k would change nothing here"),
        ("tag", "--version_2_with_negative false", "version_2_with_negative would change nothing here"),
        ("tag", "--window_pooling max", "window_pooling would change nothing without doc_stride"),
        ("classify", "--version_2_with_negative", "version_2_with_negative would change nothing here"),
        ("classify", "--window_pooling max", "window_pooling would change nothing without doc_stride"),
        ("embed", "--top_k 5", "top_k would change nothing without corpus_file"),
        ("rerank", "--top_k 5 --doc_stride 8", "doc_stride would change nothing here"),
    ],
)  # fmt: skip
def test_options_that_the_model_does_not_honour_are_refused(
    task: str, flags: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    if task in _ARCHITECTURES:
        write_json(model / "config.json", {"model_type": "bert", "architectures": [f"BertFor{_ARCHITECTURES[task]}"]})
    else:
        kind = "SentenceTransformer" if task == "embed" else "CrossEncoder"
        write_json(model / "config_sentence_transformers.json", {"model_type": kind})
    file, output = write_lines(tmp_path / "new.jsonl", [{"text": "bread"}]), str(tmp_path / "found.jsonl")
    assert run(["predict", str(model), "--file", str(file), "--output", output, *flags.split()]) == EXIT_BAD_CONFIG
    assert said in " ".join(capsys.readouterr().err.split())


def test_number_of_scores_is_refused_for_a_model_of_numbers(
    word_encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"text": row["text"], "label": n / 10 + 0.5} for n, row in enumerate(topic_rows())]
    train = write_lines(tmp_path / "train.jsonl", rows)
    assert run(words("classify", word_encoder, tmp_path / "out", "--do_train", train_file=train, max_steps=1)) == 0
    asked = ["predict", str(tmp_path / "out"), "--file", str(train), "--output", str(tmp_path / "found.jsonl")]
    assert run([*asked, "--top_k", "2"]) == EXIT_BAD_CONFIG
    assert "top_k would change nothing here" in capsys.readouterr().err
    assert run(asked) == 0


def test_predictions_never_replace_the_texts_that_are_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    file, corpus = (write_lines(tmp_path / name, [{"text": "bread"}]) for name in ("q.jsonl", "predictions.jsonl"))
    for flags in ([], ["--output", str(corpus)]):
        asked = ["predict", "model", "--file", str(file), "--corpus_file", "predictions.jsonl", *flags]
        assert run(asked) == EXIT_BAD_CONFIG
        assert "the predictions would replace the texts that are searched" in capsys.readouterr().err
    assert run([*asked[:-1], "found.jsonl", "--text_pair_column_names", "text"]) == EXIT_BAD_CONFIG
    assert "corpus_file does not go with text_pair_column_names" in capsys.readouterr().err


@pytest.mark.parametrize("delimiter", ["\\t", ";;", ""])
def test_delimiter_of_several_characters_is_refused(
    delimiter: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_csv(tmp_path / "new.csv", topic_rows())
    assert run(["predict", "model", "--file", str(file), "--csv_delimiter", delimiter]) == EXIT_BAD_CONFIG
    assert "csv_delimiter is not one character" in capsys.readouterr().err


def test_delimiter_parts_words_from_what_stands_next_to_them(
    tagger: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, output = tmp_path / "new.csv", tmp_path / "tags.jsonl"
    file.write_text("the:1,5\nboat:2,5\n\nbread:3,5\n")
    asked = ["predict", str(tagger), "--file", str(file), "--output", str(output)]
    assert run([*asked, "--csv_delimiter", ":"]) == 0
    assert [line["tokens"] for line in load_lines(output)] == [["the", "boat"], ["bread"]]
    assert run([*asked, "--csv_delimiter", "|"]) == EXIT_BAD_DATA
    assert "the lines have no columns with '|' between them" in capsys.readouterr().err


_UNREAD_TAGS = {
    "a list that is too short": ("a.jsonl", '{"tokens": ["the", "boat"], "tags": ["X"]}\n'),
    "spans inside words": ("a.jsonl", '{"text": "the boat", "label": [[1, 6, "X"]]}\n'),
    "the label of the text": ("a.jsonl", '{"text": "the boat", "label": "sailing"}\n'),
    "fewer than words": ("a.jsonl", '{"text": "the boat", "tags": "O O"}\n{"text": "the boat", "tags": "O"}\n'),
    "missing in one line": ("a.conll", "the DET\nboat\n\nthe DET\nboat X\n"),
}


@pytest.mark.parametrize("case", _UNREAD_TAGS)
def test_odd_tags_are_not_read(case: str, tagger: Path, tmp_path: Path) -> None:
    name, content = _UNREAD_TAGS[case]
    (tmp_path / name).write_text(content)
    output = tmp_path / "tags.jsonl"
    assert run(["predict", str(tagger), "--file", str(tmp_path / name), "--output", str(output)]) == 0
    assert {tuple(line["tokens"]) for line in load_lines(output)} == {("the", "boat")}


def test_odd_labels_are_not_read_and_the_columns_are_named(
    classifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_lines(tmp_path / "new.jsonl", [{"said": "bread", "label": [[0, 5, "FOOD"]], "answer": "reject"}])
    assert run(["predict", str(classifier), "--file", str(file), "--output", str(tmp_path / "found.jsonl")]) == 0
    assert "new.jsonl: text: said; not read: label, answer\n" in capsys.readouterr().out


def test_a_model_of_one_text_reads_no_second_one(
    word_encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"question": row["text"], "answer": "the sail", "label": row["label"]} for row in topic_rows()]
    train, single = write_csv(tmp_path / "train.csv", rows), {"text_column_names": "question", "max_steps": 2}
    line = words("classify", word_encoder, tmp_path / "out", "--do_train", train_file=train, **single)
    assert run([*line, "--text_pair_column_names", ""]) == 0
    assert "text: question; label: label; not read: answer" in " ".join(capsys.readouterr().out.split())
    alone = write_csv(tmp_path / "alone.csv", [{"question": row["question"]} for row in rows])
    found = {}
    for file in (train, alone):
        output = tmp_path / f"{file.stem}.jsonl"
        assert run(["predict", str(tmp_path / "out"), "--file", str(file), "--output", str(output)]) == 0
        found[file.stem] = output.read_text()
    assert found["train"] == found["alone"]
    assert "train.csv: text: question; not read: answer, label\n" in capsys.readouterr().out
