"""The splits of a run's data: what asks for each, and what its settings and files are called."""

from collections.abc import Mapping
from typing import NamedTuple


class SplitNames(NamedTuple):
    """The names of one split."""

    asked_by: str
    """The setting of the training that asks for it."""
    prefix: str
    """What its metrics and files begin with."""
    file: str
    """The setting that names its file."""
    of_dataset: str
    """The setting that names it in a data set of the hub."""
    limit: str
    """The setting that says how many of its first examples are used."""


SPLITS: Mapping[str, SplitNames] = {
    "train": SplitNames("do_train", "train", "train_file", "train_split_name", "max_train_samples"),
    "validation": SplitNames("do_eval", "eval", "validation_file", "validation_split_name", "max_eval_samples"),
    "test": SplitNames("do_predict", "predict", "test_file", "test_split_name", "max_predict_samples"),
}
