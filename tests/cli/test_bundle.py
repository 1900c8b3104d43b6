"""`whet bundle`: one file with everything, which installs and trains where there is no network."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
from importlib import metadata
from pathlib import Path

import pytest
from tiny_qa import save_encoder

from text_tasks import topic_rows, write_csv
from whet.cli.main import run
from whet.errors import OutputError
from whet.jobs import bundle


def test_packages_are_those_that_pip_finds_needed() -> None:
    found = bundle.needed([])
    assert {"torch", "transformers", "safetensors", "typing-extensions", "markupsafe"} <= found.keys()
    assert "whet-train" not in found
    assert "tensorboard" not in found, "of an extra that is not asked for"
    assert "tensorboard" in bundle.needed(["tensorboard"])
    assert all(metadata.version(name) == version for name, version in found.items())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no file is named"),
        (["out.tar", "--extras", "embed,speed"], "got: speed"),
        (["out.tar", "--model_name_or_path", "a/b/c"], "no such folder"),
        (["there.tar"], "the file exists"),
    ],
)
def test_what_cannot_be_is_refused_before_any_download(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bundle, "collect_wheels", lambda *_: pytest.fail("a download"))
    (tmp_path / "there.tar").write_text("mine", "utf-8")
    code = run(["bundle", *words])
    assert code in (78, OutputError.exit_code)
    assert said in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there.tar"]
    assert (tmp_path / "there.tar").read_text("utf-8") == "mine"


@pytest.fixture
def unpacked(tmp_path: Path) -> Path:
    """A bundle of one small file, which is written twice."""
    root = tmp_path / "whet-1"
    (root / "wheels").mkdir(parents=True)
    (root / "wheels" / "a.whl").write_text("a", "utf-8")
    bundle.write_script(root, "tiny")
    bundle.write_sums(root)
    sizes = [bundle.pack(root, tmp_path / name) for name in ("one.tar", "two.tar")]
    assert sizes[0] == sizes[1]
    assert (tmp_path / "one.tar").read_bytes() == (tmp_path / "two.tar").read_bytes()
    with tarfile.open(tmp_path / "one.tar") as archive:
        archive.extractall(tmp_path / "there", filter="data")
    return tmp_path / "there" / "whet-1"


def _install(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    words = ["sh", str(folder / "install.sh"), str(folder.parent / "venv")]
    return subprocess.run(words, env=os.environ | variables, capture_output=True, text=True, check=False)


def test_a_damaged_file_ends_the_installation(unpacked: Path) -> None:
    (unpacked / "wheels" / "a.whl").write_text("b", "utf-8")
    done = _install(unpacked, PYTHON=sys.executable)
    assert done.returncode != 0
    assert "wheels/a.whl" in done.stdout + done.stderr
    assert not (unpacked.parent / "venv").exists()


def test_another_python_is_named(unpacked: Path) -> None:
    other = unpacked.parent / "python4"
    other.write_text("#!/bin/sh\necho '4.0 abacus'\n", "utf-8")
    other.chmod(0o755)
    done = _install(unpacked, PYTHON=str(other))
    assert done.returncode == 1
    wanted = f"Python {sys.version_info[0]}.{sys.version_info[1]} on {platform.machine()}"
    assert f"these wheels are for {wanted}, and {other} is 4.0 abacus" in done.stderr
    assert not (unpacked.parent / "venv").exists()


@pytest.mark.gate
@pytest.mark.true_start
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare, which takes the network away")
def test_a_bundle_installs_and_trains_without_a_network(tmp_path: Path) -> None:
    """The real wheels: some 400 MB, and two minutes."""
    save_encoder(tmp_path / "tiny")
    words = [sys.executable, "-m", "whet", "bundle", "w.tar", "--model_name_or_path", "tiny", "--json"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["packages"]["torch"] == metadata.version("torch")
    (tmp_path / "there").mkdir()
    shutil.move(tmp_path / "w.tar", tmp_path / "there")
    with tarfile.open(tmp_path / "there" / "w.tar") as archive:
        archive.extractall(tmp_path / "there", filter="data")
    (root,) = (tmp_path / "there").glob("whet-*/")
    alone = ["unshare", "--map-root-user", "--net"]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    env |= {"PYTHON": sys.executable, "PATH": os.defpath}
    subprocess.run([*alone, "sh", str(root / "install.sh")], env=env, check=True, capture_output=True)
    write_csv(tmp_path / "rows.csv", topic_rows())
    model = ["--model_name_or_path", str(root / "models" / "tiny"), "--max_seq_length", "24"]
    train = ["classify", *model, "--train_file", "rows.csv", "--do_train", "--output_dir", "out", "--max_steps", "2"]
    done = subprocess.run(
        [*alone, str(root / "venv" / "bin" / "whet"), *train], env=env, cwd=tmp_path, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "model.safetensors").exists()
