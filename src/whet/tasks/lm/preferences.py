"""Rows of preferences, in the forms that TRL's DPOTrainer reads: a prompt with a chosen and a rejected completion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from whet.data.files.rejected import Rejected
from whet.data.files.row_fields import text_field
from whet.tasks.lm.messages import checked_messages

PROMPT, CHOSEN, REJECTED = "prompt", "chosen", "rejected"
_EXAMPLE = '{"prompt": "...", "chosen": "...", "rejected": "..."}'


def form(found: Sequence[str]) -> tuple[Literal["preference"], list[str]]:
    """Return the columns that are read of a table with these columns."""
    missing = [name for name in (CHOSEN, REJECTED) if name not in found]
    if missing:
        raise Rejected(
            f"there is no column {' or '.join(missing)}",
            got=f"columns found: {', '.join(map(str, found)) or 'none'}",
            why="--loss dpo learns from a prompt, the completion that was chosen and the one that was rejected",
            fix=f"write rows as {_EXAMPLE}, or leave --loss dpo out",
        )
    tools = [name for name in ("tools",) if name in found]
    return "preference", [*([PROMPT] if PROMPT in found else []), CHOSEN, REJECTED, *tools]


def value(row: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Return prompt, chosen and rejected completion of a row: texts, or lists of messages.

    Without a prompt, or if the completions are conversations that repeat it, the prompt is what both begin with.
    """
    chosen, rejected = row.get(CHOSEN), row.get(REJECTED)
    if isinstance(chosen, list) and isinstance(rejected, list):
        return _of_messages(row, checked_messages(chosen, CHOSEN), checked_messages(rejected, REJECTED))
    chosen, rejected = text_field(row, CHOSEN), text_field(row, REJECTED)
    if row.get(PROMPT) is not None:
        return text_field(row, PROMPT), chosen, rejected
    n = _common(chosen, rejected)
    n -= n > 0 and chosen[n - 1] == " "  # the space belongs to the word after it
    return _split(chosen[:n], chosen[n:], rejected[n:])


def not_asked_for(found: Sequence[str]) -> Rejected:
    """Return the refusal of preferences in a run that learns texts."""
    return Rejected(
        "the rows are preferences",
        got=f"columns found: {', '.join(map(str, found))}",
        why="a run without --loss dpo learns texts, messages, or prompt and completion",
        fix="add --loss dpo, or name the column of the text: --dataset_text_field NAME",
    )


def _of_messages(row: Mapping[str, Any], chosen: Any, rejected: Any) -> tuple[Any, Any, Any]:
    prompt = row.get(PROMPT)
    if isinstance(prompt, list):
        return checked_messages(prompt, PROMPT), chosen, rejected
    n = _common(chosen, rejected)
    return _split(chosen[:n], chosen[n:], rejected[n:])


def _split(prompt: Any, chosen: Any, rejected: Any) -> tuple[Any, Any, Any]:
    if not chosen or not rejected:
        raise Rejected(
            "the chosen and the rejected completion do not differ after what they begin with",
            got=prompt,
            why="what both begin with is the prompt, and each needs a completion of its own",
            fix=f"write the prompt in a column of its own: {_EXAMPLE}",
        )
    return prompt, chosen, rejected


def _common(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return how many items both begin with."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((n for n, (one, other) in pairs if one != other), min(len(first), len(second)))
