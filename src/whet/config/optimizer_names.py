"""The optimizers that `--optim` names, without torch: the rows of `optim/optimizers/`, plug-ins, and other packages.

Each file of that folder ends with its rows, the constant OPTIMIZERS. Help texts, refusals and rules read what a row
says in plain constants from the source (`plugins.py`), as to import the file would import torch.
"""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from whet import plugins
from whet.config.values import expected, read
from whet.errors import Problem
from whet.optional import extra, is_installed

ENTRY_POINTS = "whet.optimizers"
"""Entry point group for optimizers of other packages: name = "module:function", called with (model, args, options)."""
PACKAGE = "whet.optim.optimizers"
"""Where the files of the optimizers are."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """What is known of an optimizer without torch. In the source, each value is a plain constant."""

    name: str
    rule: str
    """The rule of its updates: AdamW, Lion ..."""
    does: str
    """What it is, in one sentence without a full stop, for `--help` and the table of docs/memory.md."""
    source: str
    """The paper and its algorithm, or the library."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of it -> what to log for a run that uses one; empty: nothing."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Its optim_args -> int, float, bool or the choices: "original|match_rms_adamw"."""
    betas: bool = False
    """Whether it reads adam_beta1 and adam_beta2."""
    epsilon: bool = False
    """Whether it reads adam_epsilon."""
    reads: Literal["element", "tensor"] = "tensor"
    """What it reads to update an element: that element and its state, or the complete tensor. Only "element" works from
    ZeRO's stage 2 on, and in DeepSpeed's engine."""
    moments: int = 0
    """How many tensors of its state are as wide as the weight; an entry may count the bytes of its state itself."""
    scalars: int = 0
    """How many float32 numbers its state has for each tensor of weights, such as the count of steps."""
    on_cpu: bool = False
    """Whether it updates weights on a CPU alone, of 32 or 16 bits."""
    package: str = ""
    """The package that it needs; empty: none besides torch."""
    installed_by: str = ""
    """The extra of whet that installs the package; empty: it has to be built from source."""
    instead: str = ""
    """The optimizer to use where this one does not work, by name."""
    replaces: str = ""
    """The package that transformers asks for under this name, and whet does not need."""
    claim: str = ""
    """What guides say about its speed and memory, for `whet bench-methods`."""

    @property
    def option_kinds(self) -> dict[str, Any]:
        """Return the annotation of each of its optim_args."""
        return {key: _KINDS.get(kind) or _CHOICE[tuple(kind.split("|"))] for key, kind in self.options.items()}


_KINDS: Mapping[str, Any] = {"int": int, "float": float, "bool": bool}
_CHOICE: Any = Literal
_CONSTANTS = {one.name for one in fields(Row)}
DEFAULT = "auto"


@cache
def rows() -> Sequence[Row]:
    """Return the row of each optimizer that whet builds: `auto` first, then by the alphabet."""
    found = [row for module in _files() for row in _rows_in(module)]
    return sorted(found, key=lambda row: (row.name != DEFAULT, row.name))


@cache
def module_of(name: str) -> str:
    """Return the module of the package that has the row of this name, which is no alias."""
    return next(module for module in _files() if any(row.name == name for row in _rows_in(module)))


def _files() -> Mapping[str, Any]:
    return plugins.constants(PACKAGE, "OPTIMIZERS")


@cache
def _rows_in(module: str) -> list[Row]:
    """Return the rows in a source file: `OPTIMIZERS = (Entry(...), ...)`; what is no constant is the optimizer's code.

    Raises ValueError, with the module, for rows of another form.
    """
    try:
        return [
            Row(**{one.arg: ast.literal_eval(one.value) for one in call.keywords if one.arg in _CONSTANTS})
            for call in _files()[module].elts
        ]
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{PACKAGE}.{module}: OPTIMIZERS is a tuple of Entry(...), whose texts and numbers are literals"
        ) from error


@cache
def names() -> Mapping[str, Row]:
    """Return the row of each name that whet builds, aliases among them."""
    found: dict[str, Row] = {}
    for row in rows():
        for name in (row.name, *row.aliases):
            assert name not in found, f"two rows of optimizers have the name {name}"
            found[name] = row
    return found


def by_element() -> list[str]:
    """Return the names of the optimizers that update each element by itself."""
    return [name for name, row in names().items() if row.reads == "element"]


def listing() -> str:
    """Return the optimizers in words, for a help text."""
    shown = [f"{' or '.join((row.name, *row.aliases))} ({row.does})" for row in rows()]
    return f"{', '.join(shown)}, or the name of a plug-in."


_BITSANDBYTES = "paged_adamw_32bit paged_adamw_8bit ademamix ademamix_8bit paged_ademamix_32bit paged_ademamix_8bit \
    lion_8bit paged_lion_32bit paged_lion_8bit rmsprop_bnb rmsprop_bnb_8bit rmsprop_bnb_32bit"
_GALORE = "galore_adamw galore_adamw_8bit galore_adafactor galore_adamw_layerwise galore_adamw_8bit_layerwise \
    galore_adafactor_layerwise"
_PACKAGES = {
    "bitsandbytes": _BITSANDBYTES,
    "galore-torch": _GALORE,
    "apollo-torch": "apollo_adamw apollo_adamw_layerwise",
    "lomo-optim": "lomo adalomo",
    "grokadamw": "grokadamw",
    "schedulefree": "schedule_free_radam schedule_free_adamw schedule_free_sgd",
    "torch-optimi": "stable_adamw",
    "torch_xla": "adamw_torch_xla",
    "torch_npu": "adamw_torch_npu_fused",
}
ELSEWHERE: Mapping[str, str] = {name: package for package, names in _PACKAGES.items() for name in names.split()}
"""Optimizers of transformers that whet does not build -> the package that has them."""


@cache
def plugged_in() -> Mapping[str, EntryPoint]:
    """Return the optimizers that installed packages offer, by name."""
    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}


def missing_package(optim: str) -> Problem | None:
    """Return a problem if this optimizer needs a package that is not installed."""
    row = names().get(optim)
    if row is None or not row.package or is_installed(row.package):
        return None
    install = f"run: pip install {extra(row.installed_by)}; or " if row.installed_by else ""
    return Problem(
        what=f"the package {row.package!r} is missing",
        got=f"--optim {optim}",
        why=f"--optim {optim} needs it" + ("" if row.installed_by else ", and it has to be built from source"),
        fix=f"{install}use --optim {row.instead}, which needs no package",
    )


def texts(optim_args: str | None) -> dict[str, str]:
    """Return "key=value,key=value" as a dict of texts; ValueError for a part without "=" or a key given twice."""
    found: dict[str, str] = {}
    for part in filter(None, (optim_args or "").replace(" ", "").split(",")):
        key, equals, value = part.partition("=")
        if not (key and equals and value) or key in found:
            raise ValueError(part)
        found[key] = value
    return found


def options(optim: str, optim_args: str | None) -> dict[str, Any]:
    """Return the options of an optimizer, converted as its row says; those of a plug-in stay texts."""
    row, given = names().get(optim), texts(optim_args)
    return dict(given) if row is None else {key: read(value, row.option_kinds[key]) for key, value in given.items()}


def wrong_options(optim: str, optim_args: str | None) -> list[Problem]:
    """Return what is wrong with the options of an optimizer that whet builds."""
    kinds = names()[optim].option_kinds
    takes = ", ".join(kinds) or "no options"
    problems = []
    for key, value in texts(optim_args).items():
        why = f"{optim} takes {takes}" if key not in kinds else _misfit(key, value, kinds[key])
        if why:
            fix = f"take {key} out of --optim_args" if key not in kinds else f"correct {key} in --optim_args"
            hint = "; --weight_decay sets the decay" if key == "weight_decay" else ""
            what = f"optim_args holds what {optim} does not take"
            problems.append(Problem(what=what, got=f"{key}={value}", why=why, fix=fix + hint))
    return problems


def _misfit(key: str, value: str, kind: Any) -> str:
    try:
        read(value, kind)
    except ValueError:
        return f"{key} is {expected(kind)}"
    return ""
