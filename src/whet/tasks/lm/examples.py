"""Examples of language modelling: texts, prompts with completions, conversations, or preferences, as the data has them.

First which columns of a table are read as what, under the names of TRL, Axolotl, LLaMA-Factory and OpenAI; then how a
row becomes an example, or is refused for what cannot be honoured; at the end the files and data sets of a split.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from whet import strict_json
from whet.console import columns_line
from whet.data.files.bad_rows import BadRows, Rejected, no_cycle_search
from whet.data.files.file_bytes import PARQUET, read_bytes, text_of
from whet.data.files.row_fields import kind, object_of, text_field
from whet.data.files.table import Notation, TableRows, read_table
from whet.errors import ConfigError
from whet.jobs.fields import file_of, limit_of
from whet.jobs.hub_data import hub_examples
from whet.jobs.left_out import LeftOut
from whet.tasks.lm.arguments import LmArguments
from whet.tasks.lm.messages import (
    ASSISTANT,
    MEDIA,
    NO_INPUTS,
    TOOLS,
    USER,
    Message,
    TemplateInputs,
    are_messages,
    checked_messages,
    checked_tools,
    learnt_flag,
    messages_in_cell,
    seems_messages,
    turns,
    with_system,
    without_nulls,
)
from whet.watch import printing

_EXAMPLE_OF_A_PAIR = '{"prompt": "...", "chosen": "...", "rejected": "..."}'
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


_OF_A_CHAT = ("weight", *MEDIA)
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
            fix=f"write rows as {_EXAMPLE_OF_A_PAIR}, or leave --loss dpo out",
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


def preference_of(row: Mapping[str, Any], *, unified: bool = False) -> tuple[Any, Any, Any]:
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
            fix=f"write the prompt in a column of its own, and words into each completion: {_EXAMPLE_OF_A_PAIR}",
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


_EXAMPLE = '{"text": "..."}'
"""What a row looks like, for messages."""
_MOST_NAMED = 5
"""Fields in a message."""


@dataclass(frozen=True)
class Examples:
    """The examples of one source, and where each stands; `skip_bad` has left out what `left_out` names."""

    source: str
    form: Form
    values: Sequence[Any]
    """Texts, tuples of texts, or lists of messages, by the form."""
    places: Sequence[str]
    left_out: LeftOut = field(default_factory=LeftOut)
    inputs: Sequence[TemplateInputs] = ()
    """What the chat template gets next to each conversation; empty: nothing."""
    columns: str = ""
    """Which columns were read as what, and which were not read, for people."""

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
    columns = choose_columns(rows, text_column, pairs=pairs)
    read, flags = _READERS[columns.form], _flags(rows, columns)
    values: list[Any] = []
    inputs: list[TemplateInputs] = []
    places = []
    for n, (place, row) in enumerate(rows.take(columns.all)):
        if n == limit:
            break
        try:
            row = object_of(row, _EXAMPLE)
            if columns.looked_at:
                _refuse_unhonoured(row, columns, flags)
            value = read(row, columns)
            given = _inputs(row, columns, value)
        except Rejected as problem:
            bad.add(problem, lambda place=place: place)
            continue
        values.append(value)
        inputs.append(given)
        places.append(place)
    bad.refuse(len(values), "example")
    line = columns_line(columns.read, rows.not_read(columns.read.values()))
    given = inputs if any(one is not NO_INPUTS for one in inputs) else ()
    return Examples(bad.source, columns.form, values, places, LeftOut.of(bad), given, line)


def _text(row: Mapping[str, Any], columns: Columns) -> Any:
    name = columns.read["text"]
    value = row.get(name)
    if isinstance(value, Mapping | list):
        raise Rejected(
            f"{name} is {kind(value)}, not a text",
            got=value,
            why="a text is learnt as it is: the notation of a list or an object would be learnt like words",
            fix=_words_of_object(name, value, columns) if isinstance(value, Mapping) else _words_of_list(name, value),
        )
    return text_field(row, name)


def _words_of_object(name: str, found: Mapping[str, Any], columns: Columns) -> str:
    """Return how to give the words of an object, such as the body of a request in a batch of OpenAI's."""
    parts = {part.lower(): part for part in found}
    if messages := next((parts[one] for one in MESSAGES if isinstance(found.get(parts.get(one, "")), list)), None):
        tools = f", and {TOOLS} likewise" if found.get(TOOLS) else ""
        return f'take {name}.{messages} out into a column of its own: {{"messages": [...]}}{tools}'
    texts = [part for part, value in found.items() if isinstance(value, str)][:_MOST_NAMED]
    if not texts:
        return "write its words alone, as a text"
    if columns.notation == "json":  # paths are columns
        named = ", or ".join(f"{name}.{part}" for part in texts)
        return f"name its field that holds the text: --dataset_text_field {named}"
    return f"write the words of its field {' or '.join(texts)} into a column of their own: text"


