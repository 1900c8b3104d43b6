"""The simple commands of a shell text: their words, with the values of variables that the text itself sets.

What only the shell that runs the text can know stays as it is written: `$NAME` of an unknown variable, `$(command)`,
`~`, a pattern such as `*.json`. Loops and conditions are not followed; each command in them is read once.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_KEYWORDS = {"do", "done", "then", "else", "elif", "fi", "if", "while", "until", "{", "}", "!", "esac", "time"}
"""Words that may stand before a command, or alone, and that change nothing about it."""
_PATTERN = set("*?[")
_SPACE = " \t"
_ENDS = set(";&|()\n")
_IN_QUOTES = set('"\\$`')
"""What a backslash escapes within double quotes."""


@dataclass(frozen=True, slots=True)
class Live:
    """A part of a word that the shell replaces when it runs: a variable, a command's output, `~` or a pattern."""

    raw: str

    @property
    def quoted(self) -> str:
        """As it is in a word that the shell does not split."""
        return f'"{self.raw}"' if self.raw.startswith(("$", "`")) else self.raw


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a command: fixed text, and parts that only the shell knows."""

    parts: tuple[str | Live, ...] = ()
    quoted: bool = False
    """Whether a part of it stood in quotes: a variable outside of them may hold several words."""

    @classmethod
    def of(cls, text: object) -> Word:
        """Return a word of fixed text."""
        return cls((str(text),), quoted=True)

    @property
    def text(self) -> str:
        """The word as it is shown: with the names of variables in place of values that are not known."""
        return "".join(part if isinstance(part, str) else part.raw for part in self.parts)

    @property
    def spelled(self) -> str:
        """The word as it is shown among others: in quotes if it has spaces."""
        return shlex.quote(self.text) if not self.text or re.search(r"\s", self.text) else self.text

    @property
    def live(self) -> bool:
        """Whether a part of it is known to the shell alone."""
        return any(isinstance(part, Live) for part in self.parts)

    @property
    def is_variable(self) -> bool:
        """Whether it is a variable outside of quotes, or all arguments of a script: it may hold several words."""
        if len(self.parts) != 1 or not isinstance(self.parts[0], Live):
            return False
        return self.parts[0].raw.startswith("$") and (not self.quoted or "@" in self.parts[0].raw)

    def shell(self) -> str:
        """Return the word as a shell reads it back."""
        parts = [part for part in self.parts if part != ""]
        if not parts:
            return "''"
        return "".join(
            part.quoted
            if isinstance(part, Live)
            else part
            if part[0] == "/" and number and re.fullmatch(r"[\w/.,:=@%+-]+", part)
            else _quoted(part)
            for number, part in enumerate(parts)
        )

    def cut(self, separator: str) -> tuple[Word, Word] | None:
        """Return what stands before and after the first separator in fixed text; None if there is none."""
        for number, part in enumerate(self.parts):
            if isinstance(part, str) and separator in part:
                before, _, after = part.partition(separator)
                head = (*self.parts[:number], before) if before else self.parts[:number]
                tail = (after, *self.parts[number + 1 :]) if after else self.parts[number + 1 :]
                return Word(head, self.quoted), Word(tail, self.quoted)
        return None


def _quoted(text: str) -> str:
    """Return the text in quotes; what does not print stands in it as escapes ($'...')."""
    if text.isprintable():
        return shlex.quote(text)
    kept = (char if char.isprintable() and char not in "\\'" else _escaped(char) for char in text)
    return f"$'{''.join(kept)}'"


def _escaped(char: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in char.encode("utf-8", "surrogateescape"))


@dataclass
class Simple:
    """A command between two separators."""

    words: list[Word] = field(default_factory=list)
    variables: dict[str, Word] = field(default_factory=dict)
    """Those before it, `NAME=value`; without words they are the shell's own from here on."""
    exported: frozenset[str] = frozenset()
    """The variables that `export` has given to commands so far."""

    @property
    def name(self) -> str:
        """The program without its folder; empty if there is none."""
        return self.words[0].text.rsplit("/", 1)[-1] if self.words else ""


