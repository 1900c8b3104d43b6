"""`whet report`: one page about a run, or about several next to each other."""

from dataclasses import dataclass, field

from whet.config.command_line import Command
from whet.config.rules.ranges import broken_if
from whet.config.settings import checked

_RULES = (
    broken_if(
        "a_run_is_named",
        ("folders",),
        lambda asked: not asked.folders,
        what="no run is named",
        why="a report is made of the files in a run's output folder",
        fix="name one or more: whet report OUT",
    ),
    broken_if(
        "the_page_has_a_name",
        ("output",),
        lambda asked: asked.output is not None and not asked.output.strip(),
        what="output is empty",
        why="the page is written to a file",
        fix="name one: --output report.html",
    ),
)


@checked(headings={"folders": "Report"}, rules=_RULES)
@dataclass(frozen=True, kw_only=True, slots=True)
class ReportArguments:
    """Which runs, and where their page goes."""

    folders: tuple[str, ...] = field(default=(), metadata={"required": True})
    """The --output_dir of a run; of several, their settings, metrics and curves are compared, and so are those of the
    --seeds of one. A transformers Trainer's folder will do, with less to show."""
    output: str | None = None
    """File for the page. null: report.html in the run's folder; of several runs, in the current one."""


def _run(asked: ReportArguments) -> int:
    import logging
    from pathlib import Path

    from whet import json_output, log, report
    from whet.errors import escape_controls

    log.set_up(logging.WARNING)
    path = report.write(asked.folders, None if asked.output is None else Path(asked.output))
    json_output.add_outputs(report=path)
    print(escape_controls(str(path)))
    return 0


COMMAND = Command(
    name="whet report",
    summary=(
        "Write one page of HTML about a run: what it reached, which examples the model gets wrong, which labels it"
        " confuses, the curves of the training, where the time went, and the settings with where each came from. Of"
        " several runs it shows what differs. The page is one file, and needs no network. It works while a run runs,"
        " and for one that failed; every command that trains writes it at its end."
    ),
    usage="OUT [OUT ...] [--output FILE]",
    examples=("whet report out", "whet report lr-1e-5 lr-3e-5 lr-1e-4 --output comparison.html"),
    parts=(ReportArguments,),
    lone="folders",
    run=_run,
)
