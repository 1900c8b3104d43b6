"""`whet merge`: fold a trained adapter into its model."""

from dataclasses import dataclass, field

from whet import tasks
from whet.config.aliases import Alias
from whet.config.command_line import Command
from whet.config.settings import checked
from whet.errors import Problem


def names_both(asked: "MergeArguments") -> Problem | None:
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


_ALIASES = {"model_name_or_path": Alias(to="base_model_name_or_path", kind=str | None, name="another name")}


@checked(headings={"adapter": "Adapter"}, rules=(names_both,), aliases=_ALIASES)
@dataclass(frozen=True, kw_only=True, slots=True)
class MergeArguments:
    """Which adapter becomes part of which model."""

    adapter: str = field(default="", metadata={"required": True})
    """Folder that a run with --lora_r has written. Comes first, with or without its flag."""
    output_dir: str = field(default="", metadata={"required": True})
    """New or empty folder for the model with the adapter folded in."""
    base_model_name_or_path: str | None = None
    """The model that the adapter was trained on. null: the one that the adapter names."""


def _run(asked: MergeArguments) -> int:
    from whet.jobs.lora.merge import run_merge

    heads = [task.head for task in tasks.tasks()]
    return run_merge(asked.adapter, asked.output_dir, asked.base_model_name_or_path, heads)


COMMAND = Command(
    name="whet merge",
    summary="Fold the adapter of a run with --lora_r into its model, and save that as a model like any other.",
    usage="ADAPTER --output_dir FOLDER [--OPTION VALUE ...]",
    examples=(
        "whet merge out --output_dir merged",
        "whet merge out --base_model_name_or_path base --output_dir merged",
    ),
    parts=(MergeArguments,),
    lone="adapter",
    run=_run,
)
