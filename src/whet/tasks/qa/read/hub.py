"""Questions from a data set of the hub, or from a local folder in the hub's layout."""

from __future__ import annotations

from whet.data.files.bad_rows import no_cycle_search
from whet.data.files.rejected import Rejected
from whet.jobs.hub_data import HubSource, load_split
from whet.tasks.qa.read.collect import Collector
from whet.tasks.qa.read.tables import read_table
from whet.tasks.qa.types import Questions


def read_hub(
    source: HubSource, limit: int | None = None, *, require_answers: bool = True, skip_bad: bool = False
) -> Questions:
    """Return the questions of one split, checked as `read_questions` checks a file. No code of the data set is run."""
    name = source.describe()
    collector = Collector(name, limit=limit, require_answers=require_answers, skip_bad=skip_bad)
    dataset = load_split(source)
    rows = len(dataset) if limit is None else min(limit, len(dataset))
    try:
        with no_cycle_search():
            read_table(dataset.with_format("arrow")[:rows], collector)
    except Rejected as problem:
        raise problem.error(name) from None
    return collector.finish()
