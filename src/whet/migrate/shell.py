"""The simple commands of a shell text: their words, with the values of variables that the text itself sets.

What only the shell that runs the text can know stays as it is written: `$NAME` of an unknown variable, `$(command)`,
`~`, a pattern such as `*.json`. Loops and conditions are not followed: each command in them is read once, and a
variable to which they give another value has none behind them.
"""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_KEYWORDS = {"do", "done", "then", "else", "elif", "fi", "if", "while", "until", "{", "}", "!", "esac", "time"}
"""Words that may stand before a command, or alone, and that change nothing about it."""
_PATTERN = set("*?[")
_SPACE = " \t"
_ENDS = set(";&|()\n")
_IN_QUOTES = set('"\\$`')
"""What a backslash escapes within double quotes."""
_VARIABLE = re.compile(r"\$\{?[#!]?([A-Za-z_]\w*)")
_PARAMETER = re.compile(r"([A-Za-z_]\w*)(:?[-=+]|##?|%%?)([^$`'\"\\]*)")
"""`NAME:-text`, `NAME##pattern` and their like, between `${` and `}`."""
_INTEGER = re.compile(r"-?(?:0|[1-9]\d{0,18})")
_LOOP = re.compile(r"(?<![\w$./-])(do|done)(?![\w./=-])")
_SETS = re.compile(r"(?:^|[\s;&|({])([A-Za-z_]\w*)\+?=(?!=)")
_ARITHMETIC = re.compile(r"\(\((.*?)\)\)", re.DOTALL)
_CHANGES = re.compile(r"([A-Za-z_]\w*)\s*(?:\+\+|--|[-+*/%]?=(?!=))|(?:\+\+|--)([A-Za-z_]\w*)")
"""What `((...))` does to a variable."""


@dataclass(frozen=True, slots=True)
class Live:
    """A part of a word that the shell replaces when it runs: a variable, a command's output, `~` or a pattern."""

    raw: str
    needs: frozenset[str] = frozenset()
    """Variables that the text itself sets, and of which the shell makes it: without the text nobody knows them."""

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
    unsure: frozenset[str] = frozenset()
    """Those that have another value if a branch before the command has run."""

    @property
    def name(self) -> str:
        """The program without its folder; empty if there is none."""
        return self.words[0].text.rsplit("/", 1)[-1] if self.words else ""


@dataclass
class _Branch:
    """A part of the text that may run or not, such as that between `then` and `fi`."""

    ends: str
    """The word that ends it; "" for the rest of a line behind && or ||."""
    before: dict[str, list[Word]]
    unsure: set[str]
    found: dict[str, list[list[Word] | None]] = field(default_factory=dict)
    """Variable -> the values that the alternatives read so far give it."""

    def note(self, known: Mapping[str, list[Word]]) -> None:
        """Keep what an alternative has changed."""
        for name in known.keys() | self.before.keys():
            if known.get(name) != self.before.get(name):
                self.found.setdefault(name, []).append(known.get(name))


