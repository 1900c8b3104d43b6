"""Examples as texts, with the characters that are to be learnt.

A chat template may leave out what a row says. Comparing texts finds that: words are refused, other fields named.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cache, partial
from typing import Any

from whet.data.files.bad_rows import BadRows, Rejected
from whet.errors import ConfigError
from whet.jobs.left_out import LeftOut
from whet.jobs.tokenising import progress
from whet.tasks.lm.examples import Examples, is_chat
from whet.tasks.lm.messages import ASSISTANT, MEANT, NO_INPUTS, REASONING, Message, Spans, TemplateInputs, learnt_of

Messages = Sequence[Mapping[str, Any]]
_ROWS_LOOKED_AT = 20
"""Rows with a field of messages in which the template may show it: whether it does hardly depends on the row."""
_USER = "user"
_UNKNOWN_NAMES = ("No filter named", "No test named")
"""What Jinja says of names in a branch, which it looks up when it gets there."""
_MANY_EXCHANGES = 8
"""Turns of the user from which on it pays to look at each exchange by itself."""


@dataclass(frozen=True)
class Rendered:
    """Texts, and the parts of each that are learnt; None: all of it."""

    texts: Sequence[str]
    spans: Sequence[Spans | None]
    with_special: bool
    """Whether the tokenizer adds its own special tokens: chat templates write theirs."""
    with_end: bool
    """Whether each text ends with the end-of-text token."""
    endless: bool = False
    """Whether the chat template writes nothing after the last words of the assistant."""
    not_shown: Sequence[str] = ()
    """Fields of messages that the chat template does not show; none of them holds words."""
    places: Sequence[str] = ()
    """Where each text stands in the source."""
    left_out: LeftOut = field(default_factory=LeftOut)
    """The examples that `skip_bad` has left out here, as the chat template refuses them or leaves their words out."""


def rendered(
    examples: Examples, tokenizer: Any, *, completion_only: bool, skip_bad: bool = False, group: int = 1
) -> Rendered:
    """Return the texts of the examples; raises DataError for conversations that their template cannot show.

    With `skip_bad` these are left out, with all of the `group` of examples that stay together.
    """
    chats = any(is_chat(value) for value in examples.values)
    if chats:
        require_template(tokenizer, f"conversations in {examples.source}", "rows with prompt and completion as texts")
    texts, spans, places, endless = [], [], [], False
    all_inputs = examples.inputs or [NO_INPUTS] * len(examples)
    others, bad = _OtherFields(), BadRows(examples.source, skip_bad=skip_bad)
    with progress.reported(len(examples), "writing texts by the chat template", "conversations") as count:
        for first in range(0, len(examples), group):
            rows = range(first, min(first + group, len(examples)))
            try:
                found = [
                    _one(
                        examples.values[n], Template(tokenizer, all_inputs[n], DAY), others, chats=chats,
                        completion_only=completion_only,
                    )
                    for n in rows
                ]  # fmt: skip
            except Rejected as problem:
                bad.add(problem, partial(examples.places.__getitem__, first))
            else:
                texts += [text for text, _ in found]
                spans += [span for _, span in found]
                places += [examples.places[n] for n in rows]
                ends = zip(rows, found, strict=True) if chats else ()
                endless = endless or any(_is_endless(examples.values[n], text, tokenizer) for n, (text, _) in ends)
            count(len(rows))
    if bad.problems:
        bad.refuse(len(texts) // group, "conversation" if group == 1 else "pair")
    with_end = examples.form in ("text", "completion") and not chats
    return Rendered(texts, spans, not chats, with_end, endless, others.not_shown(), places, LeftOut.of(bad))


DAY = date(2026, 1, 1)
"""What a chat template that prints today's date prints in rows: those of another day would be others, and no run could
resume the next day."""


def reads_clock(tokenizer: Any) -> bool:
    """Return whether the chat template asks for the time."""
    return _CLOCK in str(getattr(tokenizer, "chat_template", ""))


_CLOCK = "strftime_now"
"""What transformers gives templates to ask for the time."""


@cache
def _as_on(day: date, source: str) -> str:
    """Return the template as one that asks a macro for the time, which knows this day alone."""
    parts = {f"%{one}": day.strftime(f"%{one}") for one in "aAbBcdHIjmMpSUwWxXyY"}
    parts |= {"%e": f"{day.day:2}", "%F": day.isoformat(), "%-d": str(day.day), "%-m": str(day.month)}
    replaced = "".join(f" | replace('{one}', '{shown}')" for one, shown in parts.items())
    return f"{{% macro {_CLOCK}(format) %}}{{{{ format{replaced} }}}}{{% endmacro %}}\n{source}"


def require_template(tokenizer: Any, got: str, instead: str) -> None:
    """Raise ConfigError if the tokenizer has no chat template; `instead` is what works without one."""
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            what="the tokenizer has no chat template",
            got=got,
            why="messages become text by the template that the model was trained with",
            fix=f"use a chat model, or {instead}",
        )


@dataclass(frozen=True)
class Template:
    """The model's chat template, and what a row gives it next to its messages."""

    tokenizer: Any
    inputs: TemplateInputs = NO_INPUTS
    day: date | None = None
    """The day that the template takes for today; None: today."""

    def shown(self, messages: Messages, *, ask: bool = False) -> str:
        """Return the conversation as text; with `ask`, up to the words after which the assistant answers.

        Arguments of calls are objects, or JSON text for a template that fails on objects. Raises Rejected if the
        template refuses the conversation, and ConfigError if it is no template that could show any.
        """
        try:
            return self._shown(messages, ask)
        except Exception as error:  # a template raises what it likes
            self._require_is_sound(error)
            as_text = _with_arguments_as_text(messages)
            with suppress(Exception):
                if as_text is not None:
                    return self._shown(as_text, ask)
            raise Rejected(
                "the model's chat template refuses the conversation",
                got=f"{type(error).__name__}: {error}"[:300],
                why="templates have rules of their own, such as turns of user and assistant by turns",
                fix="change the conversation, or use a model with another template",
            ) from None

    def _require_is_sound(self, error: Exception) -> None:
        """Raise ConfigError if this error says that the template itself is wrong, whatever the conversation is.

        Jinja's errors are known by their names: transformers brings Jinja, whet does not.
        """
        if any(one.__name__ == "TemplateSyntaxError" for one in type(error).__mro__):
            got = f"line {getattr(error, 'lineno', '?')}: {getattr(error, 'message', error)}"
        elif type(error).__name__ == "TemplateRuntimeError" and str(error).startswith(_UNKNOWN_NAMES):
            got = str(error)
        else:
            return
        folder = getattr(self.tokenizer, "name_or_path", "")
        raise ConfigError(
            what="the model's chat template is damaged",
            got=got[:300],
            why="it is a program of Jinja, and cannot be run",
            fix=f"correct it in chat_template.jinja or tokenizer_config.json of {folder or 'the model'}, or fetch the "
            "file again",
        ) from None

    def _shown(self, messages: Messages, ask: bool) -> str:
        given = dict(self.inputs.more)
        if self.day is not None and reads_clock(self.tokenizer):
            source = self.tokenizer.get_chat_template(None, self.inputs.tools)
            given["chat_template"] = _as_on(self.day, source)
        return self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=ask, tools=self.inputs.tools, **given
        )

    def require_shows_inputs(self, messages: Messages, text: str) -> None:
        """Raise Rejected if the template does not read what the row has for it.

        If the text is the same without the tools, nobody can learn to call what it never sees.
        """
        without = replace(self, inputs=TemplateInputs(None, self.inputs.more))
        if self.inputs.tools and text == without.shown(messages):
            raise Rejected(
                "the model's chat template does not show tools",
                got=self.inputs.tools,
                why="the model would learn to call tools that it never saw",
                fix="use a model whose template has tools, or describe them in a first message with role system and "
                "leave the column out",
            )

    def require_reads_variables(self) -> None:
        """Raise Rejected if chat_template_kwargs name what is no variable of the template."""
        if not self.inputs.more:
            return
        taken = {*inspect.signature(self.tokenizer.apply_chat_template).parameters, "messages"}
        source = self.tokenizer.get_chat_template(None, self.inputs.tools)
        odd = [name for name in self.inputs.more if name in taken or not re.search(rf"\b{re.escape(name)}\b", source)]
        if odd:
            raise Rejected(
                f"the model's chat template has no variable {' or '.join(odd)}",
                got=dict(self.inputs.more),
                why="chat_template_kwargs would change nothing",
                fix=f"leave {', '.join(odd)} out of chat_template_kwargs, or use a model whose template has it",
            )


