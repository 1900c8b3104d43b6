"""Runs `whet migrate`, and asks whet about the command that it prints."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
from dataclasses import dataclass
from typing import Any

from documented_commands import check_command

from whet.cli.main import run


@dataclass(frozen=True)
class Migrated:
    """What `whet migrate --json` printed."""

    code: int
    found: dict[str, Any]

    @property
    def command(self) -> str:
        """The command on one line; fails if there is none."""
        assert self.found["command"], self.found
        return self.found["command"].replace(" \\\n    ", " ")

    def rows(self, status: str | None = None) -> dict[str, dict[str, str]]:
        """Return the rows with this status, or all, by what was given."""
        rows = [row for one in self.found["runs"] for row in one["rows"]]
        return {row["given"]: row for row in rows if status in (None, row["status"])}

    def said(self, given: str) -> tuple[str, str]:
        """Return what became of one thing: the status, and what stands for it or why."""
        row = self.rows()[given]
        return row["status"], row["becomes"] or row["why"]


def migrate(*words: str) -> Migrated:
    """Return what becomes of a command line or a file, after whet's own parser has taken the command."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = run(["migrate", "--json", *words])
    assert out.getvalue(), words
    migrated = Migrated(code, json.loads(out.getvalue()))
    for one in migrated.found["runs"]:
        if one["command"] and one["task"] and not one["partial"]:
            check(one["command"])
    return migrated


def check(command: str) -> None:
    """Have whet read the command, and what `whet launch` starts, as it does before a run; raises ConfigError.

    A variable that only the shell knows is a number, or the end of a text; a file that is gone is not read.
    """
    command = command.replace(" --deepspeed gone.json", "")
    words = shlex.split(re.sub(r'"\$(?:\w+|\{[^}"]+\})"', "1", command.replace(" \\\n", " ").removesuffix(" $MORE")))
    begin = words.index("whet")
    check_command(words[begin:])
    if words[begin + 1] in ("launch", "k8s"):
        check_command(["whet", *words[words.index("--", begin) + 1 :]])
