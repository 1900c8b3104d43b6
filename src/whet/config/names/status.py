"""The status of each name of transformers' TrainingArguments: the source for docs and tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from whet.config.arguments import TrainingArguments
from whet.config.names.aliases import ALIASES
from whet.config.names.not_honoured import REFUSED
from whet.config.names.off_values import OFF
from whet.config.options import help_texts, options_of

Outcome = Literal["works", "translated", "no difference", "refused"]


@dataclass(frozen=True, kw_only=True)
class FieldStatus:
    """The status of one name."""

    name: str
    outcome: Outcome
    note: str
    """works: its effect. translated: the field. no difference: why. refused: what to do instead."""
    passes: tuple[object, ...] = ()
    """Values of a refused name without effect, which are accepted."""


def statuses() -> dict[str, FieldStatus]:
    """Return the status of every name that TrainingArguments knows, sorted: fields, other names, refused ones."""
    texts = help_texts(TrainingArguments)
    found = [
        FieldStatus(name=name, outcome="works", note=texts.get(name, "").split(". ")[0].rstrip(".") + ".")
        for name in options_of(TrainingArguments)
    ]
    for name, alias in ALIASES.items():
        outcome: Outcome = "no difference" if alias.to is None else "translated"
        note = f"{alias.name} of {alias.to}" if alias.to else alias.note
        found.append(FieldStatus(name=name, outcome=outcome, note=note))
    found += [
        FieldStatus(name=name, outcome="refused", note=instead, passes=OFF.get(name, ()))
        for name, instead in REFUSED.items()
    ]
    return {status.name: status for status in sorted(found, key=lambda status: status.name)}
