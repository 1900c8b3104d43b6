"""Models with experts on disk: their own `model_type`, so that nobody loads them as the dense models that they were."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whet.models.experts.settings import KEY, parsed

PREFIX = "whet-experts-"
"""What stands before the model type of the dense model in config.json."""


def mark(folder: Path, config: Any) -> None:
    """Name the saved model in `folder` as one with experts; a dense one stays as it is.

    transformers would load it as a dense model with new, random feed-forward parts. It does not know this type, and
    says so.
    """
    if getattr(config, KEY, None) is None:
        return
    path = folder / "config.json"
    values = json.loads(path.read_text("utf-8"))
    values["model_type"] = f"{PREFIX}{values['model_type'].removeprefix(PREFIX)}"
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", "utf-8")


def unmarked(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of config.json with the type of the dense model; a type without experts is left as it is."""
    kind = values.get("model_type")
    known = isinstance(kind, str) and kind.startswith(PREFIX) and parsed(values.get(KEY)) is not None
    return {**values, "model_type": kind.removeprefix(PREFIX)} if known and isinstance(kind, str) else dict(values)
