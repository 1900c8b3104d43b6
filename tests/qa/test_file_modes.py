"""Every file that a run leaves has the mode that the umask gives new files: another user can load a model."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_qa import command, save_encoder, squad, write_json

from whet.cli.main import run


@pytest.fixture(params=[0o022, 0o027, 0o077], ids=oct)
def mode(request: pytest.FixtureRequest) -> Iterator[int]:
    """Set a umask; the mode that files get under it."""
    before = os.umask(request.param)
    yield 0o666 & ~request.param
    os.umask(before)


def test_every_file_of_a_run_follows_the_umask(mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save_encoder(tmp_path / "encoder")
    data = write_json(tmp_path / "data.json", squad())
    flags = ("--do_train", "--do_eval", "--do_predict")
    files = {"train_file": data, "validation_file": data, "test_file": data}
    assert (
        run(
            command(
                tmp_path / "encoder",
                tmp_path / "out",
                *flags,
                max_steps=2,
                save_strategy="steps",
                save_steps=1,
                **files,
            )
        )
        == 0
    )
    made = [path for top in ("out", "cache") for path in (tmp_path / top).rglob("*") if path.is_file()]
    assert {"model.safetensors", "optimizer.safetensors", "MANIFEST.json", "tokenizer.json"} <= {p.name for p in made}
    assert any(path.name.startswith("windows-") for path in made)
    other = {str(path.relative_to(tmp_path)): oct(path.stat().st_mode) for path in made if _mode(path) != mode}
    assert {name: found for name, found in other.items() if not name.endswith(".lock")} == {}


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)
