"""`whet bundle`: this installation and a model in one file, for machines without a network."""

from dataclasses import dataclass, field

from whet import tasks
from whet.config.command_line import Command
from whet.config.rules.ranges import Rule, is_given, only_with
from whet.config.settings import checked

RULES: tuple[Rule, ...] = (
    is_given(
        "names_a_file",
        "output",
        what="no file is named",
        why="a bundle is one file",
        fix="name the file to write: whet bundle FILE",
    ),
    only_with(
        "has_a_model_on_its_base",
        "model_name_or_path",
        ("base_model_name_or_path",),
        why="it names the model under an adapter",
        fix="name the adapter's folder in --model_name_or_path, or leave --base_model_name_or_path out",
    ),
)


@checked(headings={"output": "Bundle"}, rules=RULES)
@dataclass(frozen=True, kw_only=True, slots=True)
class BundleArguments:
    """What goes into the bundle."""

    output: str = field(default="", metadata={"required": True})
    """File to write, such as offline.tar. Comes first, with or without its flag."""
    model_name_or_path: str | None = None
    """Folder of a model, or its name on the hub, to go with it; the model under an adapter goes, too."""
    base_model_name_or_path: str | None = None
    """For an adapter: the model that it was trained on. null: the one that the adapter names."""
    extras: str = ""
    """Optional parts of whet to go with it, separated by commas: embed,onnx."""


def _run(asked: BundleArguments) -> int:
    from whet.jobs.bundle import run_bundle

    extras = [name.strip() for name in asked.extras.split(",") if name.strip()]
    of_library = [task.knows for task in tasks.tasks() if not task.by_engine]
    return run_bundle(
        asked.output, asked.model_name_or_path, asked.base_model_name_or_path, extras,
        lambda folder: any(knows(folder) for knows in of_library),
    )  # fmt: skip


COMMAND = Command(
    name="whet bundle",
    summary=(
        "Write whet, the packages that it needs at the versions installed here, a model and the guide into one file."
        " On a machine without a network, of the same kind and with the same Python, its install.sh checks and installs"
        " all of it."
    ),
    usage="FILE [--model_name_or_path MODEL] [--OPTION VALUE ...]",
    examples=(
        "whet bundle offline.tar --model_name_or_path out",
        "whet bundle offline.tar --extras embed,onnx",
    ),
    parts=(BundleArguments,),
    lone="output",
    run=_run,
)
