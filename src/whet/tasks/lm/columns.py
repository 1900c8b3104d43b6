"""Which columns of a table are read as what, under the names of TRL, Axolotl, LLaMA-Factory and OpenAI.

What changes the meaning of a row and cannot be honoured is looked at too: `examples.py` refuses rows that hold it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from whet.data.files.rejected import Rejected
from whet.data.files.table import Notation, TableRows

Form = Literal["lines", "text", "completion", "messages", "preference"]
"""lines: of a plain text file, with their line ends. completion: pairs of a prompt and its completion. preference: a
prompt, the completion that was chosen, and the one that was rejected."""
TEXTS = ("text", "content", "document", "sentence", "story", "body")
MESSAGES = ("messages", "conversations", "conversation")
QUESTIONS, ANSWERS = ("instruction", "question", "query"), ("output", "response", "answer")
"""Columns of a turn of the user and of its answer, which the chat template joins: Alpaca's and their like."""
PROMPT, COMPLETION, CHOSEN, REJECTED = "prompt", "completion", "chosen", "rejected"
"""TRL's names of texts that are joined as they are, or of lists of messages."""
_PARTS_OF_PROMPT = ("input", "context", "article", "passage", "choices", "options")
_SYSTEM = ("system", "system_prompt", "system_message")
_TOOLS = ("tools", "functions")
_PREFERRED = ("preferred_output", "preferred_completion")
_NOT_PREFERRED = ("non_preferred_output", "non_preferred_completion")
_OPENAI_PROMPT, _OPENAI_TOOLS = "input.messages", "input.tools"
_MEDIA = ("images", "image", "videos", "video", "audios", "audio")
_EXAMPLE = '{"prompt": "...", "chosen": "...", "rejected": "..."}'


@dataclass(frozen=True)
class Columns:
    """Which columns are read as what."""

    form: Form
    read: Mapping[str, str]
    """What it is -> the column. question: a turn of the user; answer: the assistant's."""
    looked_at: Mapping[str, str] = field(default_factory=dict)
    """Columns whose rows are refused if they say what cannot be honoured."""
    notation: Notation = "json"

    @property
    def all(self) -> list[str]:
        """Every column that rows are taken with."""
        return [*{**dict.fromkeys(self.read.values()), **dict.fromkeys(self.looked_at.values())}]

    def __contains__(self, what: str) -> bool:
        return what in self.read


class _Known:
    """The columns of a table by their names, in capitals or not."""

    def __init__(self, table: TableRows) -> None:
        self.names = [*table.columns, *(name for name in table.objects if name not in table.columns)]
        self._by_name = {str(name).lower(): name for name in reversed(self.names)}
        self.notation: Notation = table.notation

    def first(self, *names: str) -> str | None:
        """Return the first of these that the table has."""
        return next((self._by_name[name] for name in names if name in self._by_name), None)

    def described(self) -> str:
        """Return the columns for a message."""
        return f"columns found: {', '.join(map(str, self.names)) or 'none'}"

    def columns(self, form: Form, looked_at: Sequence[str] = (), **read: str | None) -> Columns:
        """Return the columns that are there of those that are read, and of those that are looked at."""
        there = {what: name for what, name in read.items() if name is not None}
        seen: dict[str, str] = {}
        for name in looked_at:
            column = self.first(name)
            if column is not None and column not in there.values():
                seen[name] = column
        return Columns(form, there, seen, self.notation)


_OF_A_CHAT = ("weight", *_MEDIA)
_OF_AN_ANSWER = ("label", "kto_tag", *_OF_A_CHAT)


def choose_columns(table: TableRows, text_column: str | None, *, pairs: bool) -> Columns:
    """Return what the rows of a table are, and which columns are read as what; raises Rejected if it is not known.

    `text_column` is the one that the user named; `pairs`: whether preferences are learnt.
    """
    known = _Known(table)
    if pairs:
        return _preferences(known)
    if text_column is not None:
        return _named_text(known, text_column)
    more = {"system": known.first(*_SYSTEM), "tools": known.first(*_TOOLS)}
    more["chat_template_kwargs"] = known.first("chat_template_kwargs")
    if messages := known.first(*MESSAGES):
        mask = known.first("loss_mask")
        return known.columns("messages", (*_OF_AN_ANSWER, CHOSEN), messages=messages, **more, loss_mask=mask)
    prompt, completion = known.first(PROMPT), known.first(COMPLETION)
    if prompt and completion:
        looked_at = ("loss_mask", *_OF_AN_ANSWER)
        return known.columns("completion", looked_at, prompt=prompt, completion=completion, **more)
    _refuse_parts_of_conversations(known)
    text = known.first(*TEXTS) or (known.names[0] if len(known.names) == 1 else None)
    question, answer = known.first(*QUESTIONS), known.first(*ANSWERS)
    if text is None and question and answer:
        return known.columns(
            "messages", ("loss_mask", *_OF_AN_ANSWER), question=question, input=_input_of(known, question),
            history=known.first("history"), answer=answer, **more,
        )  # fmt: skip
    if text is None and known.first(CHOSEN, *_PREFERRED) and known.first(REJECTED, *_NOT_PREFERRED):
        raise not_asked_for(known.described())
    if text is None or prompt or question or known.first(COMPLETION, *ANSWERS, CHOSEN) not in (None, text):
        raise _unclear(known, text)
    return known.columns("text", ("weight",), text=text)


