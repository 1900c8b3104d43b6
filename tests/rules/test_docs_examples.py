"""Every example of the docs works: commands parse, scripts run, files are what they say (rules: CONTRIBUTING.md)."""

import ast
import json
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
BLOCKS = [block for page in PAGES for block in blocks(page)]
LANGUAGES = {"bash", "python", "yaml", "json", "text"}
_LIMIT_S = 300

_RUNNING = sorted({block.page for block in BLOCKS if block.runs and block.language in {"bash", "python"}})


def of_language(language: str, page: Path | None = None) -> list[Block]:
    """Return the blocks in that language, of one page or of all, in order."""
    return [block for block in BLOCKS if block.language == language and page in (None, block.page)]


def write_files(page: Path, folder: Path) -> None:
    """Write the files that the page's YAML blocks show into the folder."""
    for block in of_language("yaml", page):
        if block.file_name:
            (folder / block.file_name).write_text(block.text, "utf-8")


def test_the_first_page_has_examples() -> None:
    assert {block.language for block in BLOCKS if block.page == PAGES[0]} >= {"bash", "python"}


def test_blocks_say_what_they_are() -> None:
    """A block without a language, or in one that nothing here checks, would be an example that nobody tries."""
    assert [str(block) for block in BLOCKS if block.language not in LANGUAGES] == []


@pytest.mark.parametrize("page", sorted({block.page for block in of_language("bash")}), ids=lambda page: page.name)
def test_commands_parse(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(page, tmp_path)
    monkeypatch.chdir(tmp_path)
    for block in of_language("bash", page):
        for words in commands(block.text):
            try:
                check_command(words)
            except ConfigError as error:
                pytest.fail(f"{block}: {' '.join(words)}\n{error}")


def test_yaml_and_json_are_data() -> None:
    for block in of_language("yaml"):
        assert list(yaml.safe_load_all(block.text)), block
    for block in of_language("json"):
        assert json.loads(block.text) is not None, block


def test_python_compiles_and_what_is_not_run_can_import(tmp_path: Path) -> None:
    trees = {block: ast.parse(at_own_lines([block]), str(block.page)) for block in of_language("python")}
    not_run = [node for block, tree in trees.items() if not block.runs for node in ast.walk(tree)]
    imports = [node for node in not_run if isinstance(node, ast.Import | ast.ImportFrom)]
    if imports:
        run([sys.executable, "-c", "\n".join(map(ast.unparse, imports))], tmp_path)


@pytest.fixture(scope="session")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what examples name; a page works on a copy of it."""
    folder = tmp_path_factory.mktemp("stand-ins")
    write_stand_ins(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("page", _RUNNING, ids=lambda page: page.name)
def test_examples_run(page: Path, tmp_path: Path, stand_ins: Path) -> None:
    """First the shell blocks, in order, then the Python blocks as one script; all in one folder of stand-ins."""
    copytree(stand_ins, tmp_path, dirs_exist_ok=True)
    write_files(page, tmp_path)
    for block in of_language("bash", page):
        if block.runs:
            run(["bash", "-euxo", "pipefail", "-c", block.text], tmp_path)
    python = [block for block in of_language("python", page) if block.runs]
    if python:
        (tmp_path / "page.py").write_text(at_own_lines(python), "utf-8")
        run([sys.executable, "page.py"], tmp_path)


def test_an_example_that_fails_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no such thing"):
        run(["bash", "-c", "echo no such thing; exit 3"], tmp_path)


def run(command: list[str], folder: Path) -> None:
    """Run the command in the folder, with this environment's programs first and no network; fail with its output."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    offline = {"HF_HUB_OFFLINE": "1", "PIP_NO_INDEX": "1", "HF_HOME": str(folder / ".cache")}
    done = subprocess.run(
        command, cwd=folder, env=os.environ | offline | {"PATH": path}, stdin=subprocess.DEVNULL, check=False,
        timeout=_LIMIT_S, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