class _Reader:
    """Reads one text from its beginning to its end."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text.replace("\\\r\n", "\\\n"), 0
        self.known: dict[str, list[Word]] = {}
        """Variable of the text -> its words; an array has several."""
        self.used: set[str] = set()

    def commands(self) -> Iterator[Simple]:
        found = Simple()
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in _SPACE or self.text.startswith("\\\n", self.at):
                self.at += 1 if char in _SPACE else 2
            elif char == "#":
                self._skip_line()
            elif self.text.startswith("((", self.at):
                self.at = _closing(self.text, self.at)  # arithmetic, as in for ((i = 0; i < 3; i++))
            elif char in _ENDS:
                self.at += 1
                yield from self._finished(found)
                found = Simple()
            elif char in "<>" or re.match(r"\d+[<>]|&>", self.text[self.at : self.at + 12]):
                self._skip_redirection()
            elif not found.words and self._assigns(found):
                continue
            else:
                self._add(found, self._word())
        yield from self._finished(found)

    def _finished(self, found: Simple) -> Iterator[Simple]:
        if found.words or found.variables:
            yield found
        if not found.words:
            self.known |= {name: [value] for name, value in found.variables.items()}

    def _add(self, found: Simple, words: list[Word]) -> None:
        first = words[0].text if words else ""
        if not found.words and not found.variables and first in _KEYWORDS:
            return
        found.words += words
        if found.name == "for":
            self.known.pop(first, None)  # from here on the loop sets it
        if found.name in ("export", "declare", "typeset", "set", "readonly") and len(found.words) > 1:
            for word in words:
                if (pair := word.cut("=")) and _NAME.fullmatch(pair[0].text):
                    self.known[pair[0].text] = [pair[1]]

    def _assigns(self, found: Simple) -> bool:
        """Read NAME=value or NAME=(words), and return whether one stands here."""
        match = _ASSIGNMENT.match(self.text, self.at)
        if match is None:
            return False
        name, more = match[1], match[2]
        self.at = match.end()
        if self.text.startswith("(", self.at):
            self.at += 1
            words = self._until_closed()
            self.known[name] = [*self.known.get(name, ()), *words] if more else words
            return True
        value = Word(tuple(part for word in self._word(splits=False) for part in word.parts), quoted=True)
        if more:
            value = Word((*(part for word in self.known.get(name, ()) for part in word.parts), *value.parts), True)
        found.variables[name] = value
        return True

    def _until_closed(self) -> list[Word]:
        words: list[Word] = []
        while self.at < len(self.text) and self.text[self.at] != ")":
            char = self.text[self.at]
            if char in " \t\n" or self.text.startswith("\\\n", self.at):
                self.at += 1
            elif char == "#":
                self._skip_line()
            else:
                words += self._word()
        self.at += 1
        return words

    def _word(self, *, splits: bool = True) -> list[Word]:
        """Read one word; a known variable outside of quotes may make several of it."""
        begin, words, parts, quoted = self.at, list[Word](), list[str | Live](), False
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in _SPACE or char in _ENDS or char in "<>":
                break
            if char == "'" or self.text.startswith("$'", self.at):
                parts.append(self._single())
                quoted = True
            elif char == '"':
                more, array = self._double()
                words += array or []
                parts += more
                quoted = quoted or array is None
            elif char == "\\":
                parts.append(self.text[self.at + 1 : self.at + 2].replace("\n", ""))
                self.at += 2
            elif char in "$`":
                found = self._expansion()
                if isinstance(found, Live):
                    parts.append(found)
                    continue
                one, *several = [piece for word in found for piece in _fields(word, splits)] or [Word()]
                parts += one.parts
                for word in several:
                    words.append(Word(tuple(parts), quoted))
                    parts = list(word.parts)
            elif (char == "~" and self.at == begin) or char in _PATTERN:
                parts.append(Live(char))
                self.at += 1
            else:
                parts.append(char)
                self.at += 1
        if parts or quoted:
            words.append(Word(_joined(parts), quoted))
        if self.at == begin:  # a character that ends words and begins none
            self.at += 1
        return [Word(_joined(word.parts), word.quoted) for word in words if word.parts or word.quoted]

    def _single(self) -> str:
        is_escaped = self.text[self.at] == "$"
        begin = self.at + 1 + is_escaped
        end = self.text.find("'", begin)
        end = len(self.text) if end < 0 else end
        self.at = end + 1
        text = self.text[begin:end]
        return text.replace("\\n", "\n").replace("\\t", "\t").replace("\\\\", "\\") if is_escaped else text

    def _double(self) -> tuple[list[str | Live], list[Word] | None]:
        """Return the parts within double quotes; the words of an array instead, for "${NAME[@]}"."""
        self.at += 1
        parts: list[str | Live] = []
        while self.at < len(self.text) and self.text[self.at] != '"':
            char = self.text[self.at]
            if char == "\\":
                after = self.text[self.at + 1 : self.at + 2]
                parts.append("" if after == "\n" else after if after in _IN_QUOTES else char + after)
                self.at += 2
            elif char in "$`":
                begin = self.at
                found = self._expansion()
                if isinstance(found, Live):
                    parts.append(found)
                elif "[@]" in self.text[begin : self.at]:
                    self.at += 1
                    return [], found
                else:
                    parts += [part for word in found for part in word.parts]
            else:
                parts.append(char)
                self.at += 1
        self.at += 1
        return parts, None

    def _expansion(self) -> list[Word] | Live:
        """Read what begins with $ or `; return the words of a known variable, or what stands there."""
        begin = self.at
        if self.text[begin] == "`":
            end = self.text.find("`", begin + 1)
            self.at = len(self.text) if end < 0 else end + 1
            return Live(self.text[begin : self.at])
        opening = self.text[begin + 1 : begin + 2]
        if opening in ("(", "{"):
            self.at = _closing(self.text, begin + 1)
            inner = self.text[begin + 2 : self.at - 1]
            if opening == "(":
                return Live(self.text[begin : self.at])
            name = inner.removesuffix("[@]").removesuffix("[*]")
        elif match := _NAME.match(self.text, begin + 1):
            name, self.at = match[0], match.end()
        else:
            self.at = begin + 2 if opening in tuple("@*#?$!-0123456789") else begin + 1
            return Live(self.text[begin : self.at]) if self.at > begin + 1 else [Word(("$",))]
        if name in self.known:
            self.used.add(name)
            return self.known[name]
        return Live(self.text[begin : self.at])

    def _skip_line(self) -> None:
        end = self.text.find("\n", self.at)
        self.at = len(self.text) if end < 0 else end

    def _skip_redirection(self) -> None:
        match = re.match(r"\d*(&>>?|<<-?|<<<|[<>]&|>>|[<>])", self.text[self.at :])
        if match is None:
            self.at += 1
            return
        self.at += match.end()
        while self.text[self.at : self.at + 1] in tuple(_SPACE):
            self.at += 1
        word = self._word()
        if match[1] in ("<<", "<<-") and word:
            self._skip_document(word[0].text)

    def _skip_document(self, end: str) -> None:
        """Leave out the lines of a here-document, which follow the line that names its end."""
        here = self.text.find("\n", self.at)
        lines = self.text[here + 1 :].split("\n") if here >= 0 else []
        if end in (stripped := [line.strip() for line in lines]):
            n_left_out = stripped.index(end) + 1
            self.text = self.text[: here + 1] + "\n".join(lines[n_left_out:])


