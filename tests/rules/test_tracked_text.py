"""What lies in the repository is for everybody: no paths of one machine, no names of package hosts, no large files."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_FILE_BYTES = 500_000
PRIVATE_PATH = re.compile(r"(?<![\w.~}])/(?:(?:home|Users)/\w+|(?:root|work|farm|tmp)/\w)")
# PyTorch's index of builds for CPUs may be named: without it, pip brings those for CUDA.
PACKAGE_HOST = re.compile(
    r"pypi\.org|pythonhosted\.org|download\.pytorch\.org(?!/whl/cpu\b)|npmjs\.(?:org|com)|\w+\.debian\.org|\w+\.ubuntu\.com"
    r"|anaconda\.(?:org|com)|crates\.io"
)


def breaches(text: str) -> list[str]:
    """Return each private path and each package host in the text, with its line."""
    return [
        f"line {number}: {found.group()}"
        for number, line in enumerate(text.splitlines(), start=1)
        for rule in (PRIVATE_PATH, PACKAGE_HOST)
        for found in rule.finditer(line)
    ]


@pytest.fixture(scope="module")
def tracked() -> list[Path]:
    """The files that git tracks or will commit next; a user's own runs in the checkout are not among them."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout, so nothing says which files belong to it")
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


def test_no_text_of_one_machine_is_tracked(tracked: list[Path]) -> None:
    found = {}
    for path in tracked:
        lines = breaches(path.read_text("utf-8", errors="replace"))
        if lines:
            found[path.relative_to(ROOT).as_posix()] = lines
    assert found == {}


def test_no_large_file_is_tracked(tracked: list[Path]) -> None:
    assert [path.name for path in tracked if path.stat().st_size > MOST_FILE_BYTES] == []


def test_the_rules_see_what_they_forbid() -> None:
    slash = "/"
    bad = [
        f"{slash}work{slash}x",
        f"({slash}home{slash}ann)",
        f"'{slash}tmp{slash}dev'",
        "https://pypi" + ".org/simple",
    ]
    assert len(breaches("\n".join(bad))) == len(bad)
    assert breaches("see docs/work/x, ~/work/x, $HOME/work/x and /dev/shm, or /tmp") == []
