"""The options of `whet merge`."""

from dataclasses import dataclass, field

from whet.config.settings import checked
from whet.errors import Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeFields:
    """Which adapter becomes part of which model, unchecked."""

    adapter: str = field(default="", metadata={"required": True})
    """Folder that a run with --lora_r has written. Comes first, with or without its flag."""
    output_dir: str = field(default="", metadata={"required": True})
    """New or empty folder for the model with the adapter folded in."""
    model_name_or_path: str | None = None
    """The model that the adapter was trained on. null: the one that the adapter names."""


def names_both(asked: MergeFields) -> Problem | None:
    """There is an adapter, and a place for the result."""
    missing = [name for name in ("adapter", "output_dir") if not getattr(asked, name).strip()]
    if not missing:
        return None
    return Problem(
        what=f"no {' and no '.join(missing)} is named",
        got=f"no {' and no '.join(missing)}",
        why="an adapter is read from one folder, and the model written to another",
        fix="whet merge out --output_dir merged",
    )


@checked(headings={"adapter": "Adapter"}, rules=(names_both,))
@dataclass(frozen=True, kw_only=True, slots=True)
class MergeArguments(MergeFields):
    """Which adapter becomes part of which model."""
