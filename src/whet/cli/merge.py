"""`whet merge`: fold a trained adapter into its model."""

from whet import tasks
from whet.config.command_line import Command
from whet.jobs.lora.merge_arguments import MergeArguments


def _run(asked: MergeArguments) -> int:
    from whet.jobs.lora.merge import run_merge

    return run_merge(asked, [task.head for task in tasks.tasks()])


COMMAND = Command(
    name="whet merge",
    summary="Fold the adapter of a run with --lora_r into its model, and save that as a model like any other.",
    usage="ADAPTER --output_dir FOLDER [--OPTION VALUE ...]",
    examples=("whet merge out --output_dir merged", "whet merge out --model_name_or_path base --output_dir merged"),
    parts=(MergeArguments,),
    lone="adapter",
    run=_run,
)
