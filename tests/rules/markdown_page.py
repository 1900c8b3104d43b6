"""The examples of a Markdown page: its fenced blocks, and the commands in those that are shell."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

_OPENING = re.compile(r"^(?P<indent> *)(?P<fence>```+)(?P<info>.*)$")
_BETWEEN_COMMANDS = set("();<>|&")


@dataclass(frozen=True)
class Block:
    """A fenced block: where its text begins, the words after the fence, the text."""

    page: Path
    line: int
    """Line of the page, from 1, on which the text begins."""
    info: tuple[str, ...]
    text: str

    @property
    def language(self) -> str:
        """The first word after the fence; empty where there is none."""
        return self.info[0] if self.info else ""

    @property
    def runs(self) -> bool:
        """Whether the block is run as it stands."""
        return "no-run" not in self.info

    @property
    def refused(self) -> bool:
        """Whether whet refuses the block's command: the example shows the refusal."""
        return "refused" in self.info

    @property
    def is_output(self) -> bool:
        """Whether the block shows what the block before it prints."""
        return "output" in self.info

    @property
    def file_name(self) -> str | None:
        """The file that the block shows: its first line is a comment that names it, or a word after the fence does."""
        found = re.match(r"# ([\w.-]+\.\w+)$", self.text.partition("\n")[0])
        named = [word for word in self.info[1:] if re.fullmatch(r"[\w-]+\.\w+", word)]
        return found[1] if found else named[0] if named else None

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of the page, in order; ValueError where a fence is not closed."""
    lines = page.read_text("utf-8").splitlines()
    found, at = [], 0
    while at < len(lines):
        opening = _OPENING.match(lines[at])
        at += 1
        if opening:
            end = next((n for n in range(at, len(lines)) if lines[n].strip() == opening["fence"]), None)
            if end is None:
                raise ValueError(f"{page}:{at}: this block has no end")
            text = dedent("\n".join(lines[at:end])) + "\n"
            found.append(Block(page, at + 1, tuple(opening["info"].split()), text))
            at = end + 1
    return found


def anchors(page: Path) -> set[str]:
    """Return the anchors of the page's headings: small letters, hyphens for spaces, no other signs."""
    prose = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(script: str) -> Iterator[list[str]]:
    """Yield the words of each simple command of a shell script, without what stands before it (`VAR=x`, `|`, `&&`)."""
    for line in script.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= _BETWEEN_COMMANDS:
                if words:
                    yield words
                words = []
            elif words or not re.match(r"\w+=", word):
                words.append(word)


def at_own_lines(parts: list[Block]) -> str:
    """Return the blocks as one script in which every line has the number that it has on the page."""
    lines: list[str] = []
    for block in parts:
        lines += [""] * (block.line - 1 - len(lines))
        lines += block.text.splitlines()
    return "\n".join(lines) + "\n"
