"""Messages of conversations in the notations of OpenAI, ShareGPT and their like, as chat templates take them.

Nothing of a message is dropped: a field is read here, refused here, or given to the chat template, and `render.py`
checks that the template shows it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from whet import strict_json
from whet.data.files.bad_rows import Rejected
from whet.data.files.row_fields import kind, text_field

TOOLS = "tools"
Tools = list[dict[str, Any]] | None
"""Functions by their JSON schemas, as chat templates take them."""
USER, ASSISTANT, SYSTEM, TOOL = "user", "assistant", "system", "tool"
Spans = tuple[tuple[int, int], ...]
"""First character, and one past the last, of each part that is learnt."""
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names of the words that come before an answer; chat templates get each under all of them."""
MEANT = ("tool_calls", *REASONING, "refusal")
"""Fields of messages that are words of the speaker: a template that leaves them out is refused."""


class Message(dict[str, Any]):
    """A message whose row says whether it is learnt."""

    learnt: bool | Spans | None = None
    """The parts of its content that are; None: the role decides."""


def learnt_of(message: Mapping[str, Any]) -> bool | Spans | None:
    """Return what the row of a message says of learning it; None: nothing."""
    return message.learnt if isinstance(message, Message) else None


@dataclass(frozen=True, slots=True)
class TemplateInputs:
    """What the chat template gets next to the messages of a row."""

    tools: Tools = None
    more: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the template, such as enable_thinking."""


NO_INPUTS = TemplateInputs()


def checked_tools(found: Any) -> Tools:
    """Return the tools of a row: a list of objects, or JSON with one; None for none. Raises Rejected for others."""
    tools = _parsed(found) if isinstance(found, str) else found
    if not tools:
        return None
    odd = [n for n, one in enumerate(tools) if not isinstance(one, Mapping)] if isinstance(tools, list) else []
    if odd or not isinstance(tools, list):
        what = f"{TOOLS}[{odd[0]}] is {kind(tools[odd[0]])}" if odd else f"{TOOLS} is {kind(tools)}"
        raise Rejected(
            f"{what}, not {'an object' if odd else 'a list of objects'}",
            got=found,
            why="a chat template shows each tool by its name, description and parameters",
            fix=f'write {TOOLS} as [{{"type": "function", "function": {{"name": "...", "parameters": {{...}}}}}}]',
        )
    return [_tool(without_nulls(one)) for one in tools]


def _tool(one: dict[str, Any]) -> dict[str, Any]:
    """Return a tool as chat templates take it: a function within an object that says so, its parameters an object."""
    if not isinstance(one.get("function"), Mapping) and "name" in one:
        one = {"type": "function", "function": {name: value for name, value in one.items() if name != "type"}}
    function = one.get("function")
    if isinstance(function, Mapping) and isinstance(function.get("parameters"), str):
        one = one | {"function": dict(function) | {"parameters": _parsed(function["parameters"])}}
    return one


def _parsed(text: str) -> Any:
    """Return the value of a JSON text, and the text itself if it is none."""
    try:
        return strict_json.parse_document(text) if text.strip() else None
    except strict_json.BadJson:
        return text


def without_nulls(found: Any) -> Any:
    """Return the value without the fields that are null: a table gives each row the fields of all."""
    if isinstance(found, Mapping):
        return {name: without_nulls(one) for name, one in found.items() if one is not None}
    return [without_nulls(one) for one in found] if isinstance(found, list) else found


def checked_messages(found: Any, name: str, *, unified: bool = False) -> list[dict[str, Any]]:
    """Return a list of messages as chat templates take it; raises Rejected and names the message and its field.

    `found` may be JSON text, as in a cell of CSV. `unified`: each object has the fields of those of all rows, null if
    it has none itself.
    """
    if isinstance(found, str) and found.lstrip()[:1] == "[":
        found = _list_in_cell(found, name)
    if not isinstance(found, list) or not found:
        raise Rejected(
            f"{name} is {'empty' if found == [] else kind(found)}, not a list of messages",
            got=found,
            why="a conversation is a list of objects with role and content",
            fix=f'write {name} as [{{"role": "user", "content": "..."}}, {{"role": "assistant", "content": "..."}}]',
        )
    return [_message(one, name, n, unified) for n, one in enumerate(found)]


_WORDS_OF: Mapping[str, Mapping[str, type | tuple[type, ...]]] = {
    "role": {"content": (str, list), "tool_calls": list, "function_call": Mapping},
    "from": {"value": str},
}
"""How a message names its speaker -> how it names the words, and what these are."""
_BEGINNING = re.compile(r"""\s*(?:\[\s*)?\{\s*(['"])\w+\1\s*:""")
"""Of a list of objects, or of an object, in the notation of JSON or of Python."""


def messages_in_cell(cell: Any, name: str) -> Any:
    """Return the list of messages that a text holds as JSON, also of one without a list; any other value as it is.

    Raises Rejected for a text that begins like messages and is no JSON: it would be learnt with its notation.
    """
    if not isinstance(cell, str) or not _BEGINNING.match(cell):
        return cell
    found = _parsed(cell)
    if isinstance(found, str):
        return _list_in_cell(cell, name) if _names_message(cell) else cell
    listed = [found] if isinstance(found, Mapping) else found
    return listed if any(map(_is_message, listed)) else cell


def seems_messages(cell: Any) -> bool:
    """Return whether this is a message or a list, or a text that `messages_in_cell` does not leave as it is."""
    if not isinstance(cell, str):
        return isinstance(cell, Mapping | list)
    try:
        return not isinstance(messages_in_cell(cell, ""), str)
    except Rejected:
        return True


def _is_message(found: Any) -> bool:
    """Return whether this is an object with a speaker that is known and with words: others have such fields, too."""
    return isinstance(found, Mapping) and any(
        str(found.get(speaker)).lower() in (*_ROLES, "developer")
        and any(isinstance(found.get(name), kind_of) for name, kind_of in words.items())
        for speaker, words in _WORDS_OF.items()
    )


def _names_message(cell: str) -> bool:
    """Return whether a text that is no JSON names the fields of a message."""
    fields = re.findall(r"""['"](\w+)['"]\s*:""", cell)
    return any(speaker in fields and any(one in fields for one in words) for speaker, words in _WORDS_OF.items())


def _list_in_cell(cell: str, name: str) -> Any:
    found = _parsed(cell)
    if not isinstance(found, str):
        return found
    raise Rejected(
        f"{name} is a text, and no JSON",
        got=cell[:100],
        why="a list of messages within a text is read as JSON; pandas writes Python's own notation into CSV",
        fix="write the list with json.dumps, or the table as JSON lines or Parquet",
    )


def are_messages(row: Mapping[str, Any], first: str, second: str) -> bool:
    """Return whether both fields of a row are lists; raises Rejected if only one of them is."""
    one, other = row.get(first), row.get(second)
    if isinstance(one, list) != isinstance(other, list):
        raise Rejected(
            f"{first} is {kind(one)}, and {second} is {kind(other)}",
            got=[one, other],
            why="both are texts, or both are lists of messages",
            fix="write both in the same way",
        )
    return isinstance(one, list)


def with_system(messages: list[dict[str, Any]], system: Any, name: str) -> list[dict[str, Any]]:
    """Return the conversation with the system prompt that its row has in a column of this name; "" and None: none."""
    if system is None or system == "":
        return messages
    text = text_field({name: system}, name)
    first = messages[0] if messages else {}
    if first.get("role") not in (SYSTEM, "developer"):
        return [{"role": SYSTEM, "content": text}, *messages]
    if first.get("content") == text:
        return messages
    raise Rejected(
        f"the system prompt is given twice, in {name} and in the first message",
        got=[text[:100], str(first.get("content"))[:100]],
        why="it is not known which of the two is meant",
        fix="keep one of them",
    )


def turns(row: Mapping[str, Any], columns: Mapping[str, str], *, unified: bool = False) -> list[dict[str, Any]]:
    """Return the turns before an answer: those of `history`, then the question and what belongs to it, a line each."""
    names = [columns[what] for what in ("question", "input") if what in columns]
    filled = [text_field(row, name) for name in names if row.get(name) not in (None, "")]
    asked = "\n".join(filled) if filled else text_field(row, columns["question"])
    before = row.get(columns["history"]) if "history" in columns else None
    return [*_history(before, columns.get("history", ""), unified), {"role": USER, "content": asked}]


def _history(found: Any, name: str, unified: bool) -> list[dict[str, Any]]:
    """Return earlier turns, given as pairs of a question and its answer, or as messages."""
    if isinstance(found, str):
        found = _list_in_cell(found, name) if found.strip() else None
    if not found:
        return []
    if isinstance(found, list) and all(isinstance(one, Mapping) for one in found):
        return checked_messages(found, name, unified=unified)
    odd = [one for one in found if not isinstance(one, list) or len(one) != 2] if isinstance(found, list) else [found]
    if odd:
        raise Rejected(
            f"{name} is no list of pairs",
            got=odd[0],
            why="earlier turns are pairs of a question and its answer",
            fix=f'write {name} as [["...", "..."]], or the row as messages',
        )
    parts = {f"{name}[{n}][{m}]": part for n, pair in enumerate(found) for m, part in enumerate(pair)}
    return [{"role": (USER, ASSISTANT)[n % 2], "content": text_field(parts, part)} for n, part in enumerate(parts)]


_ROLES = {
    **dict.fromkeys(("human", "user", "prompter"), USER),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "gpt-4", "gpt4", "bing", "bard", "model", "bot", "ai"), ASSISTANT),
    **dict.fromkeys(("tool", "observation", "tool_response", "function_response", "function"), TOOL),
    **dict.fromkeys(("function_call", "tool_call"), "call"),
    SYSTEM: SYSTEM,
}
"""Names of the speakers, in any letters -> their roles; the words of a call are JSON with a name and arguments."""
_PLAIN = frozenset((USER, ASSISTANT, SYSTEM, TOOL))
MEDIA = ("images", "image", "videos", "video", "audios", "audio")


def _message(found: Any, name: str, number: int, unified: bool) -> dict[str, Any]:
    if type(found) is dict and len(found) == 2:  # most messages have a role and a text alone, and no more to look at
        if type(role := found.get("role")) is str and role in _PLAIN and _is_text(found.get("content")):
            return found
        speaker = found.get("from")
        role = _ROLES.get(speaker) if type(speaker) is str else None
        if role in _PLAIN and _is_text(found.get("value")):
            return {"role": role, "content": found["value"]}
    return _looked_at(found, f"{name}[{number}]", unified)


def _is_text(content: Any) -> bool:
    """Return whether the rules for texts have nothing to say of this one."""
    if type(content) is not str or not content or content.isspace() or "\0" in content:
        return False
    try:
        return content.isascii() or bool(content.encode())
    except UnicodeEncodeError:
        return False


def _looked_at(found: Any, name: str, unified: bool) -> dict[str, Any]:
    if not isinstance(found, Mapping):
        raise Rejected(
            f"{name} is {kind(found)}, not an object",
            got=found,
            why="a message has a role and a content",
            fix='write it as {"role": "user", "content": "..."}',
        )
    given = {part: value for part, value in found.items() if value is not None}
    if unified and any(isinstance(value, list | dict) for value in given.values()):
        given = without_nulls(given)
    learnt = _take_learnt(given, name)
    message = _with_role(given, name)
    _take_calls(message, name)
    content = message.get("content")
    if isinstance(content, list):
        content = message["content"] = _joined(content, f"{name}.content")
    if not _may_be_wordless(message):
        text_field({f"{name}.content": content} if content is not None else {}, f"{name}.content")
    for media in MEDIA:
        if message.get(media):
            raise _no_media(f"{name}.{media}", message[media])
    if learnt is None or (learnt is True and message["role"] == ASSISTANT):
        return message
    marked = Message(message)
    marked.learnt = learnt
    return marked


def _with_role(given: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a message under the names of chat templates: ShareGPT has `from` for role and `value` for content."""
    by_from = "role" not in given and "from" in given
    role = given.get("from") if by_from else given.get("role")
    speaker = text_field({f"{name}.role": role} if role is not None else {}, f"{name}.role")
    words = "content" if "content" in given or "value" not in given else "value"
    known = _ROLES.get(speaker.lower())
    if known is None and by_from:
        raise Rejected(
            f"{name}.from names an unknown speaker",
            got=speaker,
            why="it decides whether the words are learnt: those of the assistant are",
            fix=f"write one of {', '.join(_ROLES)}",
        )
    message = {"role": known or speaker}
    if words in given:
        message["content"] = given[words]
    message |= {part: value for part, value in given.items() if part not in ("role", words, *(["from"] * by_from))}
    if known == "call":
        message |= {"role": ASSISTANT, "content": "", "tool_calls": _calls_in_words(message.get("content"), name)}
    return message


def _calls_in_words(content: Any, name: str) -> list[Any]:
    found = _parsed(content) if isinstance(content, str) else None
    calls = found if isinstance(found, list) else [found]
    if calls and all(isinstance(one, Mapping) and "name" in one for one in calls):
        return calls
    raise Rejected(
        f"{name} is a call, and its words are no JSON with a name and arguments",
        got=content,
        why="the chat template writes a call in the form that the model knows",
        fix='write its words as {"name": "...", "arguments": {...}}, or give the turn to the assistant',
    )


def _take_calls(message: dict[str, Any], name: str) -> None:
    """Put the calls of a message into the form of chat templates, with arguments as objects: texts are quoted twice."""
    if "function_call" in message:  # OpenAI's older name
        message.setdefault("tool_calls", [message.pop("function_call")])
    calls = message.get("tool_calls")
    if calls is None:
        return
    if not calls and isinstance(calls, list):
        del message["tool_calls"]
        return
    _check_calls(calls, f"{name}.tool_calls")
    message["tool_calls"] = [_call(dict(one), f"{name}.tool_calls[{n}]") for n, one in enumerate(calls)]


def _call(one: dict[str, Any], name: str) -> dict[str, Any]:
    if not isinstance(one.get("function"), Mapping):
        one = {"type": "function", "function": {part: value for part, value in one.items() if part != "type"}}
    function = dict(one["function"])
    text_field({f"{name}.name": function.get("name")}, f"{name}.name")
    given = function.get("arguments")
    arguments = (_parsed(given) or {}) if isinstance(given, str) else {} if given is None else given
    if not isinstance(arguments, Mapping):
        raise Rejected(
            f"the arguments of {name} are {kind(arguments)}, not an object",
            got=given,
            why="each argument of a call has a name",
            fix='write them as {"name": value}, or as JSON text with that',
        )
    return one | {"function": function | {"arguments": arguments}}


def _joined(parts: Sequence[Any], name: str) -> str:
    """Return the text of a content that is a list of parts, unchanged and end to end."""
    found = []
    for n, part in enumerate(parts):
        given = without_nulls(part) if isinstance(part, Mapping) else {}
        if given.get("type", "text") not in ("text", "input_text", "output_text") or "text" not in given:
            raise _no_media(f"{name}[{n}]", part)
        if given["text"] != "":
            found.append(text_field({f"{name}[{n}].text": given["text"]}, f"{name}[{n}].text"))
    return "".join(found)


def _no_media(name: str, got: Any) -> Rejected:
    return Rejected(
        f"{name} is no text",
        got=got,
        why="the model reads texts: an image, a sound or a document would be lost",
        fix='write the part as {"type": "text", "text": "..."}, or remove the row',
    )


_FLAGS = ("train", "training", "loss_mask", "loss")
_DETAILS = ("train_detail", "training_detail")


def _take_learnt(message: dict[str, Any], name: str) -> bool | Spans | None:
    """Take what a message says of learning it out of it, and return that."""
    found: bool | Spans | None = None
    for part in _DETAILS:
        if part in message:
            details = message.pop(part)
            found = found if details == [] else _details(details, f"{name}.{part}")
    for part in _FLAGS:
        if part in message:
            asked = learnt_flag(message.pop(part), f"{name}.{part}")
            found = False if not asked else True if found is None else found
    if "weight" in message and not learnt_flag(message.pop("weight"), f"{name}.weight"):
        found = False
    return found


def learnt_flag(value: Any, name: str) -> bool:
    """Return whether 1, 0, true or false ask for learning; raises Rejected for any other value."""
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    raise Rejected(
        f"{name} is neither 0 nor 1",
        got=value,
        why="a message is learnt or not: whet has no weights between",
        fix="write 1 (true) for what is learnt and 0 (false) for what is not",
    )


def _details(found: Any, name: str) -> Spans:
    """Return the characters of a content that are learnt; Axolotl's ends are those of the last character."""
    spans = []
    for one in found if isinstance(found, list) else [None]:
        part = one if isinstance(one, Mapping) else {}
        ends = [end for at in ("begin_offset", "end_offset") if type(end := part.get(at)) is int and end >= 0]
        if len(ends) != 2:
            raise Rejected(
                f"{name} is no list of parts",
                got=found,
                why="each part has its first and its last character, and whether it is learnt",
                fix='write it as [{"begin_offset": 0, "end_offset": 8, "train": false}]',
            )
        if learnt_flag(part.get("train", True), f"{name}.train"):
            spans.append((ends[0], ends[1] + 1))
    return tuple(spans)


def _may_be_wordless(message: Mapping[str, Any]) -> bool:
    """Return whether the message needs no words: it calls a tool, or is an empty one that nobody learns."""
    content = message.get("content")
    if isinstance(content, str) and not content.strip():
        return bool(message.get("tool_calls")) or message["role"] != ASSISTANT
    return content is None and bool(message.get("tool_calls"))


def _check_calls(found: Any, name: str) -> None:
    """Refuse calls that are no list of objects: a template would fail on them, or show nothing."""
    if isinstance(found, list) and all(isinstance(one, Mapping) for one in found):
        return
    odd = (
        next((n for n, one in enumerate(found) if not isinstance(one, Mapping)), 0) if isinstance(found, list) else None
    )
    raise Rejected(
        f"{name} is {kind(found)}, not a list of objects" if odd is None else f"{name}[{odd}] is {kind(found[odd])}",
        got=found,
        why="a chat template shows each call as an object with a name and arguments",
        fix=f'write {name} as [{{"type": "function", "function": {{"name": "...", "arguments": {{}}}}}}]',
    )
