"""Keeps secrets out of the command lines of ranks: every user of a machine can read those.

A rank whose words hold a secret, such as `--token` and its value, is started as `python -m whet.launch.words`, with ***
in the place of the secret. The secret is in a variable, which only the owner of the process can read. This module takes
it out before it runs the program.
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_VARIABLE = "WHET_LAUNCH_WORDS"
_MODULE = "whet.launch.words"
_SAFE = "-P"
"""The option of Python that keeps the folder of the program, or the current one, out of its path."""


def without_secrets(command: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the command line of a rank and the variables that it needs; those of `is_python` alone are changed."""
    from whet import system
    from whet.config import secrets

    shown, held = secrets.hidden(command)
    if not held or not is_python(command):
        return list(command), {}
    words = system.python("-m", _MODULE, *shown[1:], program=command[0])
    return words, {_VARIABLE: json.dumps({str(one): held[one] for one in held})}


def is_python(command: Sequence[str]) -> bool:
    """Return whether this is a script or a module for the Python of this process, with no option but -P."""
    found = shutil.which(command[0])
    ours = found is not None and Path(found).samefile(sys.executable)
    first = next((word for word in command[1:] if word != _SAFE), "")
    return ours and (first == "-m" or Path(first).suffix == ".py")


def main(words: Sequence[str], held: Mapping[str, str]) -> None:
    """Run the script, or the module after -m, with its own words; `held` has the secret ones by their place."""
    own = [held.get(str(place), word) for place, word in enumerate(words, start=1)]
    if sys.orig_argv[1] != _SAFE and not os.environ.get("PYTHONSAFEPATH"):
        del sys.path[0]  # of this module
    is_safe = own[0] == _SAFE or bool(os.environ.get("PYTHONSAFEPATH"))
    own = own[1:] if own[0] == _SAFE else own
    is_module = own[0] == "-m"
    if not is_safe:
        sys.path.insert(0, str(Path.cwd() if is_module else Path(own[0]).resolve().parent))
    if is_module:
        sys.argv = own[1:]
        runpy.run_module(own[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = own
        runpy.run_path(own[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:], json.loads(os.environ.pop(_VARIABLE)))