def _words_of_list(name: str, found: Sequence[Any]) -> str:
    if not found:
        return "fill it in, or remove the row"
    if all(isinstance(one, str) for one in found):
        return "write a row for each of its texts"
    if all(isinstance(one, Mapping) and ("role" in one or "from" in one) for one in found):
        renamed = f"rename the column {name} to messages"
        return "leave --dataset_text_field out" if name.lower() in MESSAGES else renamed
    return "write the row as messages, or with prompt and completion, so that the completion alone is learnt"


def _conversation(row: Mapping[str, Any], columns: Columns) -> Any:
    """Return the messages of a row, or the turns that its question, its answer and what stands before them are."""
    read, unified = columns.read, columns.notation == "arrow"
    if "messages" in read:
        found = checked_messages(row.get(read["messages"]), read["messages"], unified=unified)
        if "loss_mask" in read:
            found = _masked(found, row.get(read["loss_mask"]), read["loss_mask"])
        if row.get(columns.looked_at.get(CHOSEN, "")) is not None and found[-1]["role"] != ASSISTANT:
            raise not_asked_for([read["messages"], CHOSEN, REJECTED])
    else:
        answer = {"role": ASSISTANT, "content": text_field(row, read["answer"])}
        found = [*turns(row, read, unified=unified), answer]
    return with_system(found, row.get(read["system"]), read["system"]) if "system" in read else found


def _masked(messages: list[dict[str, Any]], mask: Any, name: str) -> list[dict[str, Any]]:
    """Return the messages with a row's mask of them."""
    if mask is None or mask == []:
        return messages
    if not isinstance(mask, list) or len(mask) != len(messages):
        raise Rejected(
            f"{name} has not one entry for each message",
            got=mask,
            why="whet reads a mask of messages; one of tokens belongs to another tokenizer",
            fix=f"write {name} as a list of 0 and 1 with an entry for each message, or leave it out",
        )
    found = []
    for n, message in enumerate(messages):
        learnt, marked = learnt_flag(mask[n], f"{name}[{n}]"), Message(message)
        marked.learnt = None if learnt and message["role"] == ASSISTANT else learnt
        found.append(marked)
    return found


def _completion(row: Mapping[str, Any], columns: Columns) -> Any:
    read, unified = columns.read, columns.notation == "arrow"
    prompt, completion = (row.get(read[what]) for what in _BOTH)
    if seems_messages(prompt) and (columns.notation == "csv" or seems_messages(completion)):  # else JSON to learn
        row = _cells_as_messages(row, (read["prompt"], read["completion"]))
    if are_messages(row, read["prompt"], read["completion"]):
        prompt, completion = (checked_messages(row[read[what]], read[what], unified=unified) for what in _BOTH)
        return with_system(prompt, row.get(read["system"]), read["system"]) if "system" in read else prompt, completion
    prompt, completion = text_field(row, read["prompt"]), text_field(row, read["completion"])
    _refuse_system(row, columns)
    return prompt, completion


_BOTH = (PROMPT, COMPLETION)


def _preference(row: Mapping[str, Any], columns: Columns) -> Any:
    """Return prompt, chosen and rejected completion of a row: texts, or lists of messages."""
    read, unified = columns.read, columns.notation == "arrow"
    answers = (read["chosen"], read["rejected"])
    as_messages = columns.notation == "csv" or all(seems_messages(row.get(name)) for name in answers)
    row = _cells_as_messages(row, (read.get("prompt"), *(answers if as_messages else ())))
    pair = {what: row.get(read[what]) for what in (CHOSEN, REJECTED)}
    pair = {what: [one] if isinstance(one, Mapping) else one for what, one in pair.items()}
    texts = all(isinstance(one, str) for one in pair.values())
    if "prompt" in read:
        pair[PROMPT] = row.get(read["prompt"])
    elif "messages" in read:
        pair[PROMPT] = checked_messages(row.get(read["messages"]), read["messages"], unified=unified)
    elif "question" in read:
        asked = turns(row, read, unified=unified)
        pair[PROMPT] = asked if texts or len(asked) > 1 else asked[0]["content"]
    if texts and isinstance(pair.get(PROMPT), list):
        pair |= {what: [{"role": ASSISTANT, "content": text_field(pair, what)}] for what in (CHOSEN, REJECTED)}
    prompt, chosen, rejected = preference_of(pair, unified=unified)
    if not isinstance(prompt, list):
        _refuse_system(row, columns)
    elif "system" in read:
        prompt = with_system(prompt, row.get(read["system"]), read["system"])
    return prompt, chosen, rejected


