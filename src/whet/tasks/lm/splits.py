"""The examples of one split, from its file or from a data set of the hub."""

from __future__ import annotations

from pathlib import Path

from whet.data.files.bad_rows import BadRows, no_cycle_search
from whet.data.files.file_bytes import PARQUET, read_bytes, text_of
from whet.data.files.rejected import Rejected
from whet.data.files.table import TableRows, read_table
from whet.errors import ConfigError
from whet.jobs.hub_data import file_of, hub_examples, limit_of
from whet.tasks.lm.arguments import LmFields
from whet.tasks.lm.columns import choose_columns
from whet.tasks.lm.examples import Examples, from_lines, from_table
from whet.watch import printing

_PLAIN = (".txt", ".text", ".md")
_TABLES = (".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".parquet")
_WORDS = {
    "lines": "lines of plain text",
    "text": "texts",
    "completion": "prompts with completions",
    "messages": "conversations",
    "preference": "pairs of completions",
}


def read_split(job: LmFields, name: str) -> Examples:
    """Return the examples of the split `train`, `validation` or `test`."""
    limit, pairs = limit_of(job, name), job.loss == "dpo"
    if (file := file_of(job, name)) is not None:
        found = read_file(file, job.dataset_text_field, limit=limit, skip_bad=job.skip_bad, pairs=pairs)
    else:

        def take(rows: TableRows, bad: BadRows) -> Examples:
            return from_table(rows, job.dataset_text_field, bad, limit, pairs=pairs)

        found = hub_examples(job, name, limit, take)
    _require_completions(job, found)
    found.left_out.log(name, "example")
    printing.show_wrapped(
        f"{name}: {len(found):,} {_WORDS[found.form]}" + (f"; {found.columns}" if found.columns else "")
    )
    return found


def read_file(
    path: Path, text_column: str | None, *, limit: int | None, skip_bad: bool, pairs: bool = False
) -> Examples:
    """Return the examples of a file, or its `pairs`; raises DataError with everything that is wrong in it."""
    bad = BadRows(str(path), skip_bad=skip_bad)
    try:
        with no_cycle_search():
            if _is_plain(path):
                if pairs:
                    choose_columns(TableRows((), lambda _: ()), None, pairs=True)  # refuses: plain text has no columns
                if text_column is not None:
                    raise _no_columns(path, text_column)
                return from_lines(text_of(read_bytes(path)), bad, limit)
            return from_table(read_table(path), text_column, bad, limit, pairs=pairs)
    except Rejected as problem:
        raise problem.error(str(path)) from None


def _no_columns(path: Path, text_column: str) -> ConfigError:
    return ConfigError(
        what=f"dataset_text_field would change nothing with {path}",
        got=text_column,
        why="it names a column, and a file of plain text has none: all of it is learnt",
        fix="leave --dataset_text_field out, or name a file of rows (JSON lines, Parquet or CSV)",
    )


def _require_completions(job: LmFields, found: Examples) -> None:
    """Refuse completion_only_loss for texts: without it they are learnt completely, which the user did not want."""
    if job.completion_only_loss and found.form in ("lines", "text"):
        raise ConfigError(
            what=f"completion_only_loss has no completions in {found.source}",
            got=_WORDS[found.form],
            why="a text is learnt completely: nothing says which part of it is an answer",
            fix="write rows with prompt and completion, or with messages; or leave --completion_only_loss "
            "(--assistant_only_loss) out to learn the texts completely",
        )


def _is_plain(path: Path) -> bool:
    """Return whether the file holds plain text: its name says so, or it is neither a table nor JSON."""
    suffix = path.suffix.lower()
    if suffix in (*_PLAIN, *_TABLES):
        return suffix in _PLAIN
    data = read_bytes(path)
    return not data.startswith(PARQUET) and data.lstrip()[:1] not in (b"{", b"[")
