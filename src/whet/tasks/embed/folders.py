"""Which class of sentence-transformers has written a folder; needs neither torch nor the library."""

import json
from pathlib import Path
from typing import Any, Literal

Kind = Literal["SentenceTransformer", "CrossEncoder"]


def kind_of_folder(folder: Path) -> Kind | None:
    """Return which class of sentence-transformers has written this folder; None: none, or it is no folder here."""
    kind = _object(folder / "config_sentence_transformers.json").get("model_type")
    if kind in ("SentenceTransformer", "CrossEncoder"):
        return kind
    if isinstance(_object(folder / "config.json").get("sentence_transformers"), dict):
        return "CrossEncoder"  # as releases before 6 mark one
    return "SentenceTransformer" if (folder / "modules.json").is_file() else None


def _object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
