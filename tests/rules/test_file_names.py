"""Files are named for what they hold."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VAGUE_WORDS = {"util", "utils", "helper", "helpers", "common", "misc"}
SOURCES = [
    path.relative_to(ROOT).as_posix()
    for folder in ("src", "tests", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in {".py", ".cpp", ".c", ".h"}
]


def words(file: str) -> set[str]:
    """Return the words of a path, folders included."""
    return set(file.lower().replace(".", "/").replace("_", "/").split("/"))


def test_files_are_named_for_what_they_hold() -> None:
    assert SOURCES
    assert [file for file in SOURCES if words(file) & VAGUE_WORDS] == []
    assert words("src/whet/data_utils.py") & VAGUE_WORDS
