"""`whet bench-methods` as a user runs it, on a tiny model: table, JSON, picture, a technique that cannot run."""

from __future__ import annotations

import json
from pathlib import Path

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


@pytest.mark.slow
def test_the_table_is_printed_written_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words(tmp_path, "--only", "accumulation,tf32")) == EXIT_OK
    shown = capsys.readouterr().out
    told = json.loads((tmp_path / "out/methods.json").read_text("utf-8"))
    plain, tf32, split = told["techniques"]
    assert [plain["name"], tf32["name"], split["name"]] == ["plain", "tf32", "accumulation"]
    assert {"machine", "steps", "warmup", "rounds", "qa", "plain", "load_before"} <= told.keys()
    assert {"torch", "transformers", "whet", "processor", "torch_threads"} <= told["machine"].keys()
    for line in (plain, split):
        assert len(line["losses"]) == WARMUP + STEPS
        assert len(line["runs"][0]["step_s"]) == STEPS
        assert line["steps_per_s"] > 0
        assert line["peak_bytes"] > 0
    assert (split["equal_to"], split["equal"]) == ("plain", True)
    assert tf32["steps_per_s"] is None
    assert "tf32" in tf32["error"]
    assert "CANNOT RUN: tf32" in shown
    assert "less memory" in shown  # the guides' claim
    assert (tmp_path / "out/methods.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_plain_run_that_fails_ends_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words(tmp_path, "--only", "plain", "--max_seq_length", "4000")) != EXIT_OK
    assert "the plain run failed" in capsys.readouterr().err


def test_an_unknown_technique_is_refused_with_the_nearest_name(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["bench-methods", "--model_name_or_path", "m", "--train_file", "t", "--only", "checkpointing_block"]
    assert run(given) == EXIT_BAD_CONFIG
    assert "did you mean --only checkpointing_blocks?" in capsys.readouterr().err


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench-methods", "--help"]) == EXIT_OK
    shown = capsys.readouterr().out
    assert shown.startswith("Examples:\n  whet bench-methods --model_name_or_path")
    for flag in ("--only", "--skip", "--steps", "--rounds", "--warmup", "--limit_s", "--train_file", "--output_dir"):
        assert f"  {flag} " in shown