_READERS: Mapping[Form, Callable[[Mapping[str, Any], Columns], Any]] = {
    "text": _text, "messages": _conversation, "completion": _completion, "preference": _preference,
}  # fmt: skip


def _cells_as_messages(row: Mapping[str, Any], names: Sequence[str | None]) -> Mapping[str, Any]:
    """Return a row with the lists of messages that these texts hold as JSON; each is looked at by itself."""
    return {**row, **{name: messages_in_cell(row[name], name) for name in names if name is not None and name in row}}


def _refuse_system(row: Mapping[str, Any], columns: Columns) -> None:
    """Refuse a system prompt next to texts that are joined as they are."""
    system = columns.read.get("system")
    if system is None or row.get(system) in (None, ""):
        return
    answers = f"{COMPLETION} to output" if "completion" in columns else "keep chosen and rejected"
    raise Rejected(
        f"{system} stands next to texts",
        got=row[system],
        why=f"{PROMPT} is learnt from as it is, end to end with what follows it, and has no place for it",
        fix=f"rename {PROMPT} to instruction ({answers}), which makes the row a conversation by the chat template; or "
        f"write {system} into {PROMPT} and leave the column out",
    )


_WANTED = {"label", "kto_tag"}
_NO, _YES_OR_GAP = {"0", "0.0"}, {"1", "1.0", "", "None"}


def _flags(rows: TableRows, columns: Columns) -> set[str]:
    """Return the columns of wanted completions whose values are 0 and 1 alone, which mean false and true there.

    A `label` next to other texts than a prompt and its completion may be that of a class.
    """
    is_pair = columns.form == "completion"
    flags = {name for what, name in columns.looked_at.items() if what == "kto_tag" or (what == "label" and is_pair)}
    for _, row in rows.take([*flags]) if flags else ():
        if isinstance(row, Mapping):
            flags -= {name for name in flags if str(row.get(name)).strip() not in _NO | _YES_OR_GAP}
    return flags


def _refuse_unhonoured(row: Mapping[str, Any], columns: Columns, flags: Collection[str]) -> None:
    """Refuse a row that says what the run cannot honour: an unwanted completion, a weight, images."""
    for what, name in columns.looked_at.items():
        value = row.get(name)
        if what in _WANTED:
            is_zero = name in flags and str(value).strip() in _NO
            if is_zero or value is False or (isinstance(value, str) and value.strip().lower() == "false"):
                raise Rejected(
                    f"{name} is {value if is_zero else 'false'}: the completion is one that nobody wants",
                    got=value,
                    why="the run would learn it like the others; whet has no loss of single completions (KTO)",
                    fix="leave such rows out: --skip_bad; or write pairs with chosen and rejected for --loss dpo"
                    + (f"; if {name} means something else, rename the column" if is_zero else ""),
                )
        elif what == "weight":
            if value not in (None, "", 1, "1", "1.0"):
                raise Rejected(
                    f"{name} is a weight other than 1",
                    got=value,
                    why="every row counts the same: the loss is a mean over tokens",
                    fix=f"leave {name} out, repeat rows that shall count more, and remove those with weight 0",
                )
        elif what != CHOSEN and value not in (None, "", []):
            media = what != "loss_mask"
            raise Rejected(
                f"{name} holds what whet lm does not read",
                got=value if not media else kind(value),
                why="the model reads texts" if media else "it masks tokens or messages, and the row has no messages",
                fix=f"remove the row, or the column {name} if the texts mean the same without it"
                if media
                else f"leave {name} out, or write the row as messages with a weight of 0 or 1 each",
            )