class _Reader:
    """Reads one text from its beginning to its end."""

    def __init__(self, text: str, known: dict[str, list[Word]] | None = None) -> None:
        self.text, self.at = text.replace("\\\r\n", "\\\n"), 0
        self.known = {} if known is None else known
        """Variable of the text -> its words; an array has several."""
        self.used: set[str] = set()
        self.needed: set[str] = set()
        """Variables of the text that stand in parts which only the shell can compute."""
        self.unsure: set[str] = set()
        """Variables whose values depend on the branches that have run."""
        self.branches: list[_Branch] = []

    def commands(self) -> Iterator[Simple]:
        found = Simple()
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in _SPACE or self.text.startswith("\\\n", self.at):
                self.at += 1 if char in _SPACE else 2
            elif char == "#":
                self._skip_line()
            elif self.text.startswith("((", self.at):
                begin, self.at = self.at, _closing(self.text, self.at)  # as in for ((i = 0; i < 3; i++))
                self._forget(self.text[begin : self.at])
            elif char in _ENDS:
                yield from self._finished(found)
                found = Simple()
                self._separate()
            elif char in "<>" or re.match(r"\d+[<>]|&>", self.text[self.at : self.at + 12]):
                self._skip_redirection()
            elif not found.words and self._assigns(found):
                continue
            else:
                self._add(found, self._word())
        yield from self._finished(found)

    def _finished(self, found: Simple) -> Iterator[Simple]:
        if found.name == "eval":
            inner = _Reader(" ".join(word.text for word in found.words[1:]), self.known)
            inner.used, inner.needed, inner.unsure = self.used, self.needed, self.unsure
            yield from (replace(one, variables=found.variables | one.variables) for one in inner.commands())
        elif found.words or found.variables:
            yield found
        if not found.words:
            for name, value in found.variables.items():
                self._set(name, [value])

    def _set(self, name: str, words: list[Word]) -> None:
        self.known[name] = words
        self.unsure.discard(name)

    def _forget(self, text: str) -> None:
        """Forget the variables that a part of the text sets again and again."""
        changes = [match for part in _ARITHMETIC.finditer(text) for match in _CHANGES.finditer(part[1])]
        for match in (*_SETS.finditer(text), *changes):
            self.known.pop(match[1] or match[2], None)

    def _separate(self) -> None:
        """Step over what ends a command; what stands behind && or || may run or not, up to the end of the line."""
        if match := re.compile(r"(&&|\|\|)(?:\s|\\\n)*").match(self.text, self.at):
            self.at = match.end()
            if not self.branches or self.branches[-1].ends:
                self._enter("")
            return
        if self.text[self.at] not in "(|":
            self._leave("")
        if self.text.startswith(";;", self.at):
            self._alternative("esac")
        self.at += 1

    def _follow(self, word: str) -> bool:
        """Enter and leave branches by the words of the shell; return whether this is one that is no command."""
        if word in ("if", "case"):
            self._enter("fi" if word == "if" else "esac")
        elif word == "do":
            self._enter("done")
            self._forget(self.text[self.at : _end_of_loop(self.text, self.at)])
        elif word in ("else", "elif"):
            self._alternative("fi")
        elif word in ("fi", "done", "esac"):
            self._leave(word)
        return word in _KEYWORDS

    def _enter(self, ends: str) -> None:
        self.branches.append(_Branch(ends, dict(self.known), set(self.unsure)))

    def _alternative(self, ends: str) -> None:
        """Begin another alternative of a branch: what the one before it has set counts for nothing."""
        if self.branches and self.branches[-1].ends == ends:
            self.branches[-1].note(self.known)
            self._restore(self.branches[-1])

    def _restore(self, branch: _Branch) -> None:
        self.known.clear()
        self.known.update(branch.before)
        self.unsure |= branch.unsure

    def _leave(self, ends: str) -> None:
        """End a branch, and those that were begun within it: a variable keeps a value that is the only one it has."""
        while any(one.ends == ends for one in self.branches):
            branch = self.branches.pop()
            branch.note(self.known)
            self._restore(branch)
            for name, values in branch.found.items():
                every = [*values, *([branch.before[name]] if name in branch.before else [])]
                if name not in branch.unsure and all(one is not None and one == values[0] for one in every):
                    self.known[name] = every[0] or []
                else:
                    self.known.pop(name, None)
                    self.unsure.add(name)
            if branch.ends == ends:
                return

    def _add(self, found: Simple, words: list[Word]) -> None:
        first = words[0].text if words else ""
        if not found.words and not found.variables and self._follow(first):
            return
        found.words += words
        if found.name == "for":
            self.known.pop(first, None)  # from here on the loop sets it
        if found.name in ("export", "declare", "typeset", "local", "set", "readonly") and len(found.words) > 1:
            for word in words:
                if (pair := word.cut("=")) and _NAME.fullmatch(pair[0].text):
                    self._set(pair[0].text, [pair[1]])

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
            if not (more and name in self.unsure):
                self._set(name, [*self.known.get(name, ()), *words] if more else words)
            return True
        is_empty = self.text[self.at : self.at + 1] in ("", *_SPACE, *_ENDS)
        read = [] if is_empty else self._word(splits=False)
        value = Word(tuple(part for word in read for part in word.parts), quoted=True)
        if more and name in self.unsure:
            value = Word((self._live(f"${name}"), *value.parts), True)
        elif more:
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
        """Read what begins with $ or `; return the words that it is, or what stands there if only the shell knows."""
        begin = self.at
        opening = self.text[begin + 1 : begin + 2]
        if self.text[begin] == "`":
            end = self.text.find("`", begin + 1)
            self.at = len(self.text) if end < 0 else end + 1
            found = self._output(self.text[begin + 1 : self.at - 1])
        elif opening in ("(", "{"):
            self.at = _closing(self.text, begin + 1)
            inner = self.text[begin + 2 : self.at - 1]
            is_number = opening == "(" and inner.startswith("(") and inner.endswith(")")
            found = (
                self._parameter(inner) if opening == "{" else
                self._number(inner[1:-1]) if is_number else self._output(inner)
            )  # fmt: skip
        elif match := _NAME.match(self.text, begin + 1):
            self.at = match.end()
            found = self._value(match[0])
        else:
            self.at = begin + 2 if opening in tuple("@*#?$!-0123456789") else begin + 1
            found = None if self.at > begin + 1 else [Word(("$",))]
        return self._live(self.text[begin : self.at]) if found is None else found

    def _live(self, raw: str) -> Live:
        names = set(_NAME.findall(raw) if raw.startswith("$((") else _VARIABLE.findall(raw))
        needs = frozenset(names & (self.known.keys() | self.unsure))
        self.needed |= needs
        return Live(raw, needs)

    def _value(self, name: str) -> list[Word] | None:
        if name not in self.known:
            return None
        self.used.add(name)
        return self.known[name]

    def _parameter(self, inner: str) -> list[Word] | None:
        """Return what `${NAME}`, `${NAME[@]}`, `${NAME:-text}`, `${NAME##pattern}` and their like are."""
        if (name := inner.removesuffix("[@]").removesuffix("[*]")) in self.known:
            return self._value(name)
        match = _PARAMETER.fullmatch(inner)
        words = self.known.get(match[1], []) if match else []
        if match is None or len(words) != 1 or words[0].live:
            return None
        name, sign, rest = match.groups()
        text = words[0].text
        self.used.add(name)
        if sign[0] in "#%":
            return [Word((_without(text, sign, rest),), quoted=True)]
        is_set = bool(text) or sign[0] != ":"
        if sign[-1] == "+":
            return [Word((rest if is_set else "",), quoted=True)]
        return words if is_set else [Word((rest,), quoted=True)]

    def _number(self, text: str) -> list[Word] | None:
        """Return the value of arithmetic with whole numbers, and with variables that hold some."""
        plain = re.sub(r"\$\{(\w+)\}|\$(\w+)", r"\1\2", text).strip()
        try:
            tree = ast.parse(plain.replace("#", "$"), mode="eval").body  # 16#ff is no comment
            value = _computed(tree, self.known)
        except (SyntaxError, ValueError, LookupError, ArithmeticError, RecursionError, MemoryError):
            return None
        self.used |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        return [Word((str(value),), quoted=True)]

    def _output(self, text: str) -> list[Word] | None:
        """Return what a command prints, if it is basename with words that are known."""
        if not text.strip().startswith("basename "):
            return None
        inner = _Reader(text, dict(self.known))
        commands = [*inner.commands()]
        words = commands[0].words[1:] if len(commands) == 1 else []
        if len(words) not in (1, 2) or words[0].text.startswith("-") or any(word.live for word in words):
            return None
        self.used |= inner.used
        last = words[0].text.rstrip("/").rpartition("/")[2] or words[0].text[:1]
        end = words[1].text if words[1:] else ""
        return [Word((last if last == end else last.removesuffix(end),), quoted=True)]

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
    """Return the words that the value of a variable outside of quotes becomes: fixed text is split at blanks."""
    if not splits:
        return [word]
    found: list[list[str | Live]] = [[]]
    for part in word.parts:
        first, *others = [part] if isinstance(part, Live) else re.split(r"\s+", part)
        found[-1].append(first)
        found += [[other] for other in others]
    return [Word(parts) for one in found if (parts := tuple(part for part in one if part != ""))]