def _fields(word: Word, splits: bool) -> list[Word]:
    """Return the words that the value of a variable outside of quotes becomes."""
    if not splits or word.live or not re.search(r"\s", word.text):
        return [word]
    return [Word((text,)) for text in word.text.split()]


def _joined(parts: Sequence[str | Live]) -> tuple[str | Live, ...]:
    found: list[str | Live] = []
    for part in parts:
        if isinstance(part, str) and found and isinstance(found[-1], str):
            found[-1] += part
        elif part != "":
            found.append(part)
    return tuple(found)


def _closing(text: str, at: int) -> int:
    """Return the index after the bracket that closes the one at `at`."""
    depth, pairs = 0, {"(": 1, "{": 1, ")": -1, "}": -1}
    for place in range(at, len(text)):
        depth += pairs.get(text[place], 0)
        if depth == 0:
            return place + 1
    return len(text)


@dataclass
class Script:
    """What a text holds."""

    commands: list[Simple]
    values: dict[str, Word]
    """The variables that the text sets for itself, with their last values."""
    used: frozenset[str]
    """Those of them that stand in a word; their values have taken their places."""


def read(text: str) -> Script:
    """Return the simple commands of the text, in order."""
    reader = _Reader(text)
    commands: list[Simple] = []
    exported: set[str] = set()
    for found in reader.commands():
        if found.name == "export":
            names = [word.text.partition("=")[0] for word in found.words[1:]]
            exported |= {name for name in names if _NAME.fullmatch(name)}
        found.exported = frozenset(exported)
        commands.append(found)
    values = {name: words[0] for name, words in reader.known.items() if len(words) == 1}
    return Script(commands, values, frozenset(reader.used))
