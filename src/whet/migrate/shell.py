"""The simple commands of a shell text: their words, with the values of variables that the text itself sets.

Text that runs from its first line to its last is followed exactly. What a branch, a loop, a function or a shell of its
own decides is not: its commands are listed as not certain, and a variable that it could set has no value from there on.

What only the shell that runs the text can know stays as it is written: `$NAME` of an unknown variable, `$(command)`,
`~`, a pattern such as `*.json`.
"""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from whet.errors import ConfigError

TRACE = "run the script with bash -x, which shows each command with its values, and give whet migrate the line that "
TRACE += "trains"
"""How to continue where only the shell knows what runs."""
PREPARES = {
    ".", ":", "alias", "apt", "apt-get", "awk", "brew", "cat", "cd", "chmod", "chown", "clear", "conda", "cp", "curl",
    "cut", "date", "declare", "df", "dnf", "du", "echo", "env", "exec", "exit", "export", "free", "git", "gunzip",
    "gzip", "head", "hf", "hostname", "huggingface-cli", "kill", "killall", "ln", "local", "mamba", "micromamba",
    "mkdir", "ml", "module", "mv", "nproc", "pip", "pip3", "pkill", "popd", "printenv", "printf", "ps", "pushd",
    "pwd", "read", "readonly", "rm", "rsync", "scp", "sed", "set", "shift", "shopt", "sleep", "sort", "source",
    "spack", "sync", "sysctl", "tail", "tar", "tee", "touch", "tr", "true", "typeset", "ulimit", "umask", "uname",
    "unset", "unzip", "uv", "virtualenv", "wait", "wandb", "wc", "wget", "whoami", "yum", ".pip", ".venv",
    ".virtualenv", ".ensurepip",
}  # fmt: skip
"""Commands, and modules of Python after a dot, that train nothing and are taken to succeed."""
ASKS = {
    "[", "test", "grep", "egrep", "fgrep", "which", "type", "hash", "command", "false", "diff", "cmp", "ls", "lscpu",
    "nvidia-smi", "pgrep",
}  # fmt: skip
"""Commands that train nothing, and whose success decides what runs next."""
RUNS = re.compile(
    r"(?:^|[\s/\"'=(;&|])(?:python[\d.]*|torchrun|accelerate|deepspeed|ipexrun|mpirun|mpiexec|orterun|prterun|trl|"
    r"(?:ba|z|da|k)?sh|ssh|srun|sbatch|qsub|bsub|flux|jsrun|aprun)(?=[\s\"';&|)]|$)"
    r"|\.(?:py|sh|slurm|sbatch)(?![\w.])"
)
"""What a command has in it that runs Python, a launcher, or a script."""

