"""Frozen weights of 8 and 4 bits are refused with what saves memory instead; asking for none of it is accepted."""

from __future__ import annotations

from pathlib import Path

import pytest

from whet.cli.main import run
from whet.errors import EXIT_BAD_CONFIG


@pytest.mark.parametrize("flag", ["load_in_8bit", "load_in_4bit"])
@pytest.mark.parametrize("command", ["lm", "classify"])
def test_quantised_base_is_refused_with_a_way_that_works(
    command: str, flag: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = [command, "--model_name_or_path", "gpt2", "--output_dir", str(tmp_path / "out"), "--lora_r", "4"]
    assert run([*given, f"--{flag}"]) == EXIT_BAD_CONFIG
    said = capfd.readouterr().err
    assert flag in said
    assert "--gradient_checkpointing" in said
    run([*given, f"--{flag}", "false"])
    assert flag not in capfd.readouterr().err
