"""What needs no data is refused before any data is read, and a hub that does not answer costs three seconds at most."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_qa import command, load, save_encoder, squad, write_json

from whet.cli.main import run
from whet.errors import EXIT_BAD_CONFIG

pytestmark = pytest.mark.true_start

ABSENT = "this file is read by no test"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"report_to": "trackio"}, "the package 'trackio' is missing"),
        ({"report_to": "mlflow"}, "the package 'mlflow' is missing"),
        ({"optim": "adamw_apex_fused"}, "the package 'apex' is missing"),
        ({"tf32": "true", "use_cpu": "false"}, "this machine has no NVIDIA GPU"),
    ],
)
def test_missing_files_are_refused_before_reading_data(
    asked: dict[str, str], message: str, encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "train.json"
    data.write_text(ABSENT, "utf-8")  # were it read, this would be the error
    assert run(command(encoder, tmp_path / "out", "--do_train", train_file=data, **asked)) == EXIT_BAD_CONFIG
    told = capsys.readouterr().err
    assert message in told
    assert "not JSON" not in told


def test_variables_that_ask_a_tracker_for_more_than_figures_are_refused(
    encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_LOG_MODEL", "end")
    monkeypatch.setenv("WANDB_WATCH", "false")
    data = write_json(tmp_path / "train.json", squad())
    assert run(command(encoder, tmp_path / "out", "--do_train", train_file=data, report_to="wandb")) == EXIT_BAD_CONFIG
    told = capsys.readouterr().err
    assert "WANDB_LOG_MODEL asks for what whet does not send to wandb" in told
    assert "WANDB_WATCH" not in told


@pytest.mark.parametrize("offline", ["0", "1"])
@pytest.mark.parametrize("what", ["model", "dataset"])
def test_unreachable_hub_is_named_at_once(what: str, offline: str, tmp_path: Path) -> None:
    """Nothing listens at the address; the answer may take 3 s, start of the program included, on an idle machine."""
    save_encoder(tmp_path / "model")
    data = write_json(tmp_path / "train.json", squad())
    if what == "model":
        words = command(Path("some/model"), tmp_path / "out", "--do_train", train_file=data)
    else:
        words = command(tmp_path / "model", tmp_path / "out", "--do_train", dataset_name="some/questions")
    own = {"HF_HUB_OFFLINE": offline, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "home")}
    before_s = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "whet", *words], env=os.environ | own, capture_output=True, text=True, check=False
    )
    seconds = time.perf_counter() - before_s
    assert done.returncode == EXIT_BAD_CONFIG, done.stderr
    assert (
        f"there is no such folder, and the hub, which may have a {what} of this name, cannot be reached" in done.stderr
    )
    assert ("unset HF_HUB_OFFLINE" if offline == "1" else "connect to the network") in done.stderr
    assert done.stderr.count("error: ") == 1
    assert seconds < 6, "twice the limit, for a busy machine"


def test_best_model_defaults_to_the_highest_f1(encoder: Path, tmp_path: Path) -> None:
    data = write_json(tmp_path / "train.json", squad())
    words = command(encoder, tmp_path / "out", "--do_train", "--load_best_model_at_end", train_file=data,
                    validation_file=data, eval_strategy="steps", eval_steps=4, save_strategy="steps", save_steps=4,
                    max_steps=12)  # fmt: skip
    assert run(words) == 0
    state = load(tmp_path / "out", "trainer_state.json")
    scores = [entry["eval_f1"] for entry in state["log_history"] if "eval_f1" in entry]
    assert state["best_metric"] == max(scores)
