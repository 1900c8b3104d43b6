"""No code from data: nothing in whet unpickles, evaluates text or hands text to a shell."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FORBIDDEN_MODULES = {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
FORBIDDEN_CALLS = {
    "eval": "runs text as code",
    "exec": "runs text as code",
    "torch.load": "unpickles; read safetensors",
    "yaml.load": "can build any object; use yaml.safe_load",
    "yaml.load_all": "can build any object; use yaml.safe_load_all",
    "yaml.unsafe_load": "can build any object; use yaml.safe_load",
    "yaml.full_load": "can build more than data; use yaml.safe_load",
    "os.system": "goes through a shell; use subprocess.run with a list",
    "os.popen": "goes through a shell; use subprocess.run with a list",
}
PICKLED_BETWEEN_RANKS = {
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
    "recv_object_list", "_object_to_tensor", "_tensor_to_object", "torch.distributed.checkpoint",
    "torch.distributed.rpc", "torch.distributed.checkpoint.state_dict", "check_tensor_meta",
}  # fmt: skip
"""Ranks would run what a program in a rank's place sends: whet.dist.messages sends JSON and arrays."""
FORBIDDEN_TRUE = {
    "shell": "goes through a shell; pass a list",
    "allow_pickle": "unpickles",
    "trust_remote_code": "runs code that comes with a model",
}


def dotted(node: ast.expr) -> str:
    """Return `a.b.c` for such an expression, and nothing for any other."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := dotted(node.value)):
        return f"{owner}.{node.attr}"
    return ""


def breaches(source: str) -> Iterator[str]:
    """Yield one line for each forbidden import or call, whatever name it was imported under."""
    tree = ast.parse(source)
    real_names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for bound, real in _imported(node):
                real_names[bound] = real
                if real.split(".")[0] in FORBIDDEN_MODULES:
                    yield f"line {node.lineno}: imports {real}, which runs code from data"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from _forbidden(node, real_names)
        yield from _pickled(node)


def _pickled(node: ast.AST) -> Iterator[str]:
    """Yield the names of torch's object collectives, of accelerate's, and of what is built on them."""
    names: list[str] = []
    if isinstance(node, ast.ImportFrom):
        names = [
            str(node.module),
            *(f"{node.module}.{one.name}" for one in node.names),
            *(one.name for one in node.names),
        ]
    elif isinstance(node, ast.Import):
        names = [one.name for one in node.names]
    elif isinstance(node, ast.Attribute):
        names = [node.attr, dotted(node)]
    elif isinstance(node, ast.Name):
        names = [node.id]
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        names = [node.value]
    if found := PICKLED_BETWEEN_RANKS.intersection(names):
        yield f"line {getattr(node, 'lineno', 0)}: {min(found)} unpickles what other ranks send; use whet.dist.messages"


def _imported(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    for alias in node.names:
        real = alias.name if isinstance(node, ast.Import) else f"{node.module}.{alias.name}"
        yield alias.asname or alias.name, real


def _forbidden(call: ast.Call, real_names: dict[str, str]) -> Iterator[str]:
    first, _, rest = dotted(call.func).partition(".")
    real = real_names.get(first, first) + (f".{rest}" if rest else "")
    if real in FORBIDDEN_CALLS:
        yield f"line {call.lineno}: {real} {FORBIDDEN_CALLS[real]}"
    for keyword in call.keywords:
        is_true = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
        if keyword.arg in FORBIDDEN_TRUE and is_true:
            yield f"line {call.lineno}: {keyword.arg}=True {FORBIDDEN_TRUE[keyword.arg]}"


def test_no_code_comes_from_data() -> None:
    files = sorted((ROOT / "src").rglob("*.py"))
    found = {path.relative_to(ROOT).as_posix(): list(breaches(path.read_text("utf-8"))) for path in files}
    assert {file: lines for file, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "def f():\n    import torch as t\n    t.load('x')",
        "from torch import load as read\nread('x')",
        "import yaml\nyaml.load('x', Loader=None)",
        "eval('1')",
        "exec('1')",
        "import subprocess\nsubprocess.run('ls', shell=True)",
        "import os\nos.system('ls')",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "AutoModel.from_pretrained('x', trust_remote_code=True)",
        "import torch.distributed as d\nd.all_gather_object(found, 1)",
        "from torch.distributed import broadcast_object_list as send",
        "accelerate().utils.gather_object([1])",
        "getattr(d, 'scatter_object_list')(found)",
        "import torch.distributed.checkpoint as dcp",
        "from torch.distributed import checkpoint",
    ],
)
def test_the_rule_sees_what_it_forbids(source: str) -> None:
    assert len(list(breaches(source))) == 1


def test_the_rule_lets_look_alikes_pass() -> None:
    assert list(breaches("import json, yaml\nmodel.eval()\njson.load(f)\nyaml.safe_load(f)\nrun(a, shell=False)")) == []


def test_processes_of_whet_do_not_look_into_the_current_folder() -> None:
    """`python -m` and `-c` put it before Python's own modules; `system.python` does not."""
    found = []
    for path in sorted((ROOT / "src" / "whet").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.List) or len(node.elts) < 2 or dotted(node.elts[0]) != "sys.executable":
                continue
            option = node.elts[1]
            if isinstance(option, ast.Constant) and str(option.value).startswith("-"):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert [one for one in found if "jobs/bundle.py" not in one] == [], "pip runs in a new folder"
