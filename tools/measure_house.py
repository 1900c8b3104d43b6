"""How deep the house is: sizes of files and functions, files with one reader, circles of rooms, what a command loads.

    python tools/measure_house.py                    # reads src/whet
    python tools/measure_house.py run qa --model_name_or_path M --train_file D ...   # watches a short training

A room is a folder of src/whet, or a folder in one. Imports are counted wherever they stand, also as a module's name
in a string. `run` prints the modules of whet that the command loaded, and the files and calls of whet in the third
optimizer step and in the first checkpoint; STEP and SAVE (module:function or module:Class.method) name them after a
move.
"""

from __future__ import annotations

import ast
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

HOME = Path(__file__).resolve().parents[1] / "src" / "whet"
STEP, SAVE = "whet.engine.loop:TrainingLoop.take_step", "whet.store.save:Saver.save"
Graph = Mapping[str, set[str]]


def modules() -> dict[str, ast.Module]:
    """Return the syntax tree of each module of whet, by its dotted name."""
    found = {}
    for path in sorted(HOME.rglob("*.py")):
        parts = ("whet", *path.relative_to(HOME).with_suffix("").parts)
        found[".".join(parts).removesuffix(".__init__")] = ast.parse(path.read_text("utf-8"))
    return found


def imports(trees: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    """Return which modules of whet each module reads."""
    return {name: set(_named(tree, trees.keys())) - {name} for name, tree in trees.items()}


def _named(tree: ast.Module, known: Any) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names if one.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            inside = [f"{node.module}.{one.name}" for one in node.names]
            yield from (one if one in known else node.module for one in inside if one in known or node.module in known)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in known:
            yield node.value


def lone(graph: Graph) -> list[str]:
    """Return the modules that one module of the same folder reads, and no other."""
    readers = defaultdict(set)
    for name, read in graph.items():
        for one in read:
            readers[one].add(name)
    return [
        name
        for name, found in sorted(readers.items())
        if len(found) == 1 and next(iter(found)).rpartition(".")[0] == name.rpartition(".")[0]
    ]


def circles(graph: Graph) -> dict[str, list[list[str]]]:
    """Return, for each folder, the groups of its rooms that reach each other in a circle."""
    folders = {name.rsplit(".", n)[0] for name in graph for n in range(1, name.count(".") + 1)}
    found = {}
    for folder in sorted(folders):
        rooms: dict[str, set[str]] = defaultdict(set)
        for name, read in graph.items():
            for one in read:
                here, there = _room(name, folder), _room(one, folder)
                if here and there and here != there:
                    rooms[here].add(there)
        if groups := _groups(rooms):
            found[folder] = groups
    return found


def _room(name: str, folder: str) -> str | None:
    return name[len(folder) + 1 :].split(".")[0] if name.startswith(folder + ".") else None


def _groups(edges: Mapping[str, set[str]]) -> list[list[str]]:
    reached = {one: _reached(one, edges) for one in edges}
    groups = {tuple(sorted(b for b in far if a in reached.get(b, ()))) for a, far in reached.items() if a in far}
    return [list(group) for group in sorted(groups)]


def _reached(start: str, edges: Mapping[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    left = [start]
    while left:
        for one in edges.get(left.pop(), set()) - seen:
            seen.add(one)
            left.append(one)
    return seen


def at(values: Sequence[int], share: float) -> int:
    """Return the value below which this share of the values lies."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def describe() -> None:
    """Print what the text of the house measures."""
    trees = modules()
    graph = imports(trees)
    files = [path.read_text("utf-8").count("\n") for path in HOME.rglob("*.py")]
    functions = [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    print(f"files {len(files)}, lines {sum(files):,}")
    print(f"lines of a file: median {at(files, 0.5)}, p90 {at(files, 0.9)}, most {max(files)}")
    print(f"lines of a function: median {at(functions, 0.5)}, p90 {at(functions, 0.9)}, most {max(functions)}")
    print(f"files that one sibling alone reads: {len(lone(graph))}")
    for folder, groups in circles(graph).items():
        for group in groups:
            print(f"circle in {folder}: {len(group)} rooms: {', '.join(group)}")
    docs = (HOME.parents[1] / "docs").rglob("*.md")
    print(f"words of docs: {sum(len(path.read_text('utf-8').split()) for path in docs):,}")


def watch(place: str, title: str, which: int) -> None:
    """Count the files and calls of whet inside of the `which`-th call of this function."""
    module, _, path = place.partition(":")
    owner: Any = import_module(module)
    *above, last = path.split(".")
    for name in above:
        owner = getattr(owner, name)
    plain: Callable[..., Any] = getattr(owner, last)
    n_calls = 0

    def watched(*given: Any, **named: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        if n_calls != which:
            return plain(*given, **named)
        seen: Counter[tuple[str, str]] = Counter()

        def note(frame: Any, event: str, _: Any) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(str(HOME)):
                seen[frame.f_code.co_filename, frame.f_code.co_qualname] += 1

        sys.setprofile(note)
        try:
            return plain(*given, **named)
        finally:
            sys.setprofile(None)
            print(f"{title}: {len({file for file, _ in seen})} files, {seen.total():,} calls", file=sys.stderr)

    setattr(owner, last, watched)


def run(words: list[str]) -> None:
    """Run a command of whet, and print what of whet it loaded and went through."""
    watch(os.environ.get("STEP", STEP), "third optimizer step", 3)
    watch(os.environ.get("SAVE", SAVE), "first checkpoint", 1)
    try:
        import_module("whet.cli.main").main(words)
    finally:
        files = {one.__file__ for name, one in sys.modules.items() if name.split(".")[0] == "whet" and one.__file__}
        lines = sum(Path(file).read_text("utf-8").count("\n") for file in files if file.endswith(".py"))
        print(f"modules of whet loaded: {len(files)}, {lines:,} lines", file=sys.stderr)


if __name__ == "__main__":
    run(sys.argv[2:]) if sys.argv[1:2] == ["run"] else describe()