def _with_arguments_as_text(messages: Messages) -> list[dict[str, Any]] | None:
    """Return the messages with the arguments of their calls as JSON text; None: there are no calls."""
    if not any(message.get("tool_calls") for message in messages):
        return None
    found = []
    for message in messages:
        calls = [
            one
            | {
                "function": one["function"]
                | {"arguments": json.dumps(one["function"]["arguments"], ensure_ascii=False)}
            }
            for one in message.get("tool_calls") or ()
        ]
        found.append({**message, "tool_calls": calls} if calls else dict(message))
    return found


def _one(
    value: Any, template: Template, others: _OtherFields, *, chats: bool, completion_only: bool
) -> tuple[str, Spans | None]:
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
    template.require_reads_variables()
    text = template.shown(messages)
    template.require_shows_inputs(messages, text)
    spans = None
    if completion_only:
        spans = tuple(span for turn in _turns(messages, len(prompt), template).values() for span in turn)
    else:
        _require_all_is_learnt(messages)
    _require_words_are_shown(messages, len(prompt) if completion_only else None, text, template)
    others.look_at(messages, text, template)
    return text, spans


def _is_endless(value: Any, text: str, tokenizer: Any) -> bool:
    """Return whether the template ends with the words of the assistant, so that none learns where an answer ends."""
    last = (value[1] if isinstance(value, tuple) else value)[-1]
    words, shown = last.get("content"), text.rstrip()
    if last["role"] != ASSISTANT or not isinstance(words, str) or not words.strip():
        return False
    return shown.endswith(words.rstrip()) and not (tokenizer.eos_token and shown.endswith(tokenizer.eos_token))


