"""Every example of the docs works: commands parse, scripts run, files are what they say (rules: CONTRIBUTING.md)."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree

import pytest
import yaml
from documented_commands import check_command
from markdown_page import Block, at_own_lines, blocks, commands
from warm_whet import Warm

from whet.errors import EXIT_BAD_CONFIG, ConfigError

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
    """Write the files that the page's YAML and JSON blocks show into the folder."""
    for block in (*of_language("yaml", page), *of_language("json", page)):
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
                if not block.refused:
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


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a `whet` that begins at once: importing torch again would be most of what an example takes."""
    folder = tmp_path_factory.mktemp("warm")
    made = Warm(folder, environment(folder))
    yield made.bin
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize("page", _RUNNING, ids=lambda page: page.name)
def test_examples_run(page: Path, tmp_path: Path, stand_ins: Path, warm: Path) -> None:
    """First the shell blocks, in order, then the Python blocks as one script; all in one folder of stand-ins."""
    _run_examples(page, tmp_path, stand_ins, warm)


@pytest.mark.gate
def test_examples_of_the_first_page_run_with_the_installed_program(tmp_path: Path, stand_ins: Path) -> None:
    """As a reader runs them."""
    _run_examples(PAGES[0], tmp_path, stand_ins)


def _run_examples(page: Path, tmp_path: Path, stand_ins: Path, *programs: Path) -> None:
    copytree(stand_ins, tmp_path, dirs_exist_ok=True)
    write_files(page, tmp_path)
    for block in of_language("bash", page):
        if block.runs:
            command = ["bash", "-euxo", "pipefail", "-c", block.text]
            check_output(block, run(command, tmp_path, *programs, expected=EXIT_BAD_CONFIG if block.refused else 0))
    python = [block for block in of_language("python", page) if block.runs]
    if python:
        (tmp_path / "page.py").write_text(at_own_lines(python), "utf-8")
        run([sys.executable, "page.py"], tmp_path)


def test_an_example_that_fails_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no such thing"):
        run(["bash", "-c", "echo no such thing; exit 3"], tmp_path)


@pytest.mark.slow
def test_an_example_that_whet_refuses_is_an_error(tmp_path: Path, warm: Path) -> None:
    with pytest.raises(AssertionError, match="no_such_option"):
        run(["bash", "-c", "whet qa --no_such_option 3"], tmp_path, warm)
    run(["bash", "-c", "whet qa --no_such_option 3 || test $? = 78"], tmp_path, warm)


def environment(folder: Path, *programs: Path) -> dict[str, str]:
    """Return the environment of an example: these and this environment's programs first, and no network."""
    path = os.pathsep.join([*map(str, programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    own = os.environ | {"OMP_WAIT_POLICY": "passive"}  # on a busy machine threads that spin keep each other waiting
    return own | {"HF_HUB_OFFLINE": "1", "PIP_NO_INDEX": "1", "PATH": path}


def check_output(block: Block, printed: str) -> None:
    """Check that the next block, if it shows the output of this one, shows lines that were printed, in order."""
    following = [other for other in BLOCKS if other.page == block.page and other.line > block.line][:1]
    for shown in following:
        if shown.is_output:
            assert shown.text in printed, f"{shown}: not in the output\n{printed}"


def run(command: list[str], folder: Path, *programs: Path, expected: int = 0) -> str:
    """Run the command in the folder and return its output; fail with it if the exit status is another one."""
    done = subprocess.run(
        command, cwd=folder, env=environment(folder, *programs), stdin=subprocess.DEVNULL, check=False,
        timeout=_LIMIT_S, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == expected, done.stdout[-4000:]
    return done.stdout