_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]\n]*\])?(\+?)=")
_BARE = re.compile(r"[^\s;&|()<>\"'\\$`]+(?=[\s;&|()<>]|\\\n|$)")
"""A word without quotes and expansions, such as a keyword."""
_FUNCTION = re.compile(
    r"(?:function[ \t]+([^\s()]+)(?:[ \t]*\([ \t]*\))?|([^\s;&|()<>\"'\\$`=]+)[ \t]*\([ \t]*\))(?=[\s{(])"
)
_BEFORE = re.compile(r"(?:time(?:[ \t]+-p)?|!|\++)(?=[\s({])")
"""What may stand before a command, and in a line that bash -x shows."""
_OPENS = {"if", "case", "for", "select", "while", "until", "{"}
_CLOSES = {"then", "elif", "else", "fi", "do", "done", "esac", "}", ")", ";;", ";&", ";;&"}
_DECLARES = {"export", "declare", "typeset", "local", "readonly"}
_READS = {"read", "mapfile", "readarray", "getopts", "printf", "wait"}
"""Commands that set the variables whose names are among their words."""
_OF_INTEL = re.compile(
    r"(?s)(?:.*/)?(?:set|mpi|ccl|mkl|compiler|oneapi-)vars\.sh"
    r"|(?:.*[^A-Za-z])?(?i:oneapi|intel|i?mpi|(?:one)?ccl)(?![A-Za-z]).*/env/vars\.sh"
)
_OF_SHELLS = re.compile(
    r"(?s)(?:.*/)?(?:(?:de)?activate|\.(?:bash|zsh)rc|\.bash_(?:profile|login|aliases)|\.z?profile|etc/(?:profile|bashrc)"
    r"|bash\.bashrc|profile\.d/[^/]+\.sh|(?:conda|mamba|micromamba|modules|lmod)\.sh|(?i:modules|lmod)/init/\w+)"
)
"""Complete names of files that set paths, and none of the variables of a script."""
_PATTERN = set("*?[")
_SPACE = " \t"
_ENDS = set(";&|()\n")
_IN_QUOTES = set('"\\$`')
"""What a backslash escapes within double quotes."""
_SPLITS = re.compile(r"([ \t\n]+|[*?\[])")
_BRACES = re.compile(r"\{[^\s{}'\"`$\\;&|<>()]*(?:,|\.\.)[^\s{}'\"`$\\;&|<>()]*\}")
_REDIRECTION = re.compile(r"(?:\d*|\{\w+\})(<<<|<<-?|[<>]&|&>>?|>>|>\||<>|[<>](?!\())")
_VARIABLE = re.compile(r"\$\{?[#!]?([A-Za-z_]\w*)")
_COUNTS = re.compile(r"\(\(|\$\{\w+:[^-=+?]")
"""Arithmetic, in which a variable needs no $."""
_ARGUMENT = re.compile(r"\$\{?[#!]?[@*#\d]")
_PARAMETER = re.compile(r"([A-Za-z_]\w*)(:?[-=+?]|##?|%%?)([^$`'\"\\~]*)")
"""`NAME:-text`, `NAME##pattern` and their like, between `${` and `}`."""
_ELEMENT = re.compile(r"([A-Za-z_]\w*)(?:\[([@*]|\d+)\])?")
_INTEGER = re.compile(r"-?(?:0|[1-9]\d{0,18})")
_CHANGES = re.compile(
    r"([A-Za-z_]\w*)\s*(?:\[[^\]]*\])?\s*(?:\+\+|--|(?:<<|>>|[-+*/%&|^])?=(?!=))|(?:\+\+|--)\s*([A-Za-z_]\w*)"
)
"""What arithmetic does to a variable."""
_ESCAPE = re.compile(r"\\(x[0-9A-Fa-f]{1,2}|u[0-9A-Fa-f]{1,4}|U[0-9A-Fa-f]{1,8}|[0-7]{1,3}|.)", re.DOTALL)
_ESCAPED = dict(zip("abefnrtvE", "\a\b\x1b\f\n\r\t\v\x1b", strict=True))

Known = dict[str, list["Word"] | None]
"""Variable of the text -> its words, of which an array has several; None if only a run of the text says its value."""


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

    words: list[Word]
    text: str = ""
    """As it was written."""
    sure: bool = True
    """Whether it runs once, with the values here: not in a branch, a loop, a function or a command's output."""
    variables: dict[str, Word] = field(default_factory=dict)
    """The variables that the text gives to it: those that stand before it, and those exported so far."""
    lost: frozenset[str] = frozenset()
    """Exported variables whose values only a run of the text says."""
    values: dict[str, Word] = field(default_factory=dict)
    """The variables that the text has set so far for itself."""
    used: frozenset[str] = frozenset()
    """Those of them whose values have taken their places in words."""

    @property
    def name(self) -> str:
        """The program without its folder; empty if there is none."""
        return self.words[0].text.rsplit("/", 1)[-1] if self.words else ""


