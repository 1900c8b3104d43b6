"""What `whet merge` leaves behind if its adapter is damaged, its disk is full, or its process is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from whet.cli.main import run
from whet.errors import EXIT_BAD_CONFIG, EXIT_IO

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


@pytest.fixture(scope="module")
def adapter(small_decoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    model = AutoModelForCausalLM.from_pretrained(small_decoder)
    peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])).save_pretrained(
        folder
    )
    return folder


@pytest.fixture(scope="module")
def found(adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """How merges of another process ended."""
    script, folder = Path(__file__).with_name("killed_merges.py"), tmp_path_factory.mktemp("merges")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(script), str(adapter), str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.reliability
def test_merge_that_was_killed_anywhere_is_repeated_by_the_same_command(found: dict[str, Any]) -> None:
    """Before it is repeated, the folder holds no weights, or all files of the model."""
    assert len(found["killed"]) > 3
    for merge in found["killed"]:
        assert merge["code"] == -9
        assert merge["again"] == 0, merge
        assert merge["files"] == found["plain"]
        if "model.safetensors" in merge["left"]:
            assert set(merge["files"]) <= set(merge["left"])
    assert any(set(merge["left"]) & set(merge["files"]) for merge in found["killed"])


@pytest.mark.reliability
def test_merge_to_a_full_disk_ends_with_74_and_leaves_nothing(found: dict[str, Any]) -> None:
    assert found["full"] == [{"code": EXIT_IO, "left": []}] * 3


def test_merge_to_a_folder_that_cannot_be_made_ends_with_74(
    adapter: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    assert run(["merge", str(adapter), "--output_dir", str(tmp_path / "file" / "merged")]) == EXIT_IO
    assert "--output_dir" in capfd.readouterr().err


@pytest.mark.parametrize("kept", [0, 7, 100, -10])
def test_merge_of_a_truncated_adapter_is_refused(
    kept: int, adapter: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    damaged = tmp_path / "adapter"
    damaged.mkdir()
    for path in adapter.iterdir():
        content = path.read_bytes()
        (damaged / path.name).write_bytes(content[:kept] if path.suffix == ".safetensors" else content)
    assert run(["merge", str(damaged), "--output_dir", str(tmp_path / "merged")]) == EXIT_BAD_CONFIG
    assert "adapter_model.safetensors" in capfd.readouterr().err
    assert not (tmp_path / "merged").exists()
