"""Messages of conversations, as chat templates take them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from whet import strict_json
from whet.data.files.rejected import Rejected
from whet.data.files.row_fields import kind, text_field

TOOLS = "tools"
Tools = list[dict[str, Any]] | None
"""Functions by their JSON schemas, as chat templates take them."""


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
    return [_without_nulls(one) for one in tools]


def _parsed(text: str) -> Any:
    """Return the value of a JSON text, and the text itself if it is none."""
    try:
        return strict_json.parse_document(text) if text.strip() else None
    except strict_json.BadJson:
        return text


def _without_nulls(found: Any) -> Any:
    """Return the value without the fields that are null: a table gives each row the fields of all."""
    if isinstance(found, Mapping):
        return {name: _without_nulls(one) for name, one in found.items() if one is not None}
    return [_without_nulls(one) for one in found] if isinstance(found, list) else found


def checked_messages(found: Any, name: str) -> list[dict[str, Any]]:
    """Return a list of messages as chat templates take it; raises Rejected and names the message and its field."""
    if not isinstance(found, list) or not found:
        raise Rejected(
            f"{name} is {'empty' if found == [] else kind(found)}, not a list of messages",
            got=found,
            why="a conversation is a list of objects with role and content",
            fix=f'write {name} as [{{"role": "user", "content": "..."}}, {{"role": "assistant", "content": "..."}}]',
        )
    return [_message(one, f"{name}[{n}]") for n, one in enumerate(found)]


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


_ROLES = {"human": "user", "gpt": "assistant"}
"""ShareGPT's names of the roles that have another."""


def _usual(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message under the names of chat templates: ShareGPT has `from` for role and `value` for content."""
    if "role" in message or not {"from", "value"} <= message.keys():
        return message
    others = {name: part for name, part in message.items() if name not in ("from", "value")}
    speaker = message["from"]
    role = _ROLES.get(speaker, speaker) if isinstance(speaker, str) else speaker  # a list has no hash
    return {"role": role, "content": message["value"], **others}


def _message(found: Any, name: str) -> dict[str, Any]:
    if not isinstance(found, Mapping):
        raise Rejected(
            f"{name} is {kind(found)}, not an object",
            got=found,
            why="a message has a role and a content",
            fix='write it as {"role": "user", "content": "..."}',
        )
    found = _usual(found)
    named = {f"{name}.{part}": found[part] for part in ("role", "content") if part in found}
    text_field(named, f"{name}.role")
    if not _may_be_wordless(found):
        text_field(named, f"{name}.content")
    _check_calls(found.get("tool_calls"), f"{name}.tool_calls")
    return {part: value for part, value in found.items() if value is not None}


def _may_be_wordless(message: Mapping[str, Any]) -> bool:
    """Return whether the message needs no words: it calls a tool, or is an empty one that nobody learns."""
    content = message.get("content")
    if isinstance(content, str) and not content.strip():
        return bool(message.get("tool_calls")) or message["role"] != "assistant"
    return content is None and bool(message.get("tool_calls"))


def _check_calls(found: Any, name: str) -> None:
    """Refuse calls that are no list of objects: a template would fail on them, or show nothing."""
    if found is None or (isinstance(found, list) and all(isinstance(one, Mapping) for one in found)):
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
