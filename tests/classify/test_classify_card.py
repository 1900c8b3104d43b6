"""README.md of a trained model, and its upload: what the card says, what the hub gets, and what stays here."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard, constants

import hub_server
from stop_at import stop_at
from text_tasks import topic_rows, words, write_csv
from whet.cli.main import run
from whet.config.upload import upload_command
from whet.errors import EXIT_BAD_CONFIG, EXIT_IO, EXIT_STOPPED_AND_SAVED
from whet.jobs import model_card
from whet.watch import stop

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of httpx, about the hub's client
TRAINED = {"model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "whet_task.json", "README.md"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[hub_server.Hub]:
    """A hub on this machine, which the client of this process takes for the hub."""
    with hub_server.taken_for_the_hub(monkeypatch) as hub:
        yield hub


@pytest.fixture(scope="module")
def topics(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CSV file of sentences with topics, in a folder whose name nobody else shall read."""
    return write_csv(tmp_path_factory.mktemp("private-folder") / "topics.csv", topic_rows())


def _command(encoder: Path, out: Path, topics: Path, *flags: str, **more: Any) -> list[str]:
    settings: dict[str, Any] = {
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 1,
        "train_file": topics,
        "validation_file": topics,
    }
    return words("classify", encoder, out, "--do_train", "--do_eval", *flags, **(settings | more))


def test_card_names_data_scores_machine_and_command(sentence_encoder: Path, topics: Path, tmp_path: Path) -> None:
    command = _command(sentence_encoder, tmp_path / "out", topics, eval_strategy="steps", eval_steps=2)
    assert run([*command, "--token", "hf_" + "b" * 34]) == 0
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.pipeline_tag == "text-classification"
    (result,) = [one for one in card.data.eval_results if one.metric_type == "accuracy"]
    assert result.dataset_name == "topics.csv"
    assert "fine-tuned on `topics.csv`: 12 rows" in card.text
    assert f"| accuracy | {result.metric_value:.4f} |" in card.text
    assert "| steps | 4 |" in card.text
    assert card.text.count("| 2 | ") == card.text.count("| 4 | ") == 1  # evaluations during the training
    assert "--train_file topics.csv" in card.text
    assert "private-folder" not in card.text
    assert str(tmp_path) not in card.text
    assert "hf_b" not in card.text


def test_card_of_a_model_on_a_trained_one_names_the_first_base(
    sentence_encoder: Path, topics: Path, tmp_path: Path
) -> None:
    cached = tmp_path / "hub" / "models--someone--tiny-encoder" / "snapshots"
    cached.mkdir(parents=True)
    (cached / "abc").symlink_to(sentence_encoder)
    assert run(_command(cached / "abc", tmp_path / "first", topics)) == 0
    assert run(_command(tmp_path / "first", tmp_path / "second", topics)) == 0
    for folder in ("first", "second"):
        assert ModelCard.load(tmp_path / folder / "README.md").data.base_model == "someone/tiny-encoder"
    assert "--model_name_or_path someone/tiny-encoder" in (tmp_path / "first" / "README.md").read_text()


def test_folders_of_this_machine_are_not_named_in_what_is_uploaded(
    hub: hub_server.Hub, sentence_encoder: Path, topics: Path, tmp_path: Path
) -> None:
    """The hub refuses such names in the metadata of a card."""
    base = Path(shutil.copytree(sentence_encoder, tmp_path / "base"))
    (base / "README.md").write_text(f"---\nbase_model: {sentence_encoder}\nlicense: mit\n---\n", "utf-8")
    data = tmp_path / "private-folder" / "topics"
    data.mkdir(parents=True)
    for split in ("train", "validation"):
        shutil.copy(topics, data / f"{split}.csv")
    line = words("classify", base, tmp_path / "out", "--do_train", "--do_eval", "--push_to_hub", hub_strategy="end",
                 dataset_name=data, max_steps=1)  # fmt: skip
    assert run(line) == 0
    text = hub.repositories["me/out"]["README.md"].decode()
    assert str(tmp_path) not in text
    assert "private-folder" not in text
    assert str(sentence_encoder) not in text
    card = ModelCard(text)
    assert "fine-tuned on `topics`" in card.text
    assert (card.data.datasets, card.data.base_model, card.data.license) == (None, None, "mit")
    assert {(one.dataset_name, one.dataset_type) for one in card.data.eval_results} == {("topics", "file")}


