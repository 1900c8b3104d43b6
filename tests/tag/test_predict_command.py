"""`whet predict` finds the task in the model's configuration and writes predictions with scores, labels or not."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from tiny_qa import command, load, squad, without_answers, write_json
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from text_tasks import load_lines, topic_rows, words, write_csv, write_lines
from whet.cli.main import run
from whet.errors import EXIT_BAD_CONFIG, EXIT_BAD_DATA, EXIT_IO

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


def test_words_are_tagged(word_encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"tokens": row["text"].split(), "tags": ["DET" if one == "the" else "X" for one in row["text"].split()]}
            for row in topic_rows()]  # fmt: skip
    train = write_lines(tmp_path / "train.jsonl", rows)
    line = words("tag", word_encoder, tmp_path / "out", "--do_train", train_file=train, num_train_epochs=60)
    assert run(line) == 0
    file = tmp_path / "new.conll"
    file.write_text("the\nboat\n\nsweet\nbread\nthe\n")
    output = tmp_path / "tags.jsonl"
    assert run(["predict", str(tmp_path / "out"), "--file", str(file), "--output", str(output)]) == 0
    first, second = load_lines(output)
    assert (first["tokens"], first["tags"]) == (["the", "boat"], ["DET", "X"])
    assert (second["tags"], second["row"]) == (["X", "X", "DET"], "line 4")
    assert all(0 < score <= 1 for score in second["scores"])
    capsys.readouterr()
    asked = ["predict", str(tmp_path / "out"), "--file", str(file), "--output", str(tmp_path / "again.jsonl")]
    assert run([*asked, "--text_column_names", "form"]) == EXIT_BAD_DATA
    said = capsys.readouterr().err
    assert "write a number, such as --text_column_names 0" in said
    assert "--label_column_name" not in said
    assert run([*asked, "--text_column_names", "0"]) == 0


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
