"""The options of question answering, with the names and defaults of the guides' `run_qa.py`."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet.config.settings import checked, printable
from whet.errors import DataError
from whet.jobs.fields import OFF, REFUSED
from whet.tasks.qa.fields import AskFields, QaFields
from whet.tasks.qa.rules import ASK_RULES, DEMO_RULES, QA_RULES

_QA_HEADINGS = {"model_name_or_path": "Model", "dataset_name": "Data", "version_2_with_negative": "Answers"}


@checked(headings=_QA_HEADINGS, rules=QA_RULES, refused=REFUSED, off=OFF)
@dataclass(frozen=True, kw_only=True, slots=True)
class QaArguments(QaFields):
    """The model, the data, and the choice of an answer."""

    def to_dict(self) -> dict[str, Any]:
        """Return every field by name, ready for JSON, the token masked."""
        return printable(self)


@checked(headings={"model": "Question", "version_2_with_negative": "Answers"}, rules=ASK_RULES)
@dataclass(frozen=True, kw_only=True, slots=True)
class AskArguments(AskFields):
    """The model, the questions and the text."""

    def read_context(self) -> str:
        """Return the text that `context` names; raises DataError if it cannot be read or is blank."""
        source = "standard input" if self.context == "-" else self.context
        try:
            raw = sys.stdin.buffer.read() if self.context == "-" else Path(self.context).read_bytes()
            text = raw.decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise _bad_context(source, str(error)) from error
        if not text.strip():
            raise _bad_context(source, "it holds no text")
        return text


@checked(headings={"output_dir": "Demo"}, rules=DEMO_RULES)
@dataclass(frozen=True, kw_only=True, slots=True)
class DemoArguments:
    """How the demonstration is run."""

    output_dir: str = "whet-demo"
    """Folder for the trained model and its results."""
    num_train_epochs: float = 4.0
    """How often every row is seen. 0.5 stops after half of the rows."""
    seed: int = 42
    """Random seed of new weights, dropout and row order."""


def _bad_context(source: str, why: str) -> DataError:
    return DataError(
        what="the context cannot be read",
        got=source,
        why=why,
        fix="name a UTF-8 text file in --context, or pipe one in with --context -",
    )
