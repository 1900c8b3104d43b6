"""Config files: YAML or JSON, one value under each option's name. Messages name a position, never its content."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from whet.errors import ConfigError
from whet.strict_json import BadJson, parse_document

SUFFIXES = (".json", ".yaml", ".yml")
LARGEST_BYTES = 1 << 20
_READ_ON = "correct the position that is named, or use another file"


def read_config(path: str) -> dict[str, Any]:
    """Return the names and values of a config file; raises ConfigError if it is missing or damaged."""
    if Path(path).suffix.lower() not in SUFFIXES:
        raise _bad(path, f"its name does not end in {', '.join(SUFFIXES)}", "name a YAML or JSON file")
    text = _text(path)
    try:
        values = _from_json(text) if path.lower().endswith(".json") else _from_yaml(text)
    except RecursionError:
        raise _bad(path, "it is nested too deep", "write one name: value per line") from None
    except (ValueError, TypeError, ArithmeticError, AttributeError, LookupError) as error:  # from PyYAML
        raise _bad(path, str(error), _READ_ON) from None
    if not isinstance(values, dict):
        raise _bad(path, f"it holds a {type(values).__name__}, not names with values", "write one name: value per line")
    return {str(name): value for name, value in values.items()}


def _text(path: str) -> str:
    try:
        place = Path(path)
        if place.exists() and not place.is_file():
            raise _bad(path, "it is not a regular file", "name a YAML or JSON file")
        if place.stat().st_size > LARGEST_BYTES:
            raise _bad(path, f"it is larger than {LARGEST_BYTES:,} bytes", "name a file that holds options alone")
        return place.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _bad(path, f"byte {error.start} is not UTF-8", "save it as UTF-8") from None
    except (OSError, ValueError) as error:
        raise _bad(path, str(error), _READ_ON) from error


def _from_json(text: str) -> Any:
    try:
        return parse_document(text)
    except BadJson as problem:
        raise ValueError(problem.what) from None


def _from_yaml(text: str) -> Any:
    import yaml

    try:
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        if isinstance(tree, yaml.MappingNode):
            _once([str(getattr(key, "value", None)) for key, _ in tree.value])
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader)):
            raise ValueError("it contains an alias (*name); write the value of each option in place")
        values = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:  # its own text shows the line, which may contain a secret
        mark = error.problem_mark or error.context_mark
        place = "" if mark is None else f" at line {mark.line + 1}, column {mark.column + 1}"
        raise ValueError(f"{error.problem or error.context}{place}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"it is not YAML ({type(error).__name__})") from None
    return {} if values is None else values


def _once(names: Sequence[str]) -> None:
    """Raise ValueError if a name is repeated, because one of its values would be lost."""
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"it has {', '.join(twice)} more than once")


def _bad(path: str, why: str, fix: str) -> ConfigError:
    return ConfigError(what="the config file cannot be read", got=path, why=why, fix=f"{fix} in --config")
