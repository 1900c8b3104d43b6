"""The rows of a split that come from a data set of the hub, or from a local folder in the hub's layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from whet import strict_json
from whet.data.files.bad_rows import BadRows, Rejected
from whet.data.files.cells import column_values
from whet.data.files.table import TableRows, named_classes
from whet.errors import DataError
from whet.jobs.fields import JobFields
from whet.jobs.splits import SPLITS
from whet.models.loading.hub import unreachable

if TYPE_CHECKING:
    from datasets import Dataset

Taken = TypeVar("Taken")
_NO_SPLIT = ("Unknown split", "nstruction", "slice")
"""What `datasets` says of a split that the data set does not have, and of parts of one that cannot be or are empty."""


def hub_examples(job: JobFields, split: str, limit: int | None, take: Callable[[TableRows, BadRows], Taken]) -> Taken:
    """Return what `take` makes of the rows of the split in its data set; what it refuses names the data set."""
    source = HubSource.of(job, split)
    rows, where = table_rows(load_split(source), limit), source.describe()
    try:
        return take(rows, BadRows(where, skip_bad=job.skip_bad))
    except Rejected as problem:
        raise problem.error(where) from None


@dataclass(frozen=True, kw_only=True)
class HubSource:
    """Which split of which data set `datasets.load_dataset` shall load."""

    dataset_name: str
    """A name on the hub, or a local folder that holds Parquet, JSON lines or CSV files."""
    split: str
    """Its name, or a part of it in the notation of `datasets`: train[:90%]."""
    flag: str
    """The option that names the split."""
    dataset_config_name: str | None = None
    cache_dir: Path | None = None
    token: str | bool | None = field(default=None, repr=False)
    """The hub's token; True takes the one that `hf auth login` stored."""

    @classmethod
    def of(cls, job: JobFields, name: str) -> HubSource:
        """Return what a command line names as its split `train`, `validation` or `test`."""
        assert job.dataset_name is not None
        return cls(
            dataset_name=job.dataset_name,
            split=getattr(job, SPLITS[name].of_dataset),
            flag=f"--{SPLITS[name].of_dataset}",
            dataset_config_name=job.dataset_config_name,
            cache_dir=None if job.cache_dir is None else Path(job.cache_dir),
            token=job.token,
        )

    def describe(self) -> str:
        """Return how messages name the split."""
        return f"data set {self.dataset_name!r}, split {self.split!r}"


def load_split(source: HubSource) -> Dataset:
    """Return the split; no code of the data set runs. Raises DataError if `datasets` cannot load it."""
    from datasets.exceptions import DatasetsError

    try:
        with _without_the_hub(source.dataset_name):
            dataset = _loaded(source)
            if dataset.info.builder_name == "json" and _may_hide_json(dataset):
                _require_one_type(source, dataset)
            return dataset
    # RuntimeError: the data set wants to run a script of its own, which `datasets` refuses
    except (DatasetsError, OSError, ValueError, RuntimeError) as error:
        raise DataError(
            what=f"{source.describe()}: cannot be loaded",
            got=f"{type(error).__name__}: {error}",
            why="`datasets.load_dataset` refused",
            fix=f"{_other_name(str(error), source)}; or leave --dataset_name out and use --train_file, "
            "--validation_file and --test_file",
        ) from error


def _loaded(source: HubSource, **more: Any) -> Dataset:
    from datasets import load_dataset

    return load_dataset(
        source.dataset_name,
        source.dataset_config_name,
        split=source.split,
        cache_dir=None if source.cache_dir is None else str(source.cache_dir),
        token=source.token,
        **more,
    )


def _may_hide_json(dataset: Dataset) -> bool:
    """Return whether a column of texts may hold the JSON of its values, with quotes, and not say so.

    `datasets` writes a column of a file in which a value has another type as JSON; but its columns are as the first
    file of the first split has them. Then all texts of a batch of rows are JSON.
    """
    table: Any = dataset.with_format("arrow")[:]
    return any(_are_json(texts) for column in table.columns for chunk in column.chunks for texts in _texts_in(chunk))


def _texts_in(array: Any) -> Iterator[Any]:
    """Yield the arrays of texts that this array is made of."""
    from pyarrow import types

    if types.is_string(array.type) or types.is_large_string(array.type):
        yield array.drop_null()
    elif types.is_struct(array.type):
        for values in array.flatten():
            yield from _texts_in(values)
    elif types.is_list(array.type) or types.is_large_list(array.type):
        yield from _texts_in(array.flatten())


def _are_json(texts: Any) -> bool:
    """Return whether all of these texts are JSON, and some are JSON strings."""
    return all(_is_json(text.as_py()) for text in texts) and any(text.as_py().startswith('"') for text in texts)


def _is_json(text: str) -> bool:
    try:
        strict_json.parse_document(text)
    except strict_json.BadJson:
        return False
    return True


def _require_one_type(source: HubSource, dataset: Dataset) -> None:
    """Raise DataError if `datasets` cannot load the split without writing values of several types as JSON."""
    from datasets.exceptions import DatasetGenerationError
    from datasets.packaged_modules.json.json import JsonConfig

    if not hasattr(JsonConfig, "on_mixed_types"):  # an older version, which writes none
        return
    try:
        _loaded(source, features=dataset.features, on_mixed_types="refuse")
    except DatasetGenerationError as error:
        raise DataError(
            what=f"{source.describe()}: a column holds values of several types",
            got=str(error.__cause__ or error),
            why="`datasets` then writes all values of the column as JSON, and each text would have quotes around it",
            fix="write all values of the column as texts; --train_file, --validation_file and --test_file in place of "
            "--dataset_name name the rows with others",
        ) from error


def _other_name(said: str, source: HubSource) -> str:
    """Return which option to correct, by what `datasets` said."""
    if not source.split or any(words in said for words in _NO_SPLIT):
        return f"name another in {source.flag}"
    return "check --dataset_name, --dataset_config_name and the network"


@contextmanager
def _without_the_hub(name: str) -> Iterator[None]:
    """Where the hub does not answer, let `datasets` take what is cached at once: it would try for half a minute."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    if not Path(name).exists() and not before and unreachable():
        constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def table_rows(dataset: Dataset, limit: int | None = None) -> TableRows:
    """Return the rows of a data set; classes that it keeps as numbers come as their names, -1 as None."""
    n_rows = len(dataset) if limit is None else min(limit, len(dataset))
    classes = {name: names for name in dataset.column_names if (names := _class_names(dataset, name))}

    def take(names: Sequence[str]) -> Iterator[tuple[str, Any]]:
        wanted = [name for name in dataset.column_names if name in names]
        table: Any = dataset.select_columns(wanted).with_format("arrow")[:n_rows]
        columns = [named_classes(column_values(table.column(name)), classes.get(name, ())) for name in wanted]
        for n, values in enumerate(zip(*columns, strict=True)):
            yield f"row {n}", dict(zip(wanted, values, strict=True))

    return TableRows(list(dataset.column_names), take, classes, notation="arrow")


def _class_names(dataset: Dataset, column: str) -> tuple[str, ...]:
    """Return the names of the classes in this column, or in its lists, in the data set's order; () if it has none."""
    feature: Any = dataset.features.get(column)
    inner = getattr(feature, "feature", feature)
    return tuple(getattr(inner, "names", None) or ())
