"""The picture of two loss curves is made from what runs have logged."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

CURVE = Path(__file__).resolve().parents[2] / "benchmarks" / "xquad" / "curve.py"
PNG = b"\x89PNG\r\n\x1a\n"


def run_folder(folder: Path, losses: dict[int, float]) -> Path:
    """Return a folder as a run leaves it: training losses between an evaluation and the figures of the end."""
    history = [{"step": step, "loss": loss, "learning_rate": 1e-4} for step, loss in losses.items()]
    history += [{"step": 30, "eval_f1": 50.0}, {"step": 30, "train_loss": 9.0}]
    folder.mkdir()
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": history}), "utf-8")
    return folder


@pytest.fixture
def curve(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """The script, which takes its words."""
    pytest.importorskip("matplotlib")
    main = runpy.run_path(str(CURVE))["main"]

    def run(*words: str | Path) -> None:
        monkeypatch.setattr(sys, "argv", ["curve.py", *map(str, words)])
        main()

    return run


def test_two_runs_make_a_picture_and_their_distance_is_told(
    curve: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fp32 = run_folder(tmp_path / "fp32", {10: 4.0, 20: 2.0, 30: 1.0})
    int8 = run_folder(tmp_path / "int8", {10: 4.0, 20: 2.1, 30: 0.9})
    curve("--fp32", fp32, "--int8", int8, "--output", tmp_path / "curve.png")
    assert "5.0% from fp32's loss on average, 10.0% at most" in capsys.readouterr().out
    assert (tmp_path / "curve.png").read_bytes().startswith(PNG)


def test_runs_that_cannot_be_compared_are_refused(
    curve: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fp32 = run_folder(tmp_path / "fp32", {10: 4.0})
    other_steps, silent = run_folder(tmp_path / "other", {7: 4.0}), run_folder(tmp_path / "silent", {})
    for int8, said in (([other_steps], "--logging_steps"), ([silent], "no training loss"), ([fp32] * 2, "in pairs")):
        with pytest.raises(SystemExit) as ended:
            curve("--fp32", fp32, "--int8", *int8, "--output", tmp_path / "curve.png")
        assert said in f"{ended.value} {capsys.readouterr().err}"
    assert not (tmp_path / "curve.png").exists()
