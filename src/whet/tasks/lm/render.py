"""Examples as texts, with the characters that are to be learnt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from whet.data.files.rejected import Rejected
from whet.errors import ConfigError
from whet.jobs.tokenising import progress
from whet.tasks.lm.examples import Examples, is_chat
from whet.tasks.lm.messages import Tools

ASSISTANT, _USER = "assistant", "user"
_MANY_EXCHANGES = 8
"""Turns of the user from which on it pays to look at each exchange by itself."""
Spans = tuple[tuple[int, int], ...]
"""First character, and one past the last, of each part that is learnt."""
Messages = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Rendered:
    """Texts, and the parts of each that are learnt; None: all of it."""

    texts: Sequence[str]
    spans: Sequence[Spans | None]
    with_special: bool
    """Whether the tokenizer adds its own special tokens: chat templates write theirs."""
    with_end: bool
    """Whether each text ends with the end-of-text token."""


def rendered(examples: Examples, tokenizer: Any, *, completion_only: bool) -> Rendered:
    """Return the texts of the examples; raises DataError for a conversation that its template cannot show."""
    chats = any(is_chat(value) for value in examples.values)
    if chats and not getattr(tokenizer, "chat_template", None):
        raise _no_template(examples)
    texts, spans = [], []
    all_tools = examples.tools or [None] * len(examples)
    with progress.reported(len(examples), "writing texts by the chat template", "conversations") as count:
        for value, place, tools in zip(examples.values, examples.places, all_tools, strict=True):
            try:
                template = Template(tokenizer, tools)
                text, found = _one(value, template, chats=chats, completion_only=completion_only)
            except Rejected as problem:
                raise problem.error(f"{examples.source}: {place}") from None
            texts.append(text)
            spans.append(found)
            count(1)
    with_end = examples.form in ("text", "completion") and not chats
    return Rendered(texts, spans, with_special=not chats, with_end=with_end)


@dataclass(frozen=True)
class Template:
    """The model's chat template, and the tools that a conversation may call."""

    tokenizer: Any
    tools: Tools = None

    def shown(self, messages: Messages, *, ask: bool = False) -> str:
        """Return the conversation as text; with `ask`, up to the words after which the assistant answers."""
        try:
            return self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=ask, tools=self.tools
            )
        except Exception as error:  # a template raises what it likes
            raise Rejected(
                "the model's chat template refuses the conversation",
                got=f"{type(error).__name__}: {error}"[:300],
                why="templates have rules of their own, such as turns of user and assistant by turns",
                fix="change the conversation, or use a model with another template",
            ) from None

    def require_shows_tools(self, messages: Messages) -> None:
        """Raise Rejected if the text is the same without the tools: nobody can learn to call what it never sees."""
        if self.tools and self.shown(messages) == Template(self.tokenizer).shown(messages):
            raise Rejected(
                "the model's chat template does not show tools",
                got=self.tools,
                why="the model would learn to call tools that it never saw",
                fix="use a model whose template has tools, or describe them in a first message with role system and "
                "leave the column out",
            )


def _one(value: Any, template: Template, *, chats: bool, completion_only: bool) -> tuple[str, Spans | None]:
    if isinstance(value, str):
        return value, None
    if chats != is_chat(value):
        raise Rejected(
            "the prompt is a text, and in other rows a list of messages",
            got=value[0],
            why="messages become text by a chat template, texts stay as they are",
            fix="write all rows in the same way",
        )
    prompt, completion = value if isinstance(value, tuple) else ([], value)
    if not chats:
        return prompt + completion, ((len(prompt), len(prompt) + len(completion)),) if completion_only else None
    messages = [*prompt, *completion]
    template.require_shows_tools(messages)
    spans = _turns(messages, len(prompt), template) if completion_only else None
    return template.shown(messages), spans


