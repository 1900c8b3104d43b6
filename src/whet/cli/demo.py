"""`whet demo`: see training work, without a download."""

from whet.config.command_line import Command
from whet.tasks.qa.arguments import DemoArguments


def _run(demo: DemoArguments) -> int:
    from whet.tasks.qa.demo import run_demo

    return run_demo(demo)


COMMAND = Command(
    name="whet demo",
    summary="Train a small model to answer questions, and show it at work. Nothing is downloaded.",
    usage="[--OPTION VALUE ...]",
    examples=("whet demo", "whet demo --output_dir demo --num_train_epochs 5 --seed 7"),
    parts=(DemoArguments,),
    run=_run,
)