def not_asked_for(got: object) -> Rejected:
    """Return the refusal of preferences in a run that learns texts."""
    return Rejected(
        "the rows are preferences",
        got=got,
        why="a run without --loss dpo learns texts, messages, or prompt and completion",
        fix="add --loss dpo, or name the column of the text: --dataset_text_field NAME",
    )


def _named_text(known: _Known, text_column: str) -> Columns:
    if text_column in known.names:
        return known.columns("text", ("weight",), text=text_column)
    raise Rejected(
        f"the column {text_column} is missing",
        got=known.described(),
        why="--dataset_text_field names it",
        fix="name the column that holds the text in --dataset_text_field",
    )


def _preferences(known: _Known) -> Columns:
    chosen, rejected = known.first(CHOSEN, *_PREFERRED), known.first(REJECTED, *_NOT_PREFERRED)
    missing = [name for name, column in ((CHOSEN, chosen), (REJECTED, rejected)) if column is None]
    if missing:
        raise Rejected(
            f"there is no column {' or '.join(missing)}",
            got=known.described(),
            why="--loss dpo learns from a prompt, the completion that was chosen and the one that was rejected",
            fix=f"write rows as {_EXAMPLE}, or leave --loss dpo out",
        )
    prompt = known.first(PROMPT)
    messages = None if prompt else known.first(_OPENAI_PROMPT, *MESSAGES)
    question = None if prompt or messages else known.first(*QUESTIONS, "input")
    instruct = {"question": question, "input": _input_of(known, question), "history": known.first("history")}
    return known.columns(
        "preference", (*_OF_A_CHAT, "loss_mask"), prompt=prompt, messages=messages, **(instruct if question else {}),
        system=known.first(*_SYSTEM), tools=known.first(*_TOOLS, _OPENAI_TOOLS),
        chat_template_kwargs=known.first("chat_template_kwargs"), chosen=chosen, rejected=rejected,
    )  # fmt: skip


def _input_of(known: _Known, question: str | None) -> str | None:
    """Return the column that follows the question on a line of its own, as Alpaca's `input` and Dolly's `context`.

    Refuses one that programs put elsewhere in the prompt.
    """
    if question is None:
        return None
    usual = ("input", "context") if question.lower() == "instruction" else ("input",)
    columns = [column for name in _PARTS_OF_PROMPT if (column := known.first(name)) not in (None, question)]
    found = next((column for column in columns if column is not None and column.lower() in usual), None)
    odd = [str(column) for column in columns if column != found]
    if odd:
        raise Rejected(
            f"{' and '.join(odd)} may belong to the prompt",
            got=known.described(),
            why=f"{question} would be learnt without it, and programs differ in where they put it",
            fix=f"write the complete prompt into {question}, and leave {' and '.join(odd)} out",
        )
    return found


def _refuse_parts_of_conversations(known: _Known) -> None:
    """Refuse files whose rows are single messages, or tokens."""
    if {"role", "content"} <= set(known.names) or {"from", "value"} <= set(known.names):
        raise Rejected(
            "each row is one message, not a conversation",
            got=known.described(),
            why="nothing says which messages belong together, and separate texts teach no answer to a question",
            fix='write a conversation a line: {"messages": [{"role": "user", "content": "..."}, ...]}',
        )
    if "input_ids" in known.names:
        raise Rejected(
            "the rows hold tokens",
            got=known.described(),
            why="whet lm reads texts and tokenises them itself, so that the tokens are those of the model",
            fix="name the file with the texts; whet.Trainer takes rows of tokens",
        )


def _unclear(known: _Known, text: str | None) -> Rejected:
    """Return the refusal of a table whose text is not known, with how to name a prompt and its answer."""
    prompt, answer = known.first(PROMPT, *QUESTIONS), known.first(COMPLETION, *ANSWERS)
    parts = [f"name the column of the text: --dataset_text_field {text or 'NAME'}"]
    if text and known.first(*QUESTIONS) and known.first(*ANSWERS):
        parts.append(f"leave the column {text} out, so that the others are a question and its answer")
    if prompt and answer:
        names = " and ".join(f"{old} to {new}" for old, new in ((prompt, PROMPT), (answer, COMPLETION)) if old != new)
        if names:
            parts.insert(0, f"rename {names}, so that the answer alone is learnt; put a column that belongs to the "
                            "prompt into it")  # fmt: skip
    elif prompt or answer:
        parts.insert(0, f"write rows with {PROMPT} and {COMPLETION}, so that the answer alone is learnt")
    return Rejected(
        "it is not known which column holds the text",
        got=known.described(),
        why="rows have text, messages, or prompt and completion"
        + (f"; {text} alone would be learnt without {prompt or answer or CHOSEN}" if text else ""),
        fix="; or ".join(parts),
    )
