"""`whet demo-lm`: see a language model learn, without a download."""

from whet.config.command_line import Command
from whet.tasks.lm.demo_arguments import DemoLmArguments


def _run(demo: DemoLmArguments) -> int:
    from whet.tasks.lm.demo import run_demo

    return run_demo(demo)


COMMAND = Command(
    name="whet demo-lm",
    summary="Train a small decoder from scratch, and show what it writes. Nothing is downloaded.",
    usage="[--OPTION VALUE ...]",
    examples=("whet demo-lm", "whet demo-lm --output_dir demo --max_steps 600 --seed 7"),
    parts=(DemoLmArguments,),
    run=_run,
)
