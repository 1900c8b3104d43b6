"""The examples of one split, from its file or from a data set of the hub."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from whet.console import plural
from whet.data.files.bad_rows import BadRows, no_cycle_search
from whet.data.files.rejected import Rejected
from whet.data.files.table import TableRows, columns_line, read_table
from whet.jobs.hub_data import HubSource, load_split, table_rows
from whet.tasks.classify.examples import Examples, Named, choose_columns, collect
from whet.tasks.classify.fields import ClassifyFields
from whet.train.output import printing


def read_split(job: ClassifyFields, name: str) -> Examples:
    """Return the examples of the split `train`, `validation` or `test`; a test split needs no labels."""
    limit = {"train": job.max_train_samples, "validation": job.max_eval_samples, "test": job.max_predict_samples}[name]
    shuffled = name == "train" and job.shuffle_train_dataset
    examples = _read(job, name, None if shuffled else limit)
    if shuffled:
        order = np.random.default_rng(job.shuffle_seed).permutation(len(examples))
        examples = examples.take(order[:limit].tolist())
    examples.left_out.log(name, "example")
    columns = examples.columns
    read = {
        "text": columns.text,
        **({"second text": columns.pair} if columns.pair else {}),
        "label": columns.label or (),
    }
    printing.show_wrapped(f"{name}: {plural(len(examples), 'example')}; {columns_line(read, examples.not_read)}")
    return examples


def read_file(
    path: Path, named: Named, *, delimiter: str | None, need_label: bool, limit: int | None, skip_bad: bool
) -> Examples:
    """Return the examples of a file in any format; raises DataError with everything that is wrong in it."""
    try:
        with no_cycle_search():
            return _examples(read_table(path, delimiter), named, BadRows(str(path), skip_bad=skip_bad),
                             need_label=need_label, limit=limit)  # fmt: skip
    except Rejected as problem:
        raise problem.error(str(path)) from None


def _read(job: ClassifyFields, name: str, limit: int | None) -> Examples:
    named = Named(job.text_column_names, job.text_pair_column_names, job.label_column_name, job.text_column_delimiter)
    file = {"train": job.train_file, "validation": job.validation_file, "test": job.test_file}[name]
    need_label = name != "test"
    if file is not None:
        return read_file(Path(file), named, delimiter=job.csv_delimiter, need_label=need_label, limit=limit,
                         skip_bad=job.skip_bad)  # fmt: skip
    source = HubSource.of(job, name)
    dataset = load_split(source)
    where = source.describe()
    try:
        bad = BadRows(where, skip_bad=job.skip_bad)
        return _examples(table_rows(dataset, limit), named, bad, need_label=need_label, limit=limit)
    except Rejected as problem:
        raise problem.error(where) from None


def _examples(rows: TableRows, named: Named, bad: BadRows, *, need_label: bool, limit: int | None) -> Examples:
    columns = choose_columns(rows.columns, named, need_label=need_label)
    found = collect(rows, columns, bad, need_label=need_label, limit=limit)
    order = rows.class_names.get(columns.label or "", ())
    return replace(found, label_order=order, not_read=rows.not_read(columns.all))