def _turns(messages: Messages, first: int, template: Template) -> Spans:
    """Return where the turns of the assistant from message `first` on stand in a conversation by the model's template.

    A turn is what the template adds when the assistant has answered, after the words that ask it to.
    """
    whole = template.shown(messages)
    spans = _turns_by_exchange(messages, first, template, whole)
    if spans is None:
        spans = _turns_up_to(len(messages), messages, first, template, whole)
    if not spans:
        raise Rejected(
            "the conversation has no turn of the assistant",
            got=[message["role"] for message in messages],
            why="these turns are what is learnt",
            fix='add a message with "role": "assistant"; or, without --loss dpo, learn all turns: '
            "--completion_only_loss false",
        )
    return tuple(spans)


def _turns_up_to(end: int, messages: Messages, first: int, template: Template, whole: str) -> list[tuple[int, int]]:
    """Return the turns among the messages before `end`; the template writes all earlier messages for each."""
    spans = []
    for n, message in enumerate(messages[:end]):
        if n < first or message["role"] != ASSISTANT:
            continue
        before = template.shown(messages[:n], ask=True) if n else _before_first(message, template)
        after = template.shown(messages[: n + 1])
        if not (after.startswith(before) and whole.startswith(after)):
            raise _unstable(n)
        spans.append((len(before), len(after)))
    return spans


def _turns_by_exchange(messages: Messages, first: int, template: Template, whole: str) -> list[tuple[int, int]] | None:
    """Return the turns in time that grows with the messages, and not with their square; None: not by this template.

    What the template adds for a message is found behind the first exchange and the message's own: what lies between
    does not matter to usual templates. It is right if all that is added, end to end, is the complete text.
    """
    starts = [n for n, message in enumerate(messages) if message["role"] == _USER]
    if len(starts) < _MANY_EXCHANGES:
        return None
    head = starts[1]
    spans, shown = _turns_up_to(head, messages, first, template, whole), template.shown(messages[:head])
    if not whole.startswith(shown):
        return None
    at = len(shown)
    for start, end in zip(starts[1:], [*starts[2:], len(messages)], strict=True):
        before = shown
        for n in range(start, end):
            context = [*messages[:head], *messages[start:n]]
            after = template.shown([*context, messages[n]])
            added = after[len(before) :]
            if not (after.startswith(before) and whole.startswith(added, at)):
                return None
            if n >= first and messages[n]["role"] == ASSISTANT:
                asked = template.shown(context, ask=True)
                if not after.startswith(asked):
                    return None
                spans.append((at + len(asked) - len(before), at + len(added)))
            before, at = after, at + len(added)
    return spans if at == len(whole) else None


def _before_first(message: dict[str, Any], template: Template) -> str:
    """Return what the template writes before the words of an assistant who speaks first, such as a system turn.

    No earlier message shows it. It is what the conversation has in common with one that says something else, up to the
    words that ask the assistant where they stand in it.
    """
    shown = template.shown([message])
    mark = next(one for one in map(chr, range(0xE000, 0xF900)) if one not in shown)  # characters without a meaning
    marked = template.shown([{"role": message["role"], "content": mark}])
    if mark not in marked:
        raise Rejected(
            "the model's chat template leaves out a first message of the assistant",
            got=marked[:300],
            why="so that it is not known which characters are the assistant's",
            fix="begin the conversation with a message of the user; or, without --loss dpo, learn all turns: "
            "--completion_only_loss false",
        )
    n = next(n for n, (one, other) in enumerate(zip(shown + "\0", marked, strict=False)) if one != other)
    before, asks = shown[:n], template.shown([message], ask=True).removeprefix(shown)
    end = before.rfind(asks)
    return before if end < 0 else before[: end + len(asks)]


def _unstable(number: int) -> Rejected:
    return Rejected(
        f"messages[{number}] is shown differently once more turns follow",
        why="the chat template changes earlier turns, so that it is not known which characters are the assistant's",
        fix="give each turn of the assistant a row of its own, with the messages before it; or, without --loss dpo, "
        "learn all turns: --completion_only_loss false",
    )


def _no_template(examples: Examples) -> ConfigError:
    return ConfigError(
        what="the tokenizer has no chat template",
        got=f"conversations in {examples.source}",
        why="messages become text by the template that the model was trained with",
        fix="use a chat model, or rows with prompt and completion as texts",
    )
