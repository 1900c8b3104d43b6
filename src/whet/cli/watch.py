"""`whet watch`: how runs are going, in the terminal."""

from dataclasses import dataclass, field

from whet.config.command_line import Command
from whet.config.settings import checked
from whet.errors import Problem


def _names_a_run(asked: "WatchArguments") -> Problem | None:
    """There is a run to watch."""
    if any(folder.strip() for folder in asked.runs):
        return None
    return Problem(
        what="no run is named",
        why="the output folder of a run says how it is going",
        fix="whet watch out, with the --output_dir of the run in place of out",
    )


@checked(headings={"runs": "Watch"}, rules=(_names_a_run,))
@dataclass(frozen=True, kw_only=True, slots=True)
class WatchArguments:
    """Which runs are watched, and how they are shown."""

    runs: tuple[str, ...] = field(default=(), metadata={"required": True})
    """Output folders of runs of whet's commands or of whet.Trainer, also on a disk of another machine. They come
    first, with or without the flag. Of a run with --seeds, the folder around its seeds."""
    once: bool = False
    """Show how the runs are now, and end; --json does so too."""


def _run(asked: WatchArguments) -> int:
    from whet.watch.live import run_watch

    return run_watch(asked.runs, once=asked.once)


COMMAND = Command(
    name="whet watch",
    summary=(
        "Show how runs are going: step, loss, speed, memory, scores and the time left. It reads run.jsonl in the"
        " output folder, and may start and end at any time: the runs do not notice. It ends with the runs, or by"
        " Ctrl-C. A pipe gets a line for each change."
    ),
    usage="OUT [OUT2 ...] [--OPTION VALUE ...]",
    lone="runs",
    examples=("whet watch out", "whet watch sweep/*", "whet watch out --once", "whet watch out --json"),
    parts=(WatchArguments,),
    run=_run,
)
