"""What the README's first command leaves in a checkout does not trouble its second one."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]


def _git(*words: str, at: Path) -> str:
    return subprocess.run(["git", "-C", str(at), *words], capture_output=True, text=True, check=True).stdout


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A checkout of the files as they stand here."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    made = tmp_path / "clone"
    _git("clone", "--quiet", str(ROOT), str(made), at=ROOT)
    for name in _git("ls-files", "--modified", "--others", "--exclude-standard", at=ROOT).splitlines():
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, made / name)
    _git("add", "--all", at=made)
    return made


def test_checks_pass_after_runs_in_the_checkout(clone: Path) -> None:
    """The demo's folder, the README's `out`, and a name of the user's own."""
    for folder in ("whet-demo", "out", "my-own-model"):
        (clone / folder).mkdir()
        (clone / folder / "model.safetensors").write_bytes(b"\0" * 600_000)
        (clone / folder / "training_args.json").write_text('{"output_dir": "/home/' + 'ann/out"}', "utf-8")
    rules = ["tests/rules/test_tracked_text.py", "tests/rules/test_file_names.py"]
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest", *rules]
    done = subprocess.run(words, cwd=clone, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_demos_folder_is_ignored(clone: Path) -> None:
    (clone / "whet-demo").mkdir()
    (clone / "whet-demo" / "model.safetensors").touch()
    assert "whet-demo" not in _git("status", "--porcelain", at=clone)
