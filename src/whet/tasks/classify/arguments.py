"""The options of text classification, in the names and with the defaults of transformers' run_classification.py."""

from dataclasses import dataclass
from typing import Any

from whet.config.aliases import Alias
from whet.config.settings import checked, printable
from whet.jobs.fields import OFF, REFUSED
from whet.tasks.classify.fields import ClassifyFields
from whet.tasks.classify.rules import CLASSIFY_RULES

_HEADINGS = {
    "model_name_or_path": "Model",
    "dataset_name": "Data",
    "do_regression": "Labels",
    "max_seq_length": "Length",
}

_ALIASES = {
    "remove_splits": Alias(to=None, kind=str | None, quiet=True, note="only the splits that a run uses are read"),
    "remove_columns": Alias(to=None, kind=str | None, quiet=True, note="only the columns of texts and labels are read"),
}
"""Flags of run_classification.py without effect."""


@checked(headings=_HEADINGS, rules=CLASSIFY_RULES, refused=REFUSED, off=OFF, aliases=_ALIASES)
@dataclass(frozen=True, kw_only=True, slots=True)
class ClassifyArguments(ClassifyFields):
    """Which model learns which labels, from which data."""

    def to_dict(self) -> dict[str, Any]:
        """Return every field by name, ready for JSON, the token masked."""
        return printable(self)