def _require_all_is_learnt(messages: Messages) -> None:
    odd = next((n for n, message in enumerate(messages) if learnt_of(message) not in (None, True)), None)
    if odd is not None:
        raise Rejected(
            f"messages[{odd}] shall not be learnt, and all turns are",
            why="with --completion_only_loss false or --assistant_only_loss false every token of a row is learnt",
            fix="leave the option out, so that the row decides; or leave the mark out of the message",
        )


def _without(messages: Messages, names: Collection[str]) -> list[Mapping[str, Any]]:
    """Return the messages without these fields, but with what they say of being learnt."""
    found: list[Mapping[str, Any]] = []
    for message in messages:
        kept = Message({"content": "", **{name: value for name, value in message.items() if name not in names}})
        kept.learnt = learnt_of(message)
        found.append(kept if message.keys() & set(names) else message)
    return found


def _require_words_are_shown(messages: Messages, first: int | None, text: str, template: Template) -> None:
    """Raise Rejected for words of a message that the template leaves out: its calls, its thoughts, its content.

    `first`: the message from which on turns of the assistant are learnt, each of which has to show its own; None: all
    of the text is learnt.
    """
    for names in (("tool_calls",), REASONING, ("refusal",)):
        holders = [n for n, message in enumerate(messages) if any(message.get(name) for name in names)]
        if holders and (missing := _not_shown_in(messages, names, holders, first, text, template)) is not None:
            name = next(name for name in names if messages[missing].get(name))
            raise Rejected(
                f"the model's chat template does not show messages[{missing}].{name}",
                got=messages[missing][name],
                why="the model would learn an answer without what the row says of it",
                fix=f"use a model whose template shows {name}, or write it into the content of the message; else leave "
                "it out",
            )
    at = 0
    for n, message in enumerate(messages):
        words = message.get("content")
        words = words.strip() if isinstance(words, str) else ""
        there = text.find(words, at)
        at = max(there, at)
        if there < 0 and words not in text and _is_same(messages, n, text, template):
            raise Rejected(
                f"the model's chat template does not show messages[{n}], of role {message['role']}",
                got=words,
                why="the model would learn to answer without it",
                fix="use a model whose template has this role, or write the words into a message of the user",
            )


