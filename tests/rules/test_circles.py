"""No circle of modules: every import counts, those under TYPE_CHECKING and inside functions too."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

_SRC = Path(__file__).resolve().parents[2] / "src"


def modules_in(source: Path) -> dict[str, str]:
    """Return the dotted name of each module below `source`, and its text."""
    return {
        ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__"): path.read_text("utf-8")
        for path in source.rglob("*.py")
    }


def imports_of(text: str, names: set[str]) -> set[str]:
    """Return those of the named modules that the text imports."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inside & names if inside <= names else {node.module, *(inside & names)}
    return found & names


def first_circle(modules: dict[str, str]) -> list[str] | None:
    """Return the modules of one circle, or None."""
    names = set(modules)
    try:
        TopologicalSorter({name: imports_of(text, names) - {name} for name, text in modules.items()}).prepare()
    except CycleError as error:
        return error.args[1]
    return None


def test_modules_import_each_other_in_no_circle() -> None:
    assert first_circle(modules_in(_SRC)) is None


@pytest.mark.parametrize(
    "second", ["from a.first import F", "if TYPE_CHECKING:\n    from a import first", "def f():\n    import a.first"]
)
def test_a_circle_is_found(second: str) -> None:
    circle = first_circle({"a": "", "a.first": "from a.second import S", "a.second": second})
    assert circle is not None
    assert {"a.first", "a.second"} <= set(circle)
