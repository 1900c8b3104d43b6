"""Questions from a data set of the hub, or from a local folder in the hub's layout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from whet.errors import DataError
from whet.models.loading.hub_reach import unreachable
from whet.tasks.qa.read.collect import Collector, no_cycle_search
from whet.tasks.qa.read.rejected import Rejected
from whet.tasks.qa.read.tables import read_table
from whet.tasks.qa.types import Questions

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True, kw_only=True)
class HubSource:
    """Which data set `datasets.load_dataset` shall load."""

    dataset_name: str
    """A name on the hub, or a local folder that holds Parquet, JSON lines or CSV files."""
    dataset_config_name: str | None = None
    cache_dir: Path | None = None
    token: str | bool | None = field(default=None, repr=False)
    """The hub's token; True takes the one that `hf auth login` stored."""


def read_hub(
    source: HubSource, split: str, limit: int | None = None, *, require_answers: bool = True, skip_bad: bool = False
) -> Questions:
    """Return the questions of one split, checked as `read_questions` checks a file. No code of the data set is run."""
    name = f"data set {source.dataset_name!r}, split {split!r}"
    collector = Collector(name, limit=limit, require_answers=require_answers, skip_bad=skip_bad)
    dataset = _load(source, split, name)
    rows = len(dataset) if limit is None else min(limit, len(dataset))
    try:
        with no_cycle_search():
            read_table(dataset.with_format("arrow")[:rows], collector)
    except Rejected as problem:
        raise problem.error(name) from None
    return collector.finish()


def _load(source: HubSource, split: str, name: str) -> Dataset:
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    try:
        with _without_the_hub(source.dataset_name):
            return load_dataset(
                source.dataset_name,
                source.dataset_config_name,
                split=split,
                cache_dir=None if source.cache_dir is None else str(source.cache_dir),
                token=source.token,
            )
    # RuntimeError: the data set wants to run a script of its own, which `datasets` refuses
    except (DatasetsError, OSError, ValueError, RuntimeError) as error:
        raise DataError(
            what=f"{name}: cannot be loaded",
            got=f"{type(error).__name__}: {error}",
            why="`datasets.load_dataset` refused",
            fix="check --dataset_name, --dataset_config_name and the network; or use --train_file",
        ) from error


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