def _not_shown_in(
    messages: Messages, names: Collection[str], holders: Sequence[int], first: int | None, text: str, template: Template
) -> int | None:
    """Return the first message whose field makes no difference in the text; None: each makes one."""
    stripped = _without(messages, names)
    try:
        other = template.shown(stripped)
        if other == text:
            return holders[0]
        if len(holders) == 1:
            return None
        theirs = _turns(stripped, first or 0, template)
        ours = _turns(messages, first or 0, template)
        return next((n for n in holders if n in ours and _parts(text, ours[n]) == _parts(other, theirs[n])), None)
    except Rejected:  # a template that fails without a call does show it; one that changes earlier turns shows some
        return (
            None
            if first is not None
            else next((n for n in holders if _is_hidden(messages, n, names, text, template)), None)
        )


def _is_hidden(messages: Messages, n: int, names: Collection[str], text: str, template: Template) -> bool:
    try:
        return template.shown([*messages[:n], *_without(messages[n : n + 1], names), *messages[n + 1 :]]) == text
    except Rejected:
        return False


def _parts(text: str, spans: Spans) -> list[str]:
    return [text[begin:end] for begin, end in spans]


def _is_same(messages: Messages, n: int, text: str, template: Template) -> bool:
    """Return whether the text is the same if message n says something else."""
    try:
        return template.shown([*messages[:n], {**messages[n], "content": _unused(text)}, *messages[n + 1 :]]) == text
    except Rejected:
        return False


@dataclass
class _OtherFields:
    """The fields of messages besides those that hold words: whether the template shows them."""

    n_looked_at: dict[str, int] = field(default_factory=dict)
    shown: set[str] = field(default_factory=set)

    def look_at(self, messages: Messages, text: str, template: Template) -> None:
        """Compare the text with the one without each field that has not been shown so far."""
        names = {name for message in messages if len(message) > 2 for name in message} - {"role", "content", *MEANT}
        for name in names - self.shown:
            n = self.n_looked_at[name] = self.n_looked_at.get(name, 0) + 1
            if n > _ROWS_LOOKED_AT:
                continue
            try:
                if template.shown(_without(messages, {name})) != text:
                    self.shown.add(name)
            except Rejected:
                self.shown.add(name)

    def not_shown(self) -> list[str]:
        """Return the fields that no text shows."""
        return sorted(self.n_looked_at.keys() - self.shown)


def _turns(messages: Messages, first: int, template: Template) -> dict[int, Spans]:
    """Return where the turns that are learnt, from message `first` on, stand in a conversation by the model's template.

    They are the assistant's, unless a message says otherwise.
    """
    text, learnt = template.shown(messages), {}
    for n, message in enumerate(messages):
        asked = learnt_of(message)
        if n < first and asked not in (None, False):
            raise _prompt_is_not_learnt(n)
        if n >= first and (message["role"] == ASSISTANT if asked is None else asked is not False):
            learnt[n] = asked
    if not learnt:
        raise _no_turn(messages, first)
    spans = _turns_by_exchange(messages, learnt, text, template)
    if spans is None:  # the template writes all earlier messages for each turn
        spans = {n: _turn(messages[: n + 1], asked, text, template) for n, asked in learnt.items()}
    return spans


