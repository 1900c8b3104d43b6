"""The sentences of one split, from its file or from a data set of the hub."""

from __future__ import annotations

import re
from pathlib import Path

from whet.console import plural
from whet.data.files.bad_rows import BadRows, no_cycle_search
from whet.data.files.file_bytes import PARQUET, read_bytes, text_of
from whet.data.files.json_text import skip_space
from whet.data.files.rejected import Rejected
from whet.data.files.table import columns_line, read_table, with_line_ends
from whet.jobs.hub_data import HubSource, load_split, table_rows
from whet.tasks.tag.columns import from_columns
from whet.tasks.tag.fields import TagFields
from whet.tasks.tag.sentences import WORDS, Named, Sentences, from_rows
from whet.train.output import printing


def read_split(job: TagFields, name: str) -> Sentences:
    """Return the sentences of the split `train`, `validation` or `test`; a test split needs no tags."""
    limit = {"train": job.max_train_samples, "validation": job.max_eval_samples, "test": job.max_predict_samples}[name]
    named = Named(job.text_column_name, job.label_column_name, job.task_name.lower())
    file = {"train": job.train_file, "validation": job.validation_file, "test": job.test_file}[name]
    need = name != "test"
    if file is not None:
        found = read_file(Path(file), named, need_tags=need, limit=limit, skip_bad=job.skip_bad)
    else:
        found = _read_hub(job, name, named, limit)
    found.left_out.log(name, "sentences")
    n_words = sum(map(len, found.words))
    size = f"{plural(len(found), 'sentence')}, {plural(n_words, 'word')}"
    read = {"tags": found.tag_column if found.tags else "none"}
    printing.show_wrapped(f"{name}: {size}; {columns_line(read, found.not_read)}")
    return found


def read_file(path: Path, named: Named, *, need_tags: bool, limit: int | None, skip_bad: bool) -> Sentences:
    """Return the sentences of a file in any format; raises DataError with everything that is wrong in it."""
    bad = BadRows(str(path), skip_bad=skip_bad)
    try:
        with no_cycle_search():
            data = read_bytes(path)
            text = "{" if data.startswith(PARQUET) else text_of(data)
            begin = skip_space(text)
            if begin < len(text) and text[begin] in "{[" and not _is_columns(text):
                return from_rows(read_table(path), named, bad, need_tags=need_tags, limit=limit)
            if _is_csv(text, named):
                return from_rows(read_table(path), named, bad, need_tags=need_tags, limit=limit)
            return from_columns(text, named, bad, need_tags=need_tags, limit=limit)
    except Rejected as problem:
        raise problem.error(str(path)) from None


def _is_csv(text: str, named: Named) -> bool:
    """Return whether a text is CSV whose cells are lists of words: its header has the column, and lists follow."""
    header, _, rest = with_line_ends(text).partition("\n")
    names = {name.strip().strip('"').lower() for name in re.split("[,;\t|]", header)}
    return bool(names & {*WORDS, (named.words or "").lower()}) and rest.lstrip().lstrip('"').startswith("[")


def _is_columns(text: str) -> bool:
    """Return whether a text that begins with a bracket is a word in columns: "[ O"."""
    first = text.lstrip().split("\n", 1)[0].split()
    return len(first) > 1 and first[0] in ("[", "{") and not first[1].startswith('"') and first[1][0] not in "[{]}"


def _read_hub(job: TagFields, name: str, named: Named, limit: int | None) -> Sentences:
    source = HubSource.of(job, name)
    dataset = load_split(source)
    where = source.describe()
    bad = BadRows(where, skip_bad=job.skip_bad)
    try:
        return from_rows(table_rows(dataset, limit), named, bad, need_tags=name != "test", limit=limit)
    except Rejected as problem:
        raise problem.error(where) from None
