"""The rows of a split that come from a data set of the hub, or from a local folder in the hub's layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

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
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    try:
        with _without_the_hub(source.dataset_name):
            return load_dataset(
                source.dataset_name,
                source.dataset_config_name,
                split=source.split,
                cache_dir=None if source.cache_dir is None else str(source.cache_dir),
                token=source.token,
            )
    # RuntimeError: the data set wants to run a script of its own, which `datasets` refuses
    except (DatasetsError, OSError, ValueError, RuntimeError) as error:
        raise DataError(
            what=f"{source.describe()}: cannot be loaded",
            got=f"{type(error).__name__}: {error}",
            why="`datasets.load_dataset` refused",
            fix=f"{_other_name(str(error), source)}; or leave --dataset_name out and use --train_file, "
            "--validation_file and --test_file",
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