class _Reader:
    """Reads one text from its beginning to its end."""

    def __init__(self, text: str, known: Mapping[str, list[Word] | None] | None = None) -> None:
        self.text, self.at = text.replace("\r\n", "\n"), 0
        self.commands: list[Simple] = []
        self.given = frozenset(known or {})
        self.known: Known = dict(known or {})
        self.exported = set(self.given)
        self.exports_all = False
        self.arrays: set[str] = set()
        """Variables that are arrays, or that may be."""
        self.used: set[str] = set()
        """Variables whose present values have taken their places in words."""
        self.ever_used: set[str] = set()
        self.needed: set[str] = set()
        """Variables of the text that stand in parts which only the shell can compute."""
        self.sure = True
        """Whether what stands here runs once, whatever the shell finds."""
        self.depth = 0
        self.changed: list[str] = []
        """The variables that were set so far, in their order."""
        self.functions: set[str] = set()
        self.unclear: set[str] = set()
        """Variables that never have a value: a function sets them when it is called, or declare changes assignments."""

    # Commands

    def read(self, ends: Collection[str] = ()) -> str:
        """Read commands up to a word that ends them, and return it."""
        self.depth += 1
        while self._skip_blank():
            begin = self.at
            match = re.compile(r";;&?|;&|[;&)]").match(self.text, begin)
            word = match[0] if match else self._bare()
            if word in (";", "&"):
                self.at += 1
            elif word in _CLOSES:
                if (";;" if word[:2] in (";;", ";&") else word) not in ends:
                    raise _broken(self.text[begin:])
                self.at += len(word)
                self.depth -= 1
                return word
            else:
                self._chain()
                if self.at == begin or self.text.startswith("(", self.at):
                    raise _broken(self.text[begin:])
        if ends:
            raise _broken(f"no {' or '.join(ends)}")
        self.depth -= 1
        return ""

    def _chain(self) -> None:
        """Read commands that && and || join: what only runs after a question is not certain."""
        begin, sure = len(self.changed), self.sure
        while True:
            succeeds = self._pipeline()
            if self.text.startswith("&&", self.at):
                self.sure = self.sure and succeeds
            elif self.text.startswith("||", self.at):
                self.sure = False
            else:
                break
            self.at += 2
            self._skip_blank()
        self.sure = sure
        if self.text[self.at : self.at + 1] == "&":
            self._lose(self.changed[begin:])

    def _pipeline(self) -> bool:
        """Read commands that | joins, each in a shell of its own; return whether the last is taken to succeed."""
        is_piped = False
        while True:
            begin, exported = len(self.changed), set(self.exported)
            succeeds = self._command()
            self._skip_space()
            has_next = self.text.startswith("|", self.at) and not self.text.startswith("||", self.at)
            is_piped = is_piped or has_next
            if is_piped:
                self._lose(self.changed[begin:])
                self.exported = exported
            if not has_next:
                return succeeds
            self.at += 2 if self.text.startswith("|&", self.at) else 1
            self._skip_blank()

    def _command(self) -> bool:
        """Read one command; return whether it is taken to succeed."""
        self._skip_space()
        if self.text.startswith("((", self.at):
            begin, self.at = self.at, self._closing(self.at)
            self._lose_changes(self.text[begin : self.at])
            return False
        if self.text.startswith("(", self.at):
            return self._subshell()
        if match := _FUNCTION.match(self.text, self.at):
            self.at = match.end()
            self.functions.add(match[1] or match[2])
            self._function()
            return True
        if match := _BEFORE.match(self.text, self.at):
            self.at = match.end()
            return self._command() and match[0] != "!"
        word = self._bare()
        if word == "[[":
            end = re.compile(r"\s\]\](?=[\s;&|)]|$)").search(self.text, self.at)
            if end is None:
                raise _broken(self.text[self.at :])
            self._live(self.text[self.at : end.end()])
            self.at = end.end()
            return False
        if word not in _OPENS:
            return self._simple()
        self.at += len(word)
        if word == "{":
            self.read(("}",))
        else:
            sure, self.sure = self.sure, False
            self._compound(word)
            self.sure = sure
        self._skip_redirections()
        return False

    def _compound(self, word: str) -> None:
        """Read a branch or a loop behind its first word."""
        if word == "if":
            while self.read(("then", "elif", "else", "fi")) != "fi":
                pass
        elif word == "case":
            self._case()
        else:
            if word in ("for", "select"):
                self._header()
            self.read(("do",))
            self.read(("done",))

    def _header(self) -> None:
        """Read what stands between `for` and its `do`."""
        self._skip_space()
        if self.text.startswith("((", self.at):
            begin, self.at = self.at, self._closing(self.at)
            self._lose_changes(self.text[begin : self.at])
            return
        self._lose([self._bare()])
        while self._skip_space() and self.text[self.at] not in ";\n#":
            self._word()

    def _case(self) -> None:
        """Read the alternatives of `case`, behind this word."""
        while self._skip_blank() and self._bare() != "in":
            self._word()
        self.at += len("in")
        while self._skip_blank() and self._bare() != "esac":
            while self._skip_space() and self.text[self.at] != ")":
                if self.text[self.at] in "|(":
                    self.at += 1
                else:
                    self._word()
            self.at += 1
            if self.read((";;", "esac")) == "esac":
                return
        self.at += len("esac")

    def _subshell(self) -> bool:
        """Read the commands of ( ), whose variables end with them."""
        self.at += 1
        known, exported, arrays, begin = dict(self.known), set(self.exported), set(self.arrays), len(self.changed)
        self.read((")",))
        if self.sure:
            self.known, self.exported, self.arrays = known, exported, arrays
            del self.changed[begin:]
        self._skip_redirections()
        return False

    def _function(self) -> None:
        """Read the body of a function: its arguments are its own, and what it sets counts from every call on."""
        begin, sure, arguments = len(self.changed), self.sure, "@" in self.known
        self.sure = False
        self._skip_blank()
        self._command()
        self.sure = sure
        self.unclear |= {*self.changed[begin:]} - {"@"}
        if not arguments:
            self.known.pop("@", None)

    def _simple(self) -> bool:
        begin, words, declared = self.at, list[Word](), list[str]()
        before, assigned = dict(self.known), Known()
        while self._skip_space():
            char, name = self.text[self.at], words[0].text if words else ""
            if self._skip_redirection():
                continue
            if char == "#":
                self._skip_line()
            elif char in _ENDS:
                break
            elif not words and (pair := self._assignment()):
                assigned[pair[0]] = self.known[pair[0]] = pair[1]
            elif name in _DECLARES and (pair := self._assignment()):
                options = [word.text for word in words[1:] if word.text.startswith(("-", "+"))]
                self._set(pair[0], pair[1] if all(re.fullmatch(r"-[axrg]+", one) for one in options) else None)
                declared.append(pair[0])
            else:
                if assigned and not words:  # they are the command's alone
                    self.known = {one: value for one, value in self.known.items() if one not in assigned}
                    self.known |= {one: before[one] for one in assigned if one in before}
                words += self._word()
        if words:
            text = " ".join(self.text[begin : self.at].replace("\\\n", " ").split())
            return self._carry_out(words, declared, text, assigned)
        for name, value in assigned.items():
            self._set(name, value)
        parts = (part for value in assigned.values() for word in value or () for part in word.parts)
        return not any(isinstance(part, Live) and part.raw.startswith(("$(", "`")) for part in parts)

    def _carry_out(self, words: list[Word], declared: list[str], text: str, assigned: Known) -> bool:
        """List a command, and do to the variables what it does; return whether it is taken to succeed."""
        name, others = words[0].text, [word.text for word in words[1:]]
        if name == "eval":
            outer, self.text, self.at = (self.text, self.at), " ".join(others), 0
            self.read()
            self.text, self.at = outer
            if any(word.live for word in words):
                self._lose([*self.known])
            return False
        reads_unknown = name in _DECLARES and any(word.live for word in words)  # as in export $(cat .env)
        if name not in _DECLARES or reads_unknown:
            self._add(words, text, assigned)
        if name in _DECLARES:
            self._declare(name, [*declared, *(one for one in others if _NAME.fullmatch(one))], others)
        elif name == "unset":
            for one in others:
                if match := _NAME.match(one):
                    self._set(match[0], [] if match[0] == one else None)
                    self.arrays -= {one} if self.sure else set()
        elif name in _READS:
            names = [one for one in others if _NAME.fullmatch(one)]
            self.arrays |= {*names}
            self._lose(names)
        elif name == "let":
            self._lose_changes(text)
        elif name == "shift" or (name == "set" and ("--" in others or (others and others[0][:1] not in "-+"))):
            self._lose(["@"])
        elif name == "set" and others[-1:] in (["-a"], ["+a"], ["allexport"]):
            self.exports_all = others[0].startswith("-")
        elif name == "exit" and self.sure and self.depth == 1:
            self.at = len(self.text)
        file = sourced(words)
        if reads_unknown or (file and not is_of_intel(file) and not _OF_SHELLS.fullmatch(file)):
            self._lose([*self.known])
        runs = RUNS.search(" ".join([name, *others])) is not None and "-c" not in others
        return name in PREPARES or (name not in ASKS and runs)

    def _add(self, words: list[Word], text: str, assigned: Known) -> None:
        known = self.known | {name: value and value[:1] for name, value in assigned.items()}
        names = self.exported | assigned.keys()
        single = {name: value[0] for name, value in known.items() if value is not None and len(value) == 1}
        no_arrays = (self.exported - self.arrays) | assigned.keys()
        variables = {name: value for name, value in single.items() if name in no_arrays}
        values = {name: value for name, value in single.items() if name not in {*self.given, *assigned}}
        lost = frozenset(name for name in names if known.get(name, []) is None)
        self.commands.append(Simple(words, text, self.sure, variables, lost, values, frozenset(self.used)))

    def _declare(self, command: str, names: Sequence[str], words: Sequence[str]) -> None:
        """Do what `export` and `declare -x` do to the environment."""
        options = {letter for word in words if word.startswith("-") for letter in word}
        if command != "export" and not options <= {*"-axrg"}:
            self.unclear |= {*names}
            self._lose(names)
        if command == "export" or "x" in options:
            if not self.sure:
                self._lose(names)
            self.exported = self.exported - {*names} if "n" in options else self.exported | {*names}

    # Variables

    def _set(self, name: str, words: list[Word] | None) -> None:
        self.changed.append(name)
        self.used.discard(name)
        self.known[name] = words if self.sure and name not in self.unclear else None
        if self.exports_all:
            self.exported.add(name)

    def _lose(self, names: Collection[str]) -> None:
        """Note variables whose values only a run says from here on."""
        for name in [*names]:
            self._set(name, None)

    def _lose_changes(self, arithmetic: str) -> None:
        self._lose([match[1] or match[2] for match in _CHANGES.finditer(arithmetic)])

    def _assignment(self) -> tuple[str, list[Word] | None] | None:
        """Read NAME=value or NAME=(words); None if none stands here."""
        match = _ASSIGNMENT.match(self.text, self.at)
        if match is None:
            return None
        name, element, more = match.groups()
        self.at = match.end()
        old = self.known.get(name, [])
        if element is not None or self.text.startswith("(", self.at):
            self.arrays.add(name)
        if self.text.startswith("(", self.at):
            words = self._array()
            if (more and old is None) or any(re.match(r"\[[^\]]*\]=", word.text) for word in words):
                return name, None
            return name, [*(old or ()), *words] if more else words
        is_empty = self.text[self.at : self.at + 1] in ("", *_SPACE, *_ENDS)
        value = Word() if is_empty else self._word(splits=False)[0]  # its blanks and patterns stay
        if element is not None or (old is None and (more or name in self.arrays)):
            return name, None
        if more:
            first = old[0].parts if old else () if name in self.known else (self._live(f"${name}"),)
            value = Word((*first, *value.parts))
        return name, [Word(_joined(value.parts), quoted=True), *(old or [])[1:]]  # of an array, the first is set

    def _array(self) -> list[Word]:
        words: list[Word] = []
        self.at += 1
        while self._skip_blank():
            if self.text[self.at] == ")":
                self.at += 1
                return words
            words += self._word()
        raise _broken("(")

    # Words

    def _word(self, *, splits: bool = True) -> list[Word]:
        """Read one word; a known variable outside of quotes may make several of it, or none."""
        begin, words, parts, quoted = self.at, list[Word](), list[str | Live](), False

        def end() -> None:
            nonlocal quoted
            if not splits:
                parts.append(" ")
            elif parts or quoted:
                words.append(Word(_joined(parts), quoted))
                parts.clear()
                quoted = False

        while self.at < len(self.text):
            char = self.text[self.at]
            if self.text.startswith(("<(", ">("), self.at):
                first, self.at = self.at, self._closing(self.at + 1)
                self._output(self.text[first + 2 : self.at - 1])
                parts.append(self._live(self.text[first : self.at]))
            elif char in _SPACE or char in _ENDS or char in "<>":
                break
            elif char == "'" or self.text.startswith("$'", self.at):
                parts.append(self._single())
                quoted = True
            elif char == '"' or self.text.startswith('$"', self.at):
                self.at += char == "$"
                for number, inner in enumerate(self._double()):
                    if number:
                        end()
                    parts += inner.parts
                    quoted = quoted or inner.quoted
            elif char == "\\":
                parts.append(self.text[self.at + 1 : self.at + 2].replace("\n", ""))
                self.at += 2
            elif char in "$`":
                first = self.at
                found = self._expansion()
                if splits and self.known.get("IFS", []) != [] and not isinstance(found, Live):
                    found = Live(self.text[first : self.at], frozenset({"IFS"}))
                if isinstance(found, Live):
                    parts.append(found)
                    continue
                for number, word in enumerate(found):
                    if number:
                        end()
                    for part in word.parts:
                        for piece in _SPLITS.split(part) if splits and isinstance(part, str) else [part]:
                            if isinstance(piece, Live) or not splits:
                                parts.append(piece)
                            elif piece.isspace():
                                end()
                            elif piece:
                                parts.append(Live(piece) if piece in _PATTERN else piece)
            elif char == "~" and (self.at == begin or (not splits and self.text[self.at - 1] == ":")):
                parts.append(Live(char))
                self.at += 1
            elif splits and (match := _BRACES.match(self.text, self.at)):
                parts.append(Live(match[0]))
                self.at = match.end()
            else:
                parts.append(Live(char) if splits and char in _PATTERN else char)
                self.at += 1
        if not splits:
            return [Word(_joined(parts), quoted)]
        end()
        if self.at == begin:
            raise _broken(self.text[begin:])
        return words

    def _single(self) -> str:
        is_escaped = self.text[self.at] == "$"
        pattern = r"\$'((?:[^'\\]|\\.)*)'" if is_escaped else r"'([^']*)'"
        match = re.compile(pattern, re.DOTALL).match(self.text, self.at)
        if match is None:
            raise _broken(self.text[self.at :])
        self.at = match.end()
        if not is_escaped:
            return match[1]
        return _ESCAPE.sub(_meant, match[1]).encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")

    def _double(self) -> list[Word]:
        """Return the word within double quotes; several or none if an array stands in them."""
        opened = self.at
        self.at += 1
        words: list[list[str | Live]] = [[]]
        quoted, is_empty = [False], False
        while self.text[self.at : self.at + 1] != '"':
            if self.at >= len(self.text):
                raise _broken(self.text[opened:])
            char, begin = self.text[self.at], self.at
            found = self._expansion() if char in "$`" else None
            raw = self.text[begin : self.at]
            if found is None or isinstance(found, Live):
                words[-1].append(self._character() if found is None else found)
                quoted[-1] = True
                continue
            is_empty = is_empty or (not found and "[@]" in raw)
            for number, word in enumerate(found):
                if number and "[@]" in raw:
                    words.append([])
                    quoted.append(False)
                words[-1] += [" ", *word.parts] if number and "[*]" in raw else word.parts
                quoted[-1] = quoted[-1] or "[@]" not in raw or word.quoted or not word.live
        self.at += 1
        if is_empty and words == [[]]:
            return []
        return [Word(tuple(parts), is_quoted or not parts) for parts, is_quoted in zip(words, quoted, strict=True)]

    def _character(self) -> str:
        """Return what a character within double quotes stands for."""
        char, after = self.text[self.at], self.text[self.at + 1 : self.at + 2]
        self.at += 2 if char == "\\" else 1
        if char != "\\":
            return char
        return "" if after == "\n" else after if after in _IN_QUOTES else char + after

    def _expansion(self) -> list[Word] | Live:
        """Read what begins with $ or `; return the words that it is, or what stands there if only the shell knows."""
        begin = self.at
        opening = self.text[begin + 1 : begin + 2]
        if self.text[begin] == "`":
            match = re.compile(r"`((?:[^`\\]|\\.)*)`", re.DOTALL).match(self.text, begin)
            if match is None:
                raise _broken(self.text[begin:])
            self.at = match.end()
            found = self._output(re.sub(r"\\([`$\\])", r"\1", match[1]))
        elif opening in ("(", "{"):
            self.at = self._closing(begin + 1)
            inner = self.text[begin + 2 : self.at - 1]
            is_number = opening == "(" and inner.startswith("(") and inner.endswith(")")
            found = (
                self._parameter(inner) if opening == "{" else
                self._number(inner[1:-1]) if is_number else self._output(inner)
            )  # fmt: skip
        elif match := _NAME.match(self.text, begin + 1):
            self.at = match.end()
            found = self._element(match[0], 0)
        else:
            self.at = begin + 2 if opening in tuple("@*#?$!-0123456789") else begin + 1
            found = None if self.at > begin + 1 else [Word(("$",))]
        return self._live(self.text[begin : self.at]) if found is None else found

    def _live(self, raw: str) -> Live:
        """Return a part that stays as it is written, after noting what the shell sets in it."""
        names = set((_NAME if _COUNTS.search(raw) else _VARIABLE).findall(raw))
        names |= {"@"} if _ARGUMENT.search(raw) else set()
        needs = frozenset(names & self.known.keys())
        if raw.startswith(("$(", "`")):
            needs |= self.functions & {*re.findall(r"[^\s$(){}|&;`\"']+", raw)}
        self.needed |= needs
        self._lose(re.findall(r"\$\{([A-Za-z_]\w*):?=", raw))
        if "((" in raw:
            self._lose_changes(raw)
        return Live(raw, needs)

    def _use(self, name: str) -> list[Word] | None:
        words = self.known.get(name)
        if words is not None:
            self.used.add(name)
            self.ever_used.add(name)
        return words

    def _element(self, name: str, at: int) -> list[Word] | None:
        """Return an element of an array, or the value of a variable; a part that may be several words hides it."""
        words = self._use(name)
        if words is None or any(word.live and not word.quoted for word in words[: at + 1]):
            return None
        return words[at : at + 1]

    def _parameter(self, inner: str) -> list[Word] | None:
        """Return what `${NAME}`, `${NAME[@]}`, `${NAME:-text}`, `${NAME##pattern}` and their like are."""
        if match := _ELEMENT.fullmatch(inner):
            name, element = match.groups()
            return self._use(name) if element in ("@", "*") else self._element(name, int(element or 0))
        match = _PARAMETER.fullmatch(inner)
        if match is None:
            return None
        name, sign, rest = match.groups()
        if sign[-1] == "=" and name not in self.known:
            found = [Word((Live(f"${{{name}{sign.replace('=', '-')}{rest}}}"),), quoted=True)]
            self._set(name, found)
            return found
        words = self.known.get(name)
        if words is None or len(words) > 1 or any(word.live for word in words):
            return None
        text = words[0].text if words else ""
        self._use(name)
        if sign[0] in "#%":
            return [Word((_without(text, sign, rest),), quoted=True)]
        is_set = bool(text) or (sign[0] != ":" and bool(words))
        if sign[-1] == "+":
            return [Word((rest if is_set else "",), quoted=True)]
        if not is_set and sign[-1] == "=":
            self._set(name, [Word((rest,), quoted=True)])
        return words if is_set else None if sign[-1] == "?" else [Word((rest,), quoted=True)]

    def _number(self, text: str) -> list[Word] | None:
        """Return the value of arithmetic with whole numbers, and with variables that hold some."""
        plain = re.sub(r"\$\{(\w+)\}|\$(\w+)", r"\1\2", text).strip()
        try:
            tree = ast.parse(plain.replace("#", "$"), mode="eval").body  # 16#ff is no comment
            value = _computed(tree, self.known)
        except (SyntaxError, ValueError, LookupError, ArithmeticError, RecursionError, MemoryError):
            return None
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                self._use(node.id)
        return [Word((str(value),), quoted=True)]

    def _output(self, text: str) -> list[Word] | None:
        """Return what a command prints, if it is basename with words that are known; list what else it runs."""
        inner = _Reader(text, self.known)
        inner.sure = False
        inner.read()
        first, *others = inner.commands or [Simple([])]
        words = first.words[1:]
        if others or first.name != "basename" or len(words) not in (1, 2) or any(word.live for word in words):
            self.commands += [one for one in inner.commands if RUNS.search(one.text) and " -c " not in one.text]
            return None
        self.used |= inner.used
        self.ever_used |= inner.used
        last = words[0].text.rstrip("/").rpartition("/")[2] or words[0].text[:1]
        end = words[1].text if words[1:] else ""
        return [Word((last if last == end else last.removesuffix(end),), quoted=True)]

    # What stands between

    def _bare(self) -> str:
        """Return the word that stands here, if it has no quotes and no expansions."""
        match = _BARE.match(self.text, self.at)
        return match[0] if match else ""

    def _skip_space(self) -> bool:
        """Step over spaces; return whether something is left."""
        while self.at < len(self.text) and (self.text[self.at] in _SPACE or self.text.startswith("\\\n", self.at)):
            self.at += 1 if self.text[self.at] in _SPACE else 2
        return self.at < len(self.text)

    def _skip_blank(self) -> bool:
        """Step over spaces, lines and comments; return whether something is left."""
        while self._skip_space() and self.text[self.at] in "\n#":
            if self.text[self.at] == "#":
                self._skip_line()
            else:
                self.at += 1
        return self.at < len(self.text)

    def _skip_line(self) -> None:
        end = self.text.find("\n", self.at)
        self.at = len(self.text) if end < 0 else end

    def _skip_redirections(self) -> None:
        while self._skip_space() and self._skip_redirection():
            pass

    def _skip_redirection(self) -> bool:
        """Step over what sends input or output elsewhere; return whether it stands here."""
        match = _REDIRECTION.match(self.text, self.at)
        if match is None:
            return False
        self.at = match.end()
        self._skip_space()
        begin = self.at
        self._word()
        if match[1] in ("<<", "<<-"):
            end = re.sub(r"[\\\"']", "", self.text[begin : self.at])
            self._skip_document(end, is_indented=match[1] == "<<-")
        return True

    def _skip_document(self, end: str, *, is_indented: bool) -> None:
        """Leave out the lines of a here-document, which follow the line that names its end."""
        here = self.text.find("\n", self.at)
        lines = self.text[here + 1 :].split("\n") if here >= 0 else []
        stripped = [line.lstrip("\t") if is_indented else line for line in lines]
        if end not in stripped:
            raise _broken(f"<<{end}")
        self.text = self.text[: here + 1] + "\n".join(lines[stripped.index(end) + 1 :])

    def _closing(self, at: int) -> int:
        """Return the index after the bracket that closes the one at `at`, past quotes and brackets within."""
        opened, waits = at, [")" if self.text[at] == "(" else "}"]
        while waits:
            at += 1
            char = self.text[at : at + 1]
            if char == "\\":
                at += 1
            elif char == waits[-1]:
                waits.pop()
            elif char == "'" and waits[-1] != '"':
                at = self.text.find(char, at + 1)
            elif char == '"' or (char == "(" and waits[-1] == ")"):
                waits.append(char.replace("(", ")"))
            elif self.text.startswith(("$(", "${"), at):
                at += 1
                waits.append(")" if self.text[at] == "(" else "}")
            if not char or at < 0:
                raise _broken(self.text[opened:])
        return at + 1


