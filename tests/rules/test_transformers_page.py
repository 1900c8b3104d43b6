"""Every public method and constructor argument of transformers' Trainer works or is refused with the way."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import transformers
from tiny_runs import Toy, arguments, toy_rows
from transformers_page import PAGE, written

import engine
from whet.errors import ConfigError
from whet.train.compat.method_table import ARGUMENTS, HONOURED_INTERNAL, INTERNAL, METHODS, SEEN_IN

_THEIRS = [name for name in dir(transformers.Trainer) if not name.startswith("__")]
_PUBLIC = sorted(n for n in _THEIRS if not n.startswith("_") and callable(getattr(transformers.Trainer, n)))
_UNDER = sorted(name for name in _THEIRS if name.startswith("_"))


def test_the_page_says_what_the_code_does() -> None:
    assert PAGE.read_text("utf-8") == written(), "run: python tests/rules/transformers_page.py"


def test_every_method_of_the_installed_transformers_is_known() -> None:
    assert set(_PUBLIC) - METHODS.keys() == set()
    assert set(_UNDER) - INTERNAL == set()


def test_the_lists_hold_nothing_else() -> None:
    if not transformers.__version__.startswith(SEEN_IN):
        pytest.skip(f"the lists were made from transformers {SEEN_IN}; installed is {transformers.__version__}")
    assert METHODS.keys() == set(_PUBLIC)
    assert set(_UNDER) == INTERNAL
    assert ARGUMENTS.keys() == _parameters(transformers.Trainer.__init__).keys()


def test_attributes_that_scripts_set_are_there() -> None:
    others = [
        name for name in _THEIRS if not name.startswith("_") and not callable(getattr(transformers.Trainer, name))
    ]
    assert [name for name in others if not hasattr(engine.Trainer, name)] == []


def test_the_constructor_takes_what_transformers_takes_in_its_order() -> None:
    theirs, ours = (list(_parameters(kind.__init__)) for kind in (transformers.Trainer, engine.Trainer))
    assert ours[: len(theirs)] == theirs


@pytest.mark.parametrize("name", _PUBLIC)
def test_a_method_takes_what_transformers_takes(name: str) -> None:
    theirs, ours = (_parameters(getattr(kind, name)) for kind in (transformers.Trainer, engine.Trainer))
    takes_any = any(one.kind == one.VAR_KEYWORD for one in ours.values())
    missing = [one for one, kind in theirs.items() if one not in ours and kind.kind != kind.VAR_KEYWORD]
    assert takes_any or missing == []
    shared = [one for one in theirs if one in ours]
    assert [one for one in ours if one in shared] == shared  # the same order for calls by position


@pytest.mark.parametrize("name", sorted(name for name, method in METHODS.items() if method.refused))
def test_a_method_that_is_refused_says_what_to_do(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)no {name}.*fix: use transformers' own Trainer"):
        getattr(_trainer(engine.Trainer, tmp_path), name)()


@pytest.mark.parametrize("name", _PUBLIC + _UNDER)
def test_an_override_is_honoured_or_refused_at_construction(name: str, tmp_path: Path) -> None:
    kind = type("Own", (engine.Trainer,), {name: lambda self, *_, **__: None})
    honoured = name in HONOURED_INTERNAL or (name in METHODS and METHODS[name].override == "honoured")
    if honoured:
        assert _trainer(kind, tmp_path)
        return
    with pytest.raises(ConfigError, match=rf"(?s)got: {name}.*fix: .*whet\.optimize"):
        _trainer(kind, tmp_path)


def _trainer(kind: type, folder: Path) -> Any:
    return kind(Toy(), arguments(folder), train_dataset=toy_rows())


def _parameters(function: Any) -> dict[str, inspect.Parameter]:
    return {name: one for name, one in inspect.signature(function).parameters.items() if name != "self"}
