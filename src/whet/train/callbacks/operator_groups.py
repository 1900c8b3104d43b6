"""Assigns operators to parts of a training step by their names."""

import re
from functools import cache
from typing import Literal, get_args

Group = Literal[
    "matrix products", "attention", "norms", "activations", "embedding", "loss", "optimizer", "data", "other"
]
GROUPS: tuple[Group, ...] = get_args(Group)
EXCLUSIVE: frozenset[Group] = frozenset(("optimizer", "data"))
"""Groups that include everything that runs inside them: a product in the optimizer counts as optimizer."""
NODE = "autograd::engine::evaluate_function: "
"""What the profiler puts before the name of a backward node."""

_PRODUCT = r"(^|_)(mm|bmm|addmm|baddbmm|addbmm|matmul|linear|einsum|addmv|mv)(_|$)|convolution|mkldnn|onednn|quant|int8"
_BY_NAME: tuple[tuple[Group, re.Pattern[str]], ...] = (
    ("optimizer", re.compile(r"^optimizer|accumulate_?grad|adam|grad_norm|zero_grad|foreach")),
    ("data", re.compile(r"^data$")),
    ("loss", re.compile(r"loss|cross_entropy|log_softmax")),
    ("attention", re.compile(r"attention|attend|softmax")),
    ("matrix products", re.compile(_PRODUCT)),
    ("activations", re.compile(r"activation|gelu|silu|relu|tanh|sigmoid|swish|mish|(bias|gated)_act")),
    ("norms", re.compile(r"norm(?!al)")),
    ("embedding", re.compile(r"embed")),
)
_BY_DEFAULT = re.compile(r"^(add|sub|rsub|(native_|feature_)?dropout|bernoulli|mean|var|pow|rsqrt)_?$")
"""Residuals, dropout and the pieces of a norm, unless the operator around them belongs to another group."""
_BY_CLASS: tuple[tuple[Group, re.Pattern[str]], ...] = (
    ("attention", re.compile(r"attention|rotary")),
    ("norms", re.compile(r"norm")),
    ("embedding", re.compile(r"embedding")),
    ("loss", re.compile(r"loss")),
    ("activations", re.compile(r"activation|gelu|silu|relu|mlp|feedforward|ffn")),
)


@cache
def group_of(name: str) -> Group | None:
    """Return the group of an operator by its name alone; None if it depends on what is around it.

    Knows torch's operators, its backward nodes (`AddmmBackward0`) and optimizers, and whet's own ranges (`whet::...`).
    """
    if name == "whet::scatter":  # the rows of the word table's gradient
        return "embedding"
    plain = _plain(name)
    return next((group for group, pattern in _BY_NAME if pattern.search(plain)), None)


@cache
def default_group(name: str) -> Group | None:
    """Return the group of an operator, such as an addition, if nothing around it decides."""
    return "norms" if _BY_DEFAULT.match(_plain(name)) else None


def group_of_class(name: str) -> Group | None:
    """Return the group of what a module of this class computes besides matrix products; None for containers."""
    return next((group for group, pattern in _BY_CLASS if pattern.search(name.lower())), None)


def is_backward(name: str) -> bool:
    """Return whether this is a node of the backward graph, which carries the number of its forward operator."""
    return name.startswith(NODE) or re.search(r"Backward\d*$", name) is not None


def _plain(name: str) -> str:
    """Return `AddmmBackward0` as `addmm`, `aten::add_` as `add_`; what belongs to oneDNN keeps its namespace."""
    space, _, last = name.removeprefix(NODE).rpartition("::")
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", re.sub(r"_?[Bb]ackward\d*$", "", last)).lower()
    return f"{space}_{words}" if space in ("mkldnn", "onednn") else words
