"""Another package named whet, as package indexes have one: it is named, instead of failing far away."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import whet
import whet_train
from whet.version import DISTRIBUTION, __version__

pytestmark = pytest.mark.true_start
SRC = Path(whet.__file__).parents[1]
INSTALLED = Path(sysconfig.get_paths()["purelib"])


def _python(*words: str, path: list[Path], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run Python with these folders, and without the files of an editable installation, which come before all."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    words = ("-S", *words)
    return subprocess.run([sys.executable, *words], env=env, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    (tmp_path / "elsewhere").mkdir()
    return tmp_path / "elsewhere"


@pytest.mark.parametrize("name", ["whet/__init__.py", "whet.py"])
def test_the_command_names_a_package_that_is_in_the_way(name: str, elsewhere: Path, tmp_path: Path) -> None:
    other = elsewhere / name
    other.parent.mkdir(exist_ok=True)
    other.write_text("raise SystemExit('the other one ran')", "utf-8")
    done = _python("-m", "whet_train", "--version", path=[elsewhere, SRC, INSTALLED], cwd=tmp_path)
    assert done.returncode == 78
    assert str(other) in done.stderr
    assert f"pip install --force-reinstall --no-deps {DISTRIBUTION}" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_missing_package_is_named(elsewhere: Path) -> None:
    (elsewhere / "whet_train").symlink_to(Path(whet_train.__file__).parent)
    done = _python("-m", "whet_train", path=[elsewhere], cwd=elsewhere)
    assert (done.returncode, done.stdout) == (78, "")
    assert "no package of this name" in done.stderr


def test_the_command_runs_its_own_package_next_to_a_folder_of_that_name(elsewhere: Path) -> None:
    """Such as a clone of the project: a folder without Python in it is no package."""
    (elsewhere / "whet").mkdir()
    done = _python("-m", "whet_train", "--version", path=[elsewhere, SRC, INSTALLED], cwd=elsewhere)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"whet {__version__}\n", "")


def test_an_import_refuses_files_that_are_mixed_with_the_other_project_s(elsewhere: Path) -> None:
    (elsewhere / "whet").symlink_to(SRC / "whet")
    (elsewhere / "whet_train-1.0.dist-info").mkdir()
    assert _python("-c", "import whet", path=[elsewhere], cwd=elsewhere).returncode == 0
    (elsewhere / "whet-9.9.dist-info").mkdir()
    done = _python("-c", "import whet", path=[elsewhere], cwd=elsewhere)
    assert done.returncode == 1
    assert "ImportError: files of whet-train and of another project's package are mixed" in done.stderr
    assert "whet-9.9.dist-info" in done.stderr
