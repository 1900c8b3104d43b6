"""README.md of a trained model, and its upload: what the card says, what the hub gets, and what stays here."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard, constants

import hub_server
from text_tasks import topic_rows, words, write_csv
from whet.cli.main import run
from whet.errors import EXIT_BAD_CONFIG, EXIT_IO

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
    assert f"--include README.md us/answers {tmp_path / 'out'} ." in said
    assert (tmp_path / "out" / "eval_results.json").exists()


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
    assert not (tmp_path / "out").exists()
    assert not hub.repositories


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