def _inputs(row: Mapping[str, Any], columns: Columns, value: Any) -> TemplateInputs:
    """Return what the chat template of a row gets next to its messages; a text takes none."""
    tools_name, more_name = columns.read.get("tools"), columns.read.get("chat_template_kwargs")
    if tools_name is None and more_name is None:
        return NO_INPUTS
    tools = checked_tools(row.get(tools_name)) if tools_name else None
    more = without_nulls(row.get(more_name)) if more_name else None
    more = _object_in_cell(more) if isinstance(more, str) else more
    if not tools and not more:
        return NO_INPUTS
    if more is not None and not isinstance(more, Mapping):
        raise Rejected(
            f"{more_name} is {kind(more)}, not an object",
            got=more,
            why="it names variables of the chat template",
            fix=f'write {more_name} as {{"enable_thinking": false}}, or leave it out',
        )
    if not is_chat(value):
        raise Rejected(
            f"{TOOLS if tools else more_name} stand next to texts",
            got=tools or more,
            why="they are for the chat template, and a text that is no conversation has none",
            fix=f"write the row as messages, or leave {tools_name if tools else more_name} out",
        )
    return TemplateInputs(tools, more or {})


def _object_in_cell(cell: str) -> Any:
    try:
        return strict_json.parse_document(cell) if cell.strip() else None
    except strict_json.BadJson:
        return cell


def is_chat(value: Any) -> bool:
    """Return whether an example is a conversation, or a prompt with completions that are."""
    return isinstance(value, list) or (isinstance(value, tuple) and isinstance(value[0], list))


def _null_character(line: str) -> Rejected:
    return Rejected(
        f"the line holds the character U+0000 at {line.index(chr(0))}",
        got=ascii(line[:40]),
        why="the null character is no text; tokenizers fail on it",
        fix="remove it, or name a file of text",
    )


_PLAIN = (".txt", ".text", ".md")
_TABLES = (".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".parquet")
_WORDS = {
    "lines": "lines of plain text",
    "text": "texts",
    "completion": "prompts with completions",
    "messages": "conversations",
    "preference": "pairs of completions",
}


def read_split(job: LmArguments, name: str) -> Examples:
    """Return the examples of the split `train`, `validation` or `test`."""
    limit, pairs = limit_of(job, name), job.loss == "dpo"
    if (file := file_of(job, name)) is not None:
        found = read_file(file, job.dataset_text_field, limit=limit, skip_bad=job.skip_bad, pairs=pairs)
    else:

        def take(rows: TableRows, bad: BadRows) -> Examples:
            return from_table(rows, job.dataset_text_field, bad, limit, pairs=pairs)

        found = hub_examples(job, name, limit, take)
    _require_completions(job, found)
    found.left_out.log(name, "example")
    printing.show_wrapped(
        f"{name}: {len(found):,} {_WORDS[found.form]}" + (f"; {found.columns}" if found.columns else "")
    )
    return found


def read_file(
    path: Path, text_column: str | None, *, limit: int | None, skip_bad: bool, pairs: bool = False
) -> Examples:
    """Return the examples of a file, or its `pairs`; raises DataError with everything that is wrong in it."""
    bad = BadRows(str(path), skip_bad=skip_bad)
    try:
        with no_cycle_search():
            if _is_plain(path):
                if pairs:
                    choose_columns(TableRows((), lambda _: ()), None, pairs=True)  # refuses: plain text has no columns
                if text_column is not None:
                    raise _no_columns(path, text_column)
                return from_lines(text_of(read_bytes(path)), bad, limit)
            return from_table(read_table(path), text_column, bad, limit, pairs=pairs)
    except Rejected as problem:
        raise problem.error(str(path)) from None


def _no_columns(path: Path, text_column: str) -> ConfigError:
    return ConfigError(
        what=f"dataset_text_field would change nothing with {path}",
        got=text_column,
        why="it names a column, and a file of plain text has none: all of it is learnt",
        fix="leave --dataset_text_field out, or name a file of rows (JSON lines, Parquet or CSV)",
    )


def _require_completions(job: LmArguments, found: Examples) -> None:
    """Refuse the loss of answers alone for texts: these are learnt completely, which the user did not want."""
    asked = next((one for one in ("completion_only_loss", "assistant_only_loss") if getattr(job, one)), None)
    if asked and found.form in ("lines", "text"):
        raise ConfigError(
            what=f"{asked} has no completions in {found.source}",
            got=_WORDS[found.form],
            why="a text is learnt completely: nothing says which part of it is an answer",
            fix=f"write rows with prompt and completion, or with messages; or leave --{asked} out to learn the texts "
            "completely",
        )


def _is_plain(path: Path) -> bool:
    """Return whether the file holds plain text: its name says so, or it is neither a table nor JSON."""
    suffix = path.suffix.lower()
    if suffix in (*_PLAIN, *_TABLES):
        return suffix in _PLAIN
    data = read_bytes(path)
    return not data.startswith(PARQUET) and data.lstrip()[:1] not in (b"{", b"[")
