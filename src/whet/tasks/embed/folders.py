"""Which class of sentence-transformers has written a folder; needs neither torch nor the library."""

import json
from pathlib import Path
from typing import Any, Literal, get_args

Kind = Literal["SentenceTransformer", "CrossEncoder"]
KINDS: tuple[Kind, ...] = get_args(Kind)


def class_of_folder(folder: Path) -> str | None:
    """Return the class of sentence-transformers that has written this folder; None: none, or it is no folder here."""
    named = _object(folder / "config_sentence_transformers.json").get("model_type")
    if isinstance(named, str):
        return named
    if isinstance(_object(folder / "config.json").get("sentence_transformers"), dict):
        return "CrossEncoder"  # as releases before 6 mark one
    return "SentenceTransformer" if (folder / "modules.json").is_file() else None


def kind_of_folder(folder: Path) -> Kind | None:
    """Return the class of sentence-transformers that has written this folder, if it is one of the two here."""
    found = class_of_folder(folder)
    return next((kind for kind in KINDS if kind == found), None)


def _object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