def _turns_by_exchange(
    messages: Messages, learnt: Mapping[int, bool | Spans | None], text: str, template: Template
) -> dict[int, Spans] | None:
    """Return the turns in time that grows with the messages, and not with their square; None: not by this template.

    What the template adds for a message is found behind the first exchange and the message's own: what lies between
    does not matter to usual templates. It is right if all that is added, end to end, is the complete text.
    """
    starts = [n for n, message in enumerate(messages) if message["role"] == _USER]
    if len(starts) < _MANY_EXCHANGES:
        return None
    head = starts[1]
    before = template.shown(messages[:head])
    if not text.startswith(before):
        return None
    spans = {n: _turn(messages[: n + 1], asked, text, template) for n, asked in learnt.items() if n < head}
    first_exchange, at = before, len(before)
    for start, end in zip(starts[1:], [*starts[2:], len(messages)], strict=True):
        before = first_exchange
        for n in range(start, end):
            shown = [*messages[:head], *messages[start : n + 1]]
            after = template.shown(shown)
            added = after[len(before) :]
            if not (after.startswith(before) and text.startswith(added, at)):
                return None
            if n in learnt:
                try:
                    found = _turn(shown, learnt[n], after, template, after)
                except Rejected:  # the other way says which message it is
                    return None
                spans[n] = tuple((begin + at - len(before), stop + at - len(before)) for begin, stop in found)
            before, at = after, at + len(added)
    return spans if at == len(text) else None


def _turn(
    messages: Messages, asked: bool | Spans | None, text: str, template: Template, after: str | None = None
) -> Spans:
    """Return where the last of these messages stands in the text: what the template adds for it.

    A turn of the assistant begins after the words that ask it to answer; others, and parts of turns, at their content.
    `after` is what the template writes for these messages, if it is known.
    """
    *earlier, message = messages
    after = template.shown(messages) if after is None else after
    if message["role"] == ASSISTANT and asked is None:
        before = template.shown(earlier, ask=True) if earlier else _before_first(message, template)
        if not (after.startswith(before) and text.startswith(after)):
            raise _unstable(len(earlier))
        return ((len(before), len(after)),)
    begin = template.shown([*earlier, {**message, "content": (mark := _unused(after))}]).find(mark)
    if begin < 0 or not text.startswith(after):
        raise _unstable(len(earlier))
    if not isinstance(asked, tuple):
        return ((begin, len(after)),)
    content = message["content"]
    if after[begin : begin + len(content)] != content:
        raise Rejected(
            f"the model's chat template changes the words of messages[{len(earlier)}]",
            got=after[begin : begin + len(content)],
            why="so that the characters which are learnt are not known",
            fix="write the words without space around them, or learn the complete message",
        )
    parts = [(begin + start, begin + min(end, len(content))) for start, end in asked if start < len(content)]
    return (*parts, (begin + len(content), len(after)))


def _no_turn(messages: Messages, first: int) -> Rejected:
    masked = any(message["role"] == ASSISTANT for message in messages[first:])
    return Rejected(
        "the conversation has no turn of the assistant" + (" that shall be learnt" if masked else ""),
        got=[message["role"] for message in messages],
        why="these turns are what is learnt",
        fix="remove the row, or give one of its turns the weight 1"
        if masked
        else 'add a message with "role": "assistant"; or, without --loss dpo, learn all turns: '
        "--completion_only_loss false",
    )


def _prompt_is_not_learnt(number: int) -> Rejected:
    return Rejected(
        f"messages[{number}] of the prompt shall be learnt",
        why="a prompt is what the completion follows; the completion alone is learnt",
        fix="write the row as messages, or leave the mark out of the message",
    )


def _before_first(message: Mapping[str, Any], template: Template) -> str:
    """Return what the template writes before the words of an assistant who speaks first, such as a system turn.

    No earlier message shows it. It is what the conversation has in common with one that says something else, up to the
    words that ask the assistant where they stand in it.
    """
    shown = template.shown([message])
    mark = _unused(shown)
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


def _unused(text: str) -> str:
    """Return a character without a meaning that the text does not hold."""
    return next(one for one in map(chr, range(0xE000, 0xF900)) if one not in text)


def _unstable(number: int) -> Rejected:
    return Rejected(
        f"messages[{number}] is shown differently once more turns follow",
        why="the chat template changes earlier turns, so that it is not known which characters are the assistant's",
        fix="give each turn of the assistant a row of its own, with the messages before it; or, without --loss dpo, "
        "learn all turns: --completion_only_loss false",
    )
