"""The sentences of one split, from its file or from a data set of the hub."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from pathlib import Path

from whet.console import plural
from whet.data.files.bad_rows import BadRows, no_cycle_search
from whet.data.files.csv_files import DELIMITERS
from whet.data.files.file_bytes import PARQUET, read_bytes, text_of
from whet.data.files.json_text import skip_space
from whet.data.files.rejected import Rejected
from whet.data.files.table import TableRows, columns_line, read_table, with_line_ends
from whet.errors import escape_controls
from whet.jobs.hub_data import HubSource, load_split, table_rows
from whet.tasks.tag.columns import from_columns
from whet.tasks.tag.fields import TagFields
from whet.tasks.tag.sentences import ENTITY, TAGS, WORDS, Named, Sentences, from_rows
from whet.tasks.tag.spans import from_spans, span_columns, with_fields
from whet.train.output import printing

_SHOWN_WORDS = 15
_HEADER_LINES = 50
"""Lines of a CSV file among which its header and its first row are, also if a cell has several lines."""
_BRAT = re.compile(r"T\d+\t\S+ \d+ \d+(;\d+ \d+)*\t[^\n]*")


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
    found.left_out.log(name, "sentence")
    n_words = sum(map(len, found.words))
    size = f"{plural(len(found), 'sentence')}, {plural(n_words, 'word')}"
    read = {"words": found.word_column, "tags": found.tag_column if found.tags else "none"}
    printing.show_wrapped(f"{name}: {size}; {columns_line(read, found.not_read)}")
    for note in (_shown_sentence(found), *found.notes):
        printing.show_wrapped(f"{name}: {note}")
    return found


def _shown_sentence(found: Sentences) -> str:
    """Return the first sentence with a tag other than O, each word with its tag; without tags the first sentence."""
    if not found.tags:
        return f"the first sentence is {_begin(found.words[0])}"
    n = next((n for n, tags in enumerate(found.tags) if any(tag != "O" for tag in tags)), 0)
    words = [f"{word} ({tag})" for word, tag in zip(found.words[n], found.tags[n], strict=True)]
    return f"the first tagged sentence is {_begin(words)}"


def _begin(words: Sequence[str]) -> str:
    return escape_controls(" ".join(words[:_SHOWN_WORDS])) + (" ..." if len(words) > _SHOWN_WORDS else "")


def read_file(path: Path, named: Named, *, need_tags: bool, limit: int | None, skip_bad: bool) -> Sentences:
    """Return the sentences of a file in any format; raises DataError with everything that is wrong in it."""
    bad = BadRows(str(path), skip_bad=skip_bad)
    try:
        with no_cycle_search():
            data = read_bytes(path)
            text = "{" if data.startswith(PARQUET) else text_of(data)
            begin = skip_space(text)
            if begin < len(text) and text[begin] in "{[" and not _is_columns(text):
                return _from_table(read_table(path), named, bad, need_tags=need_tags, limit=limit)
            if _is_csv(text, named):
                return from_rows(read_table(path), named, bad, need_tags=need_tags, limit=limit)
            _refuse_brat(text)
            return from_columns(text, named, bad, need_tags=need_tags, limit=limit)
    except Rejected as problem:
        raise problem.error(str(path)) from None


def _from_table(rows: TableRows, named: Named, bad: BadRows, *, need_tags: bool, limit: int | None) -> Sentences:
    """Return the sentences of rows with lists of words and tags, or with texts and spans."""
    rows = with_fields(rows)
    spans = span_columns(rows, named, need_tags=need_tags)
    if spans is not None:
        return from_spans(rows, spans, bad, need_tags=need_tags, limit=limit)
    return from_rows(rows, named, bad, need_tags=need_tags, limit=limit)


def _is_csv(text: str, named: Named) -> bool:
    """Return whether a text is CSV with a sentence a row: a list of words, or as many words as tags, in its cells."""
    lines = with_line_ends(text).lstrip("\n").split("\n", _HEADER_LINES)[:_HEADER_LINES]
    for mark in DELIMITERS:
        try:
            header, first = [*csv.reader(lines, delimiter=mark), [], []][:2]
        except csv.Error:  # such as a cell of 200,000 characters
            continue
        row = {name.strip().lower(): cell.strip() for name, cell in zip(header, first, strict=False)}
        words = next((row[name] for name in ((named.words or "").lower(), *WORDS) if name in row), "")
        tags = next((row[name] for name in ((named.tags or "").lower(), *TAGS) if name in row), "")
        given = tags.replace(",", " ").split()
        as_texts = 1 < len(given) == len(words.split()) and all(map(ENTITY.fullmatch, given))
        if (words.startswith("[") and words.endswith("]") and len(words) > 2) or as_texts:
            return True
    return False


def _refuse_brat(text: str) -> None:
    """Refuse the annotations of brat, which stand in another file than their text."""
    if (found := _BRAT.match(text.lstrip())) is not None:
        raise Rejected(
            "these are brat's standoff annotations",
            got=found[0],
            why="the words are in another file (.txt), and it is not known which annotations of a document are tags",
            fix="write columns (a word and its tag a line), or JSON lines with text and spans: "
            '{"text": "Mira sailed", "label": [[0, 4, "PER"]]}',
        )


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
        return _from_table(table_rows(dataset, limit), named, bad, need_tags=name != "test", limit=limit)
    except Rejected as problem:
        raise problem.error(where) from None
