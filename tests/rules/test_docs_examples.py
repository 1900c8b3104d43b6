"""Every example of the docs works: commands parse, scripts run, files are what they say (rules: CONTRIBUTING.md)."""

import ast
import os
import subprocess
import sys
from pathlib import Path
from shutil import copytree

import pytest
import yaml

from documented_commands import check_command
from markdown_page import Block, at_own_lines, blocks, commands
from stand_ins import write_stand_ins
from whet.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = {"bash", "python", "yaml", "json", "text"}
_LIMIT_S = 300

on_every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


@pytest.fixture(scope="session")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what examples name; a page works on a copy of it."""
    folder = tmp_path_factory.mktemp("stand-ins")
    write_stand_ins(folder)
    return folder


def of_language(page: Path, language: str) -> list[Block]:
    """Return the page's blocks in that language."""
    return [block for block in blocks(page) if block.language == language]


def write_files(page: Path, folder: Path) -> None:
    """Write the files that the page's YAML blocks show into the folder."""
    for block in of_language(page, "yaml"):
        if block.file_name:
            (folder / block.file_name).write_text(block.text, "utf-8")


@on_every_page
def test_blocks_say_what_they_are(page: Path) -> None:
    """A block without a language, or in one that nothing here checks, would be an example that nobody tries."""
    assert [str(block) for block in blocks(page) if block.language not in LANGUAGES] == []


@on_every_page
def test_commands_parse(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(page, tmp_path)
    monkeypatch.chdir(tmp_path)
    for block in of_language(page, "bash"):
        for words in commands(block.text):
            try:
                check_command(words)
            except ConfigError as error:
                pytest.fail(f"{block}: {' '.join(words)}\n{error}")


@on_every_page
def test_yaml_is_data(page: Path) -> None:
    for block in of_language(page, "yaml"):
        assert list(yaml.safe_load_all(block.text)), block


@on_every_page
def test_python_compiles_and_what_is_not_run_can_import(page: Path) -> None:
    trees = {block: ast.parse(at_own_lines([block]), str(page)) for block in of_language(page, "python")}
    not_run = [node for block, tree in trees.items() if not block.runs for node in ast.walk(tree)]
    imports = [node for node in not_run if isinstance(node, ast.Import | ast.ImportFrom)]
    if imports:
        run([sys.executable, "-c", "\n".join(map(ast.unparse, imports))], ROOT)


@pytest.mark.slow
@on_every_page
def test_examples_run(page: Path, tmp_path: Path, stand_ins: Path) -> None:
    """First the shell blocks, in order, then the Python blocks as one script; all in one folder of stand-ins."""
    shell = [block for block in of_language(page, "bash") if block.runs]
    python = [block for block in of_language(page, "python") if block.runs]
    if not shell and not python:
        return
    copytree(stand_ins, tmp_path, dirs_exist_ok=True)
    write_files(page, tmp_path)
    for block in shell:
        run(["bash", "-euxo", "pipefail", "-c", block.text], tmp_path)
    if python:
        (tmp_path / "page.py").write_text(at_own_lines(python), "utf-8")
        run([sys.executable, "page.py"], tmp_path)


def run(command: list[str], folder: Path) -> None:
    """Run the command in the folder, with this environment's programs first and no network; fail with its output."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    offline = {"HF_HUB_OFFLINE": "1", "PIP_NO_INDEX": "1", "HF_HOME": str(folder / ".cache")}
    done = subprocess.run(
        command, cwd=folder, env=os.environ | offline | {"PATH": path}, stdin=subprocess.DEVNULL, check=False,
        timeout=_LIMIT_S, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]


def test_an_example_that_fails_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no such thing"):
        run(["bash", "-c", "echo no such thing; exit 3"], tmp_path)
