"""`whet bench-methods` as a user runs it, on a tiny model: table, JSON, picture, a technique that cannot run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tiny_qa import save_encoder, squad, write_json

from whet.cli.main import run
from whet.errors import EXIT_BAD_CONFIG, EXIT_OK

STEPS, WARMUP = 2, 1


def words(folder: Path, *more: str) -> list[str]:
    """The words of the command on a new tiny model in the folder."""
    save_encoder(folder / "encoder")
    train = write_json(folder / "train.json", squad())
    return [
        "bench-methods", "--model_name_or_path", str(folder / "encoder"), "--train_file", str(train),
        "--max_seq_length", "40", "--doc_stride", "12", "--steps", str(STEPS), "--warmup", str(WARMUP),
        "--rounds", "1", "--use_cpu", "--output_dir", str(folder / "out"), *more,
    ]  # fmt: skip


@pytest.mark.gate
@pytest.mark.slow
def test_the_table_is_printed_written_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words(tmp_path, "--only", "accumulation,tf32,activation_offload,attention_flash")) == EXIT_OK
    shown = capsys.readouterr().out
    told = json.loads((tmp_path / "out/methods.json").read_text("utf-8"))
    named = {line["name"]: line for line in told["techniques"]}
    plain, split = named["plain"], named["accumulation"]
    assert told["finished"] is True
    assert {"machine", "steps", "warmup", "rounds", "qa", "plain", "load_before"} <= told.keys()
    assert {"torch", "transformers", "whet", "processor", "torch_threads"} <= told["machine"].keys()
    for line in (plain, split):
        assert len(line["losses"]) == WARMUP + STEPS
        assert len(line["runs"][0]["step_s"]) == STEPS
        assert line["steps_per_s"] > 0
        assert line["peak_bytes"] > 0
    assert (split["equal_to"], split["equal"]) == ("plain", True)
    for name in ("tf32", "activation_offload", "attention_flash"):  # a GPU is what they need
        assert (named[name]["steps_per_s"], named[name]["error"]) == (None, None)
        assert "GPU" in named[name]["skipped"]
    assert "skipped: tf32 is asked for" in shown
    assert "CANNOT RUN" not in shown
    assert "less memory" in shown  # the guides' claim
    assert (tmp_path / "out/methods.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.night
@pytest.mark.slow
def test_what_was_measured_before_the_command_was_killed_is_there(tmp_path: Path) -> None:
    """Rounds without end: the file of the first runs is whole at any time."""
    command = [sys.executable, "-m", "whet", *words(tmp_path, "--only", "sgd,muon", "--rounds", "1000")]
    process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
    try:
        told = _when_there(tmp_path / "out/methods.json", process)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert told["finished"] is False
    assert len(told["techniques"][0]["losses"]) == WARMUP + STEPS


def _when_there(path: Path, process: subprocess.Popen[bytes], limit_s: float = 120.0) -> Any:
    ends_s = time.monotonic() + limit_s
    while not path.is_file():
        assert process.poll() is None
        assert time.monotonic() < ends_s
        time.sleep(0.1)
    return json.loads(path.read_text("utf-8"))


@pytest.mark.night
@pytest.mark.slow
def test_a_plain_run_that_fails_ends_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words(tmp_path, "--only", "plain", "--max_seq_length", "4000")) != EXIT_OK
    assert "the plain run failed" in capsys.readouterr().err


@pytest.mark.slow
def test_the_plain_run_is_that_of_whet_qa_with_the_same_options(tmp_path: Path) -> None:
    given = words(tmp_path, "--lora_r", "4", "--lora_alpha", "64", "--learning_rate", "0.05")
    assert run([*given, "--only", "plain"]) == EXIT_OK
    (plain,) = json.loads((tmp_path / "out/methods.json").read_text("utf-8"))["techniques"]
    own = {"--steps", "--warmup", "--rounds", "--output_dir"}
    kept = [word for n, word in enumerate(given[1:], 1) if word not in own and given[n - 1] not in own]
    steps = ["--max_steps", str(WARMUP + STEPS), "--logging_steps", "1", "--save_strategy", "no"]
    out = str(tmp_path / "qa")
    assert run(["qa", *kept, *steps, "--do_train", "--precision", "fp32", "--output_dir", out]) == EXIT_OK
    log = json.loads((tmp_path / "qa/trainer_state.json").read_text("utf-8"))["log_history"]
    assert plain["losses"] == [one["loss"] for one in log if "loss" in one]
    assert plain["peak_bytes"] > 0


@pytest.mark.parametrize(
    ("option", "what"),
    [
        (("--auto",), "chooses nothing"), (("--dry_run",), "forecasts nothing"), (("--seeds", "2"), "runs one seed"),
        (("--label_smoothing_factor", "0.1"), "label_smoothing_factor"),
    ],
)  # fmt: skip
def test_what_it_does_not_do_is_refused(
    option: tuple[str, ...], what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words(tmp_path, *option)) == EXIT_BAD_CONFIG
    assert what in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_unknown_technique_is_refused_with_the_nearest_name(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["bench-methods", "--model_name_or_path", "m", "--train_file", "t", "--only", "checkpointing_block"]
    assert run(given) == EXIT_BAD_CONFIG
    assert "did you mean --only checkpointing_blocks?" in capsys.readouterr().err


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench-methods", "--help", "all"]) == EXIT_OK
    shown = capsys.readouterr().out
    assert shown.startswith("Examples:\n  whet bench-methods --model_name_or_path")
    for flag in ("--only", "--skip", "--steps", "--rounds", "--warmup", "--limit_s", "--train_file", "--output_dir"):
        assert f"  {flag} " in shown