def _without(text: str, sign: str, pattern: str) -> str:
    """Return a text without the shortest or longest beginning (#, ##) or end (%, %%) that a pattern fits."""
    fits = re.compile(fnmatch.translate(pattern)).match
    cuts = range(len(text) + 1) if sign in ("#", "%%") else range(len(text), -1, -1)
    for cut in cuts:
        if fits(text[:cut] if sign[0] == "#" else text[cut:]):
            return text[cut:] if sign[0] == "#" else text[:cut]
    return text


def _quotient(one: int, other: int) -> int:
    """Return the quotient as a shell computes it: rounded towards zero."""
    return abs(one) // abs(other) * (1 if (one < 0) == (other < 0) else -1)


_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _quotient,
    ast.Mod: lambda one, other: one - other * _quotient(one, other),
}


def _computed(node: ast.expr, known: Mapping[str, Sequence[Word]]) -> int:
    """Return the value of an expression; raises LookupError or ValueError for what it does not understand."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        (word,) = known[node.id]
        if word.live or not _INTEGER.fullmatch(word.text):
            raise ValueError(word.text)
        return int(word.text)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        value = _computed(node.operand, known)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_computed(node.left, known), _computed(node.right, known))
    raise ValueError(type(node))


def _end_of_loop(text: str, at: int) -> int:
    """Return the index of the `done` that ends the loop whose `do` stands before `at`."""
    depth = 1
    for match in _LOOP.finditer(text, at):
        depth += 1 if match[1] == "do" else -1
        if depth == 0:
            return match.start()
    return len(text)


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
    needed: frozenset[str] = frozenset()
    """Those that stand in a part of a word which only the shell can compute."""


def read(text: str, known: Mapping[str, Word] | None = None) -> Script:
    """Return the simple commands of the text, in order; `known` are variables that it is started with."""
    reader = _Reader(text, {name: [value] for name, value in (known or {}).items()})
    commands: list[Simple] = []
    exported: set[str] = set()
    for found in reader.commands():
        if found.name == "export":
            names = [word.text.partition("=")[0] for word in found.words[1:]]
            exported |= {name for name in names if _NAME.fullmatch(name)}
        found.exported, found.unsure = frozenset(exported), frozenset(reader.unsure)
        commands.append(found)
    values = {name: words[0] for name, words in reader.known.items() if len(words) == 1 and name not in (known or {})}
    return Script(commands, values, frozenset(reader.used), frozenset(reader.needed))
