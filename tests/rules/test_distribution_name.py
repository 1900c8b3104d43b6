"""Nothing tells a user to install the package that is named whet on package indexes: it is another project's."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from whet.optional import extra
from whet.version import DISTRIBUTION

ROOT = Path(__file__).resolve().parents[2]
_SOMEBODY_ELSES = (
    re.compile(
        r"\b(?:pip[\d.]*|pipx|uv|tool|conda)\s+(?:-\S+\s+)*(?:install|add)\s+(?:[^\s),;:`|&]+\s+)*['\"]?whet(?![\w.-]|'\w)"
    ),
    re.compile(r"--(?:from|with)[ =]['\"]?whet(?![\w.-])"),
    re.compile(r"['\"]whet\[[a-z]"),
    re.compile(r"\bwhet(?:==|>=|~=)\d"),
    re.compile(r"pypi\.org/(?:project|p)/whet\b(?!-)"),
)


def faults(text: str) -> list[str]:
    """Return the lines that name another project's package."""
    return [line.strip() for line in text.splitlines() if any(one.search(line) for one in _SOMEBODY_ELSES)]


def _texts() -> dict[str, str]:
    """Return every tracked text file of the repository but this one, by its path."""
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listed.split("\0") if name]
    read = {}
    for path in paths:
        if path.is_file() and path != Path(__file__) and path.suffix not in {".json", ".png", ".svg"}:
            read[path.relative_to(ROOT).as_posix()] = path.read_text("utf-8", errors="replace")
    return read


def test_no_text_installs_another_projects_package() -> None:
    texts = _texts()
    assert len(texts) > 500
    assert {name: lines for name, text in texts.items() if (lines := faults(text))} == {}


def test_the_name_is_the_one_that_is_built() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["name"] == DISTRIBUTION == "whet-train"
    assert list(project["scripts"]) == ["whet"]


@pytest.mark.parametrize("name", ["bitsandbytes", "torchao", "tag"])
def test_extras_that_messages_name_exist(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert name in project["optional-dependencies"]
    assert extra(name) == f"'whet-train[{name}]'"


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("pip install whet", "pip install whet-train"),
        ("run: pip install 'whet[tag]'", "run: pip install 'whet-train[tag]'"),
        ("pip install --force-reinstall --no-deps whet", "pip install --force-reinstall --no-deps whet-train"),
        ("uvx --from whet whet demo", "uvx --from whet-train whet demo"),
        ("uv add whet==0.1.0", "uv add whet-train==0.1.0"),
        ("ssh a 'venv/bin/pip install whet'; done", "ssh a 'venv/bin/pip install whet-train'; done"),
        ("install=\"'whet[torchao]'\"", "install=\"'whet-train[torchao]'\""),
        ("(pip install whet), or name the Python", "(pip install .), or name the Python that has whet"),
    ],
)
def test_the_rule_sees_what_it_forbids(wrong: str, right: str) -> None:
    assert faults(wrong) == [wrong]
    assert faults(right) == []
