"""`whet demo-lm`: it runs again in its own folder, and replaces nobody's work."""

from __future__ import annotations

from pathlib import Path

import pytest

from whet.errors import ConfigError
from whet.tasks.lm.demo import run_demo
from whet.tasks.lm.demo_arguments import DemoLmArguments


def test_demo_learns_prints_a_text_and_runs_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo = DemoLmArguments(output_dir=str(tmp_path / "demo"), max_steps=30)
    for _ in range(2):
        assert run_demo(demo) == 0
        said = " ".join(capsys.readouterr().out.split())
        before, after = said.partition("perplexity before training ")[2].split(", after ")
        assert int(after.split()[0].replace(",", "")) < int(before.replace(",", ""))
        assert "whet generate" in said


def test_demo_keeps_checkpoints_and_files_of_others(tmp_path: Path) -> None:
    demo = DemoLmArguments(output_dir=str(tmp_path / "demo"), max_steps=2)
    run_demo(demo)
    (tmp_path / "demo" / "checkpoint-00000002").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine", "utf-8")
    for name in ("demo", "other"):
        with pytest.raises(ConfigError, match="not of a demo"):
            run_demo(DemoLmArguments(output_dir=str(tmp_path / name), max_steps=2))
    assert (tmp_path / "demo" / "checkpoint-00000002").exists()
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["notes.txt"]
