"""Config files: YAML or JSON, one value under each option's name."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from whet.errors import ConfigError, Problem

SUFFIXES = (".json", ".yaml", ".yml")


def read_config(path: str) -> dict[str, Any]:
    """Return the names and values of a config file; raises ConfigError where it is missing or damaged."""
    if Path(path).suffix.lower() not in SUFFIXES:
        raise _bad(path, f"its name does not end in {', '.join(SUFFIXES)}", "name a YAML or JSON file")
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        values = _from_json(text) if path.lower().endswith(".json") else _from_yaml(text)
    except (OSError, ValueError) as error:
        raise _bad(path, str(error), "see the place that is named, or name another file") from error
    if not isinstance(values, dict):
        raise _bad(path, f"it holds a {type(values).__name__}, not names with values", "write one name: value a line")
    return {str(name): value for name, value in values.items()}


def _from_json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_once)


def _from_yaml(text: str) -> Any:
    import yaml

    try:
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        if isinstance(tree, yaml.MappingNode):
            _once([(getattr(key, "value", None), None) for key, _ in tree.value])
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    return {} if values is None else values


def _once(pairs: Sequence[tuple[Any, Any]]) -> dict[Any, Any]:
    """Return the pairs as a dict; ValueError where a name comes twice, for one of its values would be lost."""
    names = [name for name, _ in pairs]
    twice = sorted({str(name) for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"it holds {', '.join(twice)} more than once")
    return dict(pairs)


def _bad(path: str, why: str, fix: str) -> ConfigError:
    problem = Problem(what="the config file cannot be read", got=path, why=why, fix=f"{fix} in --config")
    return ConfigError(what=problem.what, got=problem.got, why=problem.why, fix=problem.fix)
