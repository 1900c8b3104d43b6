"""Run a command of whet and return its JSON object: what the scripts of this folder share."""

import json
import shutil
import subprocess
import sys
from collections.abc import Collection
from typing import Any


def whet(command: str, *words: object, accepts: Collection[str] = ("ok",)) -> dict[str, Any]:
    """Return the object of `whet COMMAND --json WORDS`.

    If its status is not accepted, print the object and end with the exit code of the command. Text for people goes to
    standard error at once. A killed command prints nothing: its status is `killed`.
    """
    program = ["whet"] if shutil.which("whet") else [sys.executable, "-m", "whet"]
    line = [*program, command, "--json", *map(str, words)]
    done = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=False)
    killed = {"command": command, "status": "killed", "exit_code": done.returncode}
    found = json.loads(done.stdout.splitlines()[-1]) if done.stdout.strip() else killed
    if found["status"] not in accepts:
        show(found)
        sys.exit(found["exit_code"] or 1)
    return found


def show(found: dict[str, Any]) -> None:
    """Print the answer of a script: one JSON object on one line."""
    print(json.dumps(found, ensure_ascii=False), flush=True)