@pytest.mark.parametrize("strategy", ["end", "every_save", "checkpoint", "all_checkpoints"])
def test_upload_has_what_the_strategy_says(
    strategy: str, hub: hub_server.Hub, sentence_encoder: Path, topics: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    flags = ["--push_to_hub", "--hub_always_push", "--hub_private_repo", "--hub_strategy", strategy]
    assert run(_command(sentence_encoder, tmp_path / "out", topics, *flags, save_total_limit=1)) == 0
    assert "/me/out" in capsys.readouterr().out
    files = hub.repositories["me/out"]
    assert hub.private["me/out"]
    inside = {name.partition("/")[0] for name in files if "/" in name}
    wanted = {"checkpoint": {"last-checkpoint"}, "all_checkpoints": {f"checkpoint-{n}" for n in range(1, 5)}}
    assert inside == wanted.get(strategy, set())
    assert {name for name in files if "/" not in name} == TRAINED
    for name in TRAINED:
        assert files[name] == (tmp_path / "out" / name).read_bytes(), name
    n_saves = sum("Training in progress" in one for one in hub.messages)
    assert n_saves == {"end": 0, "every_save": 4}.get(strategy, 8)
    assert not (tmp_path / "out" / ".hub-upload").exists()
    if strategy == "checkpoint":
        newest = tmp_path / "out" / "checkpoint-4"
        assert {name: files[f"last-checkpoint/{name}"] for name in ("state.json", "optimizer.safetensors")} == {
            name: (newest / name).read_bytes() for name in ("state.json", "optimizer.safetensors")
        }


@pytest.mark.slow
def test_save_during_a_slow_upload_is_left_out_and_the_checkpoint_may_be_deleted(
    hub: hub_server.Hub, sentence_encoder: Path, topics: Path, tmp_path: Path
) -> None:
    hub.may_commit.clear()
    threading.Thread(target=lambda: (_wait_for(tmp_path / "out" / "all_results.json"), hub.may_commit.set())).start()
    command = _command(sentence_encoder, tmp_path / "out", topics, "--push_to_hub", save_total_limit=1)
    assert run(command) == 0
    assert hub.messages == ["Training in progress, checkpoint-1", "End of training"]


def _wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


@pytest.mark.slow
def test_failed_upload_keeps_the_results_and_fails_the_command(
    hub: hub_server.Hub, sentence_encoder: Path, topics: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.refuses_commits = True
    command = _command(sentence_encoder, tmp_path / "out", topics, "--push_to_hub", "--hub_model_id", "us/answers")
    assert run(command) == EXIT_IO
    said = " ".join(capsys.readouterr().err.split())
    assert "checkpoint-1 is not on the hub" in said
    assert "the trained model is not on the hub" in said
    assert {"eval_results.json", "report.html", "checkpoint-4"} <= {path.name for path in (tmp_path / "out").iterdir()}
    assert not (tmp_path / "out" / ".hub-upload").exists()
    hub.refuses_commits = False
    _upload_by_hand(hub, said.partition("fix: run: ")[2])
    assert {*hub.repositories["us/answers"]} == TRAINED


def _upload_by_hand(hub: hub_server.Hub, command: str) -> None:
    """Run the printed command of the hub's own client."""
    client, *asked = shlex.split(command)
    program = Path(sys.executable).with_name(client)
    variables = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1",
                 "HF_HUB_DISABLE_UPDATE_CHECK": "1"}  # fmt: skip
    done = subprocess.run([program, *asked], env=os.environ | variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_run_stopped_after_its_training_prints_how_to_evaluate_and_how_to_upload(
    hub: hub_server.Hub, sentence_encoder: Path, topics: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, flags = tmp_path / "out", ["--push_to_hub", "--hub_model_id", "us/answers", "--hub_private_repo"]
    with pytest.MonkeyPatch.context() as patched:
        stop_at(patched, model_card, "write", 1)
        line = _command(sentence_encoder, out, topics, *flags, hub_strategy="end", hub_token=hub_server.TOKEN)
        assert run(line) == EXIT_STOPPED_AND_SAVED
    stop.restore()
    said = capsys.readouterr().err
    assert not hub.repositories["us/answers"]
    again = next(one for one in said.splitlines() if one.startswith("whet classify"))
    assert run(shlex.split(again)[1:]) == 0
    assert (out / "eval_results.json").exists()
    _upload_by_hand(hub, next(one for one in said.splitlines() if "not on the hub: " in one).partition("hub: ")[2])
    assert {*hub.repositories["us/answers"]} == TRAINED


def test_stopped_run_without_further_work_prints_no_command(
    sentence_encoder: Path, topics: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    stop_at(monkeypatch, model_card, "write", 1)
    asked = words("classify", sentence_encoder, tmp_path / "out", "--do_train", train_file=topics, max_steps=1)
    assert run(asked) == EXIT_STOPPED_AND_SAVED
    stop.restore()
    said = capsys.readouterr().err
    assert "the trained model is in" in said
    assert "continue with" not in said


def test_checkpoint_that_cannot_be_prepared_for_its_upload_does_not_end_the_training(
    hub: hub_server.Hub, sentence_encoder: Path, topics: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".hub-upload").write_text("a file in the place of the folder", "utf-8")
    command = _command(sentence_encoder, tmp_path / "out", topics, "--push_to_hub", "--overwrite_output_dir")
    assert run(command) == 0
    assert "checkpoint-1 is not on the hub" in " ".join(capsys.readouterr().err.split())
    assert hub.messages == ["End of training"]


def test_what_a_run_had_prepared_to_upload_does_not_stay(
    hub: hub_server.Hub, sentence_encoder: Path, topics: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Links would keep a deleted checkpoint on the disk, of a run that was stopped and of one that was killed."""
    out, staged = tmp_path / "out", tmp_path / "out" / ".hub-upload"
    hub.may_commit.clear()
    seen: list[bool] = []

    def noticed(*_: Any) -> None:
        seen.append(staged.exists())
        stop._current.requested = "SIGTERM"  # as the handler does

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(model_card, "write", noticed)
        assert run(_command(sentence_encoder, out, topics, "--push_to_hub")) == EXIT_STOPPED_AND_SAVED
    stop.restore()
    hub.may_commit.set()
    assert seen == [True], "the upload of a checkpoint was on its way"
    assert not staged.exists()
    assert "is not on the hub (" not in capsys.readouterr().err
    (staged / "checkpoint-1").mkdir(parents=True)
    (staged / "checkpoint-1" / "model.safetensors").write_bytes(b"killed")
    assert run(words("classify", out, out, "--do_eval", validation_file=topics)) == 0
    assert not staged.exists()


@pytest.mark.parametrize("kind", ["token", "offline"])
def test_upload_that_cannot_be_is_refused_before_any_work(
    kind: str, hub: hub_server.Hub, sentence_encoder: Path, topics: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    if kind == "token":
        monkeypatch.setenv("HF_TOKEN", "hf_" + "c" * 34)
    else:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert run(_command(sentence_encoder, tmp_path / "out", topics, "--push_to_hub")) == EXIT_BAD_CONFIG
    said = capsys.readouterr().err
    assert "push_to_hub cannot make its repository on the hub" in said
    assert ("hf auth login" if kind == "token" else "HF_HUB_OFFLINE is set") in said
    assert "--include whet_task.json" in said
    assert not (tmp_path / "out").exists()
    assert not hub.repositories


def test_adapter_is_uploaded_without_paths_of_this_machine(
    hub: hub_server.Hub, sentence_encoder: Path, topics: Path, tmp_path: Path
) -> None:
    """Its base by the name that the card of the base gives it; peft's card of a checkpoint has the path, too."""
    pytest.importorskip("peft")
    encoder = Path(shutil.copytree(sentence_encoder, tmp_path / "encoder"))
    for number, (card, base) in enumerate({"": "encoder", "---\nbase_model: a/b\n---\n": "a/b"}.items()):
        (encoder / "README.md").write_text(card, "utf-8")
        flags = ["--push_to_hub", "--hub_always_push", "--hub_model_id", f"me/{number}", "--lora_r", "2"]
        out = tmp_path / str(number)
        assert run(_command(encoder, out, topics, *flags, max_steps=2)) == 0
        files = hub.repositories[f"me/{number}"]
        assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} <= files.keys()
        assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == base
        assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == str(encoder)
        assert not (out / "checkpoint-2" / "README.md").exists()
        assert not [name for name, content in files.items() if str(tmp_path).encode() in content]


def test_adapter_in_a_checkpoint_of_the_hub_resumes_without_the_path_of_its_model(
    hub: hub_server.Hub, sentence_encoder: Path, topics: Path, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    encoder = Path(shutil.copytree(sentence_encoder, tmp_path / "encoder"))
    flags = ["--push_to_hub", "--hub_always_push", "--hub_strategy", "checkpoint", "--lora_r", "2"]
    assert run(_command(encoder, tmp_path / "out", topics, *flags, max_steps=2)) == 0
    assert hub.messages == [
        *(f"Training in progress, checkpoint-{n}{more}" for n in (1, 2) for more in ("", ", to resume from")),
        "End of training",
    ], "a model and the settings of its adapter are one commit"
    there = tmp_path / "there" / "checkpoint-2"
    there.mkdir(parents=True)
    for name, content in hub.repositories["me/out"].items():
        if name.startswith("last-checkpoint/"):
            (there / Path(name).name).write_bytes(content)
    assert json.loads((there / "adapter_config.json").read_text())["base_model_name_or_path"] == "encoder"
    assert str(encoder) in (tmp_path / "out" / "checkpoint-2" / "adapter_config.json").read_text()
    again = _command(encoder, tmp_path / "again", topics, "--lora_r", "2", max_steps=3, resume_from_checkpoint=there)
    assert run(again) == 0


def test_adapter_that_is_uploaded_by_hand_is_corrected_first(
    hub: hub_server.Hub, sentence_encoder: Path, topics: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("peft")
    hub.refuses_commits = True
    flags = ["--push_to_hub", "--hub_strategy", "end", "--lora_r", "2"]
    settings = tmp_path / "out" / "adapter_config.json"
    name = "the name that the model of the adapter has on the hub"
    wanted = f"in {settings} write {name}, in place of {sentence_encoder};"
    assert run(_command(sentence_encoder, tmp_path / "out", topics, *flags, max_steps=1)) == EXIT_IO
    said = " ".join(capsys.readouterr().err.split())
    assert f"fix: {wanted} then run: hf upload me/out" in said
    assert run(words("classify", sentence_encoder, tmp_path / "out", "--push_to_hub")) == EXIT_BAD_CONFIG
    assert wanted in " ".join(capsys.readouterr().err.split())


def test_upload_replaces_the_model_of_another_kind(
    hub: hub_server.Hub, sentence_encoder: Path, topics: Path, tmp_path: Path
) -> None:
    """An adapter next to the new weights would be preferred to them, and modules.json is another class."""
    others = {"README.md", ".gitattributes", "notes.txt", "last-checkpoint/adapter_config.json"}
    earlier = {"adapter_config.json", "adapter_model.safetensors", "model-00001-of-00002.safetensors", "modules.json",
               "model.safetensors.index.json", "config_sentence_transformers.json", "sentence_bert_config.json",
               "model_card.txt"}  # fmt: skip
    for name in ("me/out", "me/hand"):
        hub.repositories[name] = dict.fromkeys(earlier | others, b"earlier")
    flags = ["--push_to_hub", "--hub_strategy", "end"]
    assert run(_command(sentence_encoder, tmp_path / "out", topics, *flags, max_steps=1)) == 0
    _upload_by_hand(hub, upload_command(tmp_path / "out", "me/hand"))
    for name in ("me/out", "me/hand"):
        assert {*hub.repositories[name]} == TRAINED | others | {"model_card.txt"}
        assert hub.repositories[name]["model.safetensors"] == (tmp_path / "out" / "model.safetensors").read_bytes()


def test_settings_of_an_upload_without_one_are_refused(
    sentence_encoder: Path, topics: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(_command(sentence_encoder, tmp_path / "out", topics, "--hub_model_id", "us/answers")) == EXIT_BAD_CONFIG
    assert "hub_model_id would change nothing without push_to_hub" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_best_of_several_seeds_is_uploaded(
    hub: hub_server.Hub, sentence_encoder: Path, topics: Path, tmp_path: Path
) -> None:
    command = _command(sentence_encoder, tmp_path / "out", topics, "--push_to_hub", "--seeds", "2")
    assert run(command) == 0
    assert {*hub.repositories["me/out"]} == TRAINED
    assert ModelCard(hub.repositories["me/out"]["README.md"].decode()).data.model_name == "out"


def test_upload_by_a_token_of_its_own_goes_to_a_branch(
    hub: hub_server.Hub, sentence_encoder: Path, topics: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    flags = ["--push_to_hub", "--hub_strategy", "end", "--hub_token", hub_server.TOKEN, "--hub_revision", "trial"]
    assert run(_command(sentence_encoder, tmp_path / "out", topics, *flags)) == 0
    assert hub.branches == ["trial"]
    for path in (tmp_path / "out").rglob("*"):
        assert path.is_dir() or hub_server.TOKEN.encode() not in path.read_bytes(), path
