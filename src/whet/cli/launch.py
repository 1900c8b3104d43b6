"""`whet launch`: start a command on the cores of this machine, once for each rank."""

from whet.config.command import Command
from whet.launch.arguments import LaunchArguments


def _run(asked: LaunchArguments) -> int:
    from whet.cli.main import COMMANDS
    from whet.launch.run import run_launch

    return run_launch(asked, COMMANDS)


COMMAND = Command(
    name="whet launch",
    summary=(
        "Start a command bound to the physical cores and the memory of this machine's NUMA nodes: one process (rank)"
        " for each node, with as many threads as it has cores, and with a faster allocator where one is installed."
        " What was preloaded is verified in the running process. If one rank fails, all are stopped within 5 seconds."
    ),
    usage="[--OPTION VALUE ...] -- COMMAND ...",
    rest="command",
    examples=(
        "whet launch --dry_run -- qa",
        "whet launch -- qa --model_name_or_path MODEL --dataset_name squad --do_train --output_dir out",
        "whet launch --nproc_per_node 2 -- train.py",
    ),
    parts=(LaunchArguments,),
    run=_run,
)
