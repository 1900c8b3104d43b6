"""Examples of language modelling: texts, prompts with completions, or conversations, as the data has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from itertools import islice
from typing import Any, Literal

from whet.data.files.bad_rows import BadRows
from whet.data.files.rejected import Rejected
from whet.data.files.row_fields import object_of, text_field
from whet.data.files.table import TableRows
from whet.jobs.left_out import LeftOut
from whet.tasks.lm import preferences
from whet.tasks.lm.messages import TOOLS, Tools, are_messages, checked_messages, checked_tools

_EXAMPLE = '{"text": "..."}'
"""What a row looks like, for messages."""

Form = Literal["lines", "text", "completion", "messages", "preference"]
"""lines: of a plain text file, with their line ends. completion: pairs of a prompt and its completion. preference: a
prompt, the completion that was chosen, and the one that was rejected."""
TEXTS = ("text", "content", "document", "sentence", "story", "body")
MESSAGES, PROMPT, COMPLETION = "messages", "prompt", "completion"
CONVERSATIONS = "conversations"
"""Messages with other names for the same: ShareGPT's."""
PROMPTS, ANSWERS = (PROMPT, "instruction", "question", "query"), (COMPLETION, "response", "output", "answer")


@dataclass(frozen=True)
class Examples:
    """The examples of one source, and where each stands; `skip_bad` has left out what `left_out` names."""

    source: str
    form: Form
    values: Sequence[Any]
    """Texts, tuples of texts, or lists of messages, by the form."""
    places: Sequence[str]
    left_out: LeftOut = field(default_factory=LeftOut)
    tools: Sequence[Tools] = ()
    """What each conversation may call, for the chat template; empty: none of them has any."""

    def __len__(self) -> int:
        return len(self.values)


def from_lines(text: str, bad: BadRows, limit: int | None) -> Examples:
    """Return the lines of a plain text, with their ends."""
    lines, places = [], []
    text = text.replace("\r\n", "\n").replace("\r", "\n")  # as Python reads a text file
    for n, line in enumerate(islice(StringIO(text), limit), start=1):  # str.splitlines also parts at U+2028, U+0085 ...
        if "\0" in line:
            bad.add(_null_character(line), lambda n=n: f"line {n}")
            continue
        lines.append(line)
        places.append(f"line {n}")
    bad.refuse(sum(not line.isspace() for line in lines), "line of text")
    return Examples(bad.source, "lines", lines, places, LeftOut.of(bad))


def from_table(
    rows: TableRows, text_column: str | None, bad: BadRows, limit: int | None, *, pairs: bool = False
) -> Examples:
    """Return the examples of a table, or its `pairs` of completions; raises one DataError that reports all bad rows."""
    form, columns = preferences.form(rows.columns) if pairs else choose_form(rows.columns, text_column)
    found: list[tuple[Any, Tools]] = []
    places = []
    for n, (place, row) in enumerate(rows.take(columns)):
        if n == limit:
            break
        try:
            found.append(_value_and_tools(object_of(row, _EXAMPLE), form, columns))
        except Rejected as problem:
            bad.add(problem, lambda place=place: place)
            continue
        places.append(place)
    bad.refuse(len(found), "example")
    values, tools = [value for value, _ in found], [one for _, one in found]
    return Examples(bad.source, form, values, places, LeftOut.of(bad), tools if any(tools) else ())


def choose_form(found: Sequence[str], text_column: str | None) -> tuple[Form, list[str]]:
    """Return what the rows of a table with these columns are, and the columns that are read."""
    if text_column is not None and text_column not in found:
        raise Rejected(
            f"the column {text_column} is missing",
            got=f"columns found: {', '.join(map(str, found)) or 'none'}",
            why="--dataset_text_field names it",
            fix="name the column that holds the text in --dataset_text_field",
        )
    tools = [TOOLS] if TOOLS in found else []
    if text_column is None and CONVERSATIONS in found and MESSAGES not in found:
        return "messages", [CONVERSATIONS, *tools]
    if text_column is None and MESSAGES in found:
        return "messages", [MESSAGES, *tools]
    if text_column is None and {PROMPT, COMPLETION} <= set(found):
        return "completion", [PROMPT, COMPLETION, *tools]
    usual = text_column or next((name for name in TEXTS if name in found), None)
    if usual is None and len(found) == 1:
        usual = found[0]
    if usual is None and {preferences.CHOSEN, preferences.REJECTED} <= set(found):
        raise preferences.not_asked_for(found)
    if usual is None:
        raise Rejected(
            "it is not known which column holds the text",
            got=f"columns found: {', '.join(map(str, found)) or 'none'}",
            why="rows have text, messages, or prompt and completion",
            fix=_renamed(found) or "name the column of the text: --dataset_text_field NAME",
        )
    return "text", [usual]


def _renamed(found: Sequence[str]) -> str | None:
    """Return how to name a prompt and its completion that have other usual names; None: there are none."""
    prompt = next((name for name in PROMPTS if name in found), None)
    answer = next((name for name in ANSWERS if name in found), None)
    if prompt is None or answer is None:
        return None
    pairs = ((prompt, PROMPT), (answer, COMPLETION))
    names = " and ".join(f"{old} to {new}" for old, new in pairs if old != new)
    return f"rename {names}, so that the answer alone is learnt; put a column that belongs to the prompt into it"


def _value_and_tools(row: Mapping[str, Any], form: Form, columns: Sequence[str]) -> tuple[Any, Tools]:
    value, tools = _value(row, form, columns), None if form == "text" else checked_tools(row.get(TOOLS))
    if tools and not is_chat(value):
        raise Rejected(
            f"{TOOLS} stand next to texts",
            got=tools,
            why="the chat template shows tools, and a text that is no conversation has none",
            fix=f"write the row as messages, or leave {TOOLS} out",
        )
    return value, tools


def is_chat(value: Any) -> bool:
    """Return whether an example is a conversation, or a prompt with completions that are."""
    return isinstance(value, list) or (isinstance(value, tuple) and isinstance(value[0], list))


def _value(row: Mapping[str, Any], form: Form, columns: Sequence[str]) -> Any:
    if form == "text":
        return text_field(row, columns[0])
    if form == "preference":
        return preferences.value(row)
    if form == "messages":
        return checked_messages(row.get(columns[0]), columns[0])
    prompt, completion = row.get(PROMPT), row.get(COMPLETION)
    if are_messages(row, PROMPT, COMPLETION):
        return checked_messages(prompt, PROMPT), checked_messages(completion, COMPLETION)
    return text_field(row, PROMPT), text_field(row, COMPLETION)


def _null_character(line: str) -> Rejected:
    return Rejected(
        f"the line holds the character U+0000 at {line.index(chr(0))}",
        got=ascii(line[:40]),
        why="the null character is no text; tokenizers fail on it",
        fix="remove it, or name a file of text",
    )
