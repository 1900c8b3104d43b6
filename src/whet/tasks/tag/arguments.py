"""The options of token classification, in the names and with the defaults of transformers' run_ner.py."""

from dataclasses import dataclass
from typing import Any

from whet.config.settings import checked, printable
from whet.jobs.fields import OFF, REFUSED
from whet.tasks.tag.fields import TagFields
from whet.tasks.tag.rules import TAG_RULES

_HEADINGS = {"model_name_or_path": "Model", "dataset_name": "Data", "max_seq_length": "Length and labels"}


@checked(headings=_HEADINGS, rules=TAG_RULES, refused=REFUSED, off=OFF)
@dataclass(frozen=True, kw_only=True, slots=True)
class TagArguments(TagFields):
    """Which model learns which tags, from which sentences."""

    def to_dict(self) -> dict[str, Any]:
        """Return every field by name, ready for JSON, the token masked."""
        return printable(self)
