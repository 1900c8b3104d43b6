"""Files, functions and signatures stay small enough to be read in one go."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST_FILE_LINES = 400
MOST_FUNCTION_LINES = 50
MOST_PARAMETERS = 6
VAGUE_WORDS = {"util", "utils", "helper", "helpers", "common", "misc"}
WIDE_ON_PURPOSE = {
    "src/whet/kernels/products/low_rank.py: _LowRank.forward": "a Function of torch takes its tensors one by one",
    "src/whet/kernels/torch_ops/norm.py: add_norm": "an operator of torch takes no objects",
    "src/whet/kernels/torch_ops/norm.py: add_norm_backward": "an operator of torch takes no objects",
    "src/whet/kernels/torch_ops/attention.py: _spec": "an operator of torch takes no objects",
    "src/whet/kernels/torch_ops/attention.py: attention": "an operator of torch takes no objects",
    "src/whet/kernels/torch_ops/attention.py: attention_backward": "an operator of torch takes no objects",
    "src/whet/train/compat/methods.py: TransformersMethods.create_model_card": "takes what transformers' Trainer takes",
    "src/whet/train/compat/methods.py: TransformersMethods.hyperparameter_search": "as in transformers",
    "src/whet/train/trainer.py: Trainer.__init__": "takes what transformers' Trainer takes",
}
"""Functions that may take more parameters, with the reason."""

PYTHON = {
    path.relative_to(ROOT).as_posix(): path.read_text("utf-8")
    for folder in ("src", "tests", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
}
NATIVE = {
    path.relative_to(ROOT).as_posix(): path.read_text("utf-8")
    for path in sorted((ROOT / "src").rglob("*"))
    if path.suffix in {".cpp", ".c", ".h"}
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST, within: str = "") -> Iterator[tuple[str, Function]]:
    """Yield every function of the tree with its dotted name."""
    for node in ast.iter_child_nodes(tree):
        named = isinstance(node, ast.ClassDef | Function)
        name = f"{within}{node.name}" if named else within
        if isinstance(node, Function):
            yield name, node
        yield from functions(node, f"{name}." if named else within)


def n_lines(function: Function) -> int:
    """Return how many lines the function has, docstring included, decorators not."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def n_parameters(function: Function) -> int:
    """Return how many parameters a caller of the function meets: all but self, cls and autograd's ctx."""
    args = function.args
    names = [arg.arg for arg in [*args.posonlyargs, *args.args, *args.kwonlyargs]]
    names += [arg.arg for arg in (args.vararg, args.kwarg) if arg]
    return len(names) - (names[:1] in (["self"], ["cls"], ["ctx"]))


def too_long(file: str, source: str) -> list[str]:
    """Return the functions with too many lines, and where they begin."""
    found = [(name, one.lineno, n_lines(one)) for name, one in functions(ast.parse(source))]
    return [f"{file}:{start}: {name} has {count} lines" for name, start, count in found if count > MOST_FUNCTION_LINES]


def too_wide(file: str, source: str) -> list[str]:
    """Return the functions with too many parameters."""
    found = functions(ast.parse(source))
    return [f"{file}: {name}" for name, one in found if n_parameters(one) > MOST_PARAMETERS]


def test_files_are_short() -> None:
    lines = {file: len(source.splitlines()) for file, source in {**PYTHON, **NATIVE}.items()}
    assert {file: count for file, count in lines.items() if count > MOST_FILE_LINES} == {}


def test_functions_are_short() -> None:
    assert [place for file, source in PYTHON.items() for place in too_long(file, source)] == []


def test_functions_take_few_parameters() -> None:
    """Pass a config object, or give the reason in WIDE_ON_PURPOSE; what is no longer wide is taken off that list."""
    wide = {place for file, source in PYTHON.items() for place in too_wide(file, source)}
    assert wide == set(WIDE_ON_PURPOSE)


def test_files_are_named_for_what_they_hold() -> None:
    names = {file: set(file.lower().replace(".", "/").replace("_", "/").split("/")) for file in {**PYTHON, **NATIVE}}
    assert [file for file, words in names.items() if words & VAGUE_WORDS] == []


def test_the_rules_see_what_they_forbid() -> None:
    long = "class A:\n    def f(self):\n" + "        pass\n" * MOST_FUNCTION_LINES
    assert too_long("a.py", long) == ["a.py:2: A.f has 51 lines"]
    assert too_wide("a.py", "def outer():\n    def f(a, b, /, c, *d, e, f, **g): pass") == ["a.py: outer.f"]
    assert too_wide("a.py", "class A:\n    def f(self, a, b, c, d, e, f): pass") == []
