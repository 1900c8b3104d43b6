"""`whet launch`: start a command on the cores of this machine, or of several hosts, once for each rank."""

from whet.cli.commands import COMMANDS, RANKED
from whet.config.command_line import Command
from whet.launch.arguments import HostsArguments, LaunchArguments


def _run(asked: LaunchArguments, hosts: HostsArguments) -> int:
    if hosts.hosts or hosts.hostfile:
        from whet.launch.over_ssh import run_on_hosts

        return run_on_hosts(asked, hosts, COMMANDS, RANKED)
    from whet.launch.run import run_launch

    return run_launch(asked, hosts, COMMANDS, RANKED)


_MAIN = (
    "nproc_per_node", "kept_free_cores", "memory_allocator", "max_restarts", "log_dir", "dry_run", "hosts",
    "hostfile",
)  # fmt: skip
COMMAND = Command(
    name="whet launch",
    summary=(
        "Start a command bound to the physical cores and the memory of this machine's NUMA nodes: one process (rank)"
        " for each node, with as many threads as it has cores, and with a faster allocator where one is installed."
        " --hosts does the same on several machines over ssh, after a check of all of them."
        " What was preloaded is verified in the running process. If one rank fails, all are stopped within 5 seconds."
    ),
    usage="[--OPTION VALUE ...] -- COMMAND ...",
    rest="command",
    examples=(
        "whet launch --dry_run -- qa",
        "whet launch -- qa --model_name_or_path MODEL --dataset_name squad --do_train --output_dir out",
        "whet launch --nproc_per_node 2 -- train.py",
        "whet launch --hosts node1,node2 -- train.py",
    ),
    parts=(LaunchArguments, HostsArguments),
    main=_MAIN,
    run=_run,
)