def sourced(words: Sequence[Word]) -> str:
    """Return the file that `source` or `.` reads; empty for another command."""
    return words[1].text if words[1:] and words[0].text in ("source", ".") else ""


def is_of_intel(file: str) -> bool:
    """Return whether a file sets the paths of oneCCL and Intel MPI: a `vars.sh` does if its folder says so."""
    return _OF_INTEL.fullmatch(file) is not None


def _broken(text: str) -> ConfigError:
    return ConfigError(
        what="the text is not a complete script of the shell, or it is one that whet migrate cannot read",
        got=" ".join(text.split())[:80],
        why="a quote, a bracket or a keyword has no end, or stands where none can",
        fix=f"check it with bash -n; if it is complete, {TRACE}",
    )


def _meant(match: re.Match[str]) -> str:
    """Return the character that an escape within $'...' stands for."""
    code = match[1]
    if (code[0] in "xuU" and len(code) > 1) or code[0] in "01234567":
        number = int(code.lstrip("xuU"), 8 if code[0] in "01234567" else 16)
        return chr(0xDC00 + number) if code[0] not in "uU" and 0x80 <= number < 0x100 else chr(number)
    return _ESCAPED.get(code, code if code in "\\'\"?" else f"\\{code}")


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


def _computed(node: ast.expr, known: Mapping[str, Sequence[Word] | None]) -> int:
    """Return the value of an expression; raises LookupError or ValueError for what it does not understand."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        words = known[node.id] or ()
        if len(words) != 1 or words[0].live or not _INTEGER.fullmatch(words[0].text):
            raise ValueError(node.id)
        return int(words[0].text)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        value = _computed(node.operand, known)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_computed(node.left, known), _computed(node.right, known))
    raise ValueError(type(node))


def _joined(parts: Sequence[str | Live]) -> tuple[str | Live, ...]:
    found: list[str | Live] = []
    for part in parts:
        if isinstance(part, str) and found and isinstance(found[-1], str):
            found[-1] += part
        elif part != "":
            found.append(part)
    return tuple(found)


@dataclass
class Script:
    """What a text holds."""

    commands: list[Simple]
    used: frozenset[str]
    """The variables of the text whose values have taken their places in words."""
    needed: frozenset[str] = frozenset()
    """Those that stand in a part of a word which only the shell can compute."""


def read(text: str, known: Mapping[str, Word] | None = None) -> Script:
    """Return the simple commands of the text, in order; `known` are variables that it is started with."""
    reader = _Reader(text, {name: [value] for name, value in (known or {}).items()})
    reader.read()
    return Script(reader.commands, frozenset(reader.ever_used), frozenset(reader.needed))
