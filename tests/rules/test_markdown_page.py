"""The reading of pages itself: an example that is not found would not be tried."""

from pathlib import Path

import pytest
from documented_commands import check_command
from markdown_page import at_own_lines, blocks, commands

from whet.errors import ConfigError

PAGE = """# Title
```python
a = 1
```
In a list:
  ```bash no-run
  whet demo
  ```
```
plain
```
```python
b = a
```
"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    (tmp_path / "page.md").write_text(PAGE)
    return tmp_path / "page.md"


def test_blocks_are_found_with_line_language_and_text(page: Path) -> None:
    found = [(block.line, block.language, block.runs, block.text) for block in blocks(page)]
    assert found == [
        (3, "python", True, "a = 1\n"),
        (7, "bash", False, "whet demo\n"),
        (10, "", True, "plain\n"),
        (13, "python", True, "b = a\n"),
    ]


def test_scripts_keep_the_line_numbers_of_the_page(page: Path) -> None:
    script = at_own_lines([block for block in blocks(page) if block.language == "python"])
    assert [(n, line) for n, line in enumerate(script.splitlines(), start=1) if line] == [(3, "a = 1"), (13, "b = a")]


def test_a_block_without_end_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("```bash\nwhet demo\n")
    with pytest.raises(ValueError, match=r"page\.md:1"):
        blocks(tmp_path / "page.md")


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("whet demo  # comment", [["whet", "demo"]]),
        ("A=1 B='x y' whet qa \\\n  --bf16", [["whet", "qa", "--bf16"]]),
        ("cat a.txt | whet ask m --question 'Who; when?' > b", [["cat", "a.txt"],
         ["whet", "ask", "m", "--question", "Who; when?"], ["b"]]),
        ("cd x && make demo; ls", [["cd", "x"], ["make", "demo"], ["ls"]]),
    ],
)  # fmt: skip
def test_commands_are_found(script: str, expected: list[list[str]]) -> None:
    assert list(commands(script)) == expected


@pytest.mark.parametrize("words", ["whet train", "whet qa --no_such_flag 1", "mpirun -n 8 python -m whet qa --epochs"])
def test_a_command_that_whet_refuses_is_an_error(words: str) -> None:
    with pytest.raises(ConfigError):
        check_command(words.split())


def test_a_target_that_make_lacks_is_an_error() -> None:
    check_command(["make", "demo", "ARGS=--seed 7"])
    with pytest.raises(AssertionError, match="coffee"):
        check_command(["make", "coffee"])
