"""Rows of preferences, in the forms that TRL's DPOTrainer reads: a prompt with a chosen and a rejected completion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from whet.data.files.rejected import Rejected
from whet.data.files.row_fields import text_field
from whet.tasks.lm.columns import CHOSEN, PROMPT, REJECTED
from whet.tasks.lm.messages import USER, are_messages, checked_messages

_EXAMPLE = '{"prompt": "...", "chosen": "...", "rejected": "..."}'


def value(row: Mapping[str, Any], *, unified: bool = False) -> tuple[Any, Any, Any]:
    """Return prompt, chosen and rejected completion of a row: texts, or lists of messages.

    Completions that both repeat the prompt lose it. Without a prompt, it is what both begin with.
    """
    chosen, rejected = row.get(CHOSEN), row.get(REJECTED)
    if are_messages(row, CHOSEN, REJECTED):
        chosen = checked_messages(chosen, CHOSEN, unified=unified)
        return _of_messages(row, chosen, checked_messages(rejected, REJECTED, unified=unified), unified)
    chosen, rejected = text_field(row, CHOSEN), text_field(row, REJECTED)
    if row.get(PROMPT) is not None:
        return _after(text_field(row, PROMPT), chosen, rejected)
    n = _common(chosen, rejected)
    n -= n > 0 and chosen[n - 1] == " "  # the space belongs to the word after it
    return _split(chosen[:n], chosen[n:], rejected[n:])


def _of_messages(row: Mapping[str, Any], chosen: Any, rejected: Any, unified: bool) -> tuple[Any, Any, Any]:
    prompt, n = row.get(PROMPT), _common(chosen, rejected)
    if isinstance(prompt, list):
        return _after(checked_messages(prompt, PROMPT, unified=unified), chosen, rejected)
    if prompt is None:
        return _split(chosen[:n], chosen[n:], rejected[n:])
    text, shared = text_field(row, PROMPT), chosen[:n]
    if any(message["role"] == USER for message in shared):
        _require_said(text, shared)
        return _split(shared, chosen[n:], rejected[n:])
    n_system = next((at for at, message in enumerate(shared) if message["role"] != "system"), n)
    asked = [*shared[:n_system], {"role": USER, "content": text}]
    return _split(asked, chosen[n_system:], rejected[n_system:])


def _after(prompt: Any, chosen: Any, rejected: Any) -> tuple[Any, Any, Any]:
    """Return a prompt and its completions, without the prompt if both completions repeat it."""
    n = len(prompt)
    if chosen[:n] == prompt and rejected[:n] == prompt:
        chosen, rejected = chosen[n:], rejected[n:]
    return _split(prompt, chosen, rejected)


def _require_said(text: str, shared: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a prompt as text that is none of the messages that both completions begin with."""
    if text.strip() not in [str(message.get("content", "")).strip() for message in shared]:
        raise Rejected(
            "the prompt is a text that no message repeats, and the completions begin with another turn of the user",
            got=text,
            why="it is not known which of the two the completions answer",
            fix="leave the column prompt out, if the messages hold all of it, or leave these turns out of chosen and "
            "rejected",
        )


def _split(prompt: Any, chosen: Any, rejected: Any) -> tuple[Any, Any, Any]:
    if not chosen or not rejected:
        raise Rejected(
            "the chosen or the rejected completion is empty after the prompt that both begin with",
            got=prompt,
            why="each needs words of its own after it; what both begin with is the prompt if the row names none",
            fix=f"write the prompt in a column of its own, and words into each completion: {_EXAMPLE}",
        )
    if chosen == rejected:
        raise Rejected(
            "the chosen and the rejected completion are the same",
            got=chosen,
            why="nothing can be preferred to itself: such a pair teaches nothing",
            fix="remove the row, or add --skip_bad, which leaves out such rows and counts them",
        )
    return prompt, chosen, rejected


def _common(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return how many items both begin with."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((n for n, (one, other) in pairs if one != other), min(len(first), len(second)))
