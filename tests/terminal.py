"""Runs whet on a terminal of a given width, and returns what it showed there."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios


def on_terminal(words: list[str], columns: int, code: int = 0, **variables: str) -> list[str]:
    """Return every line that the command showed, those that were drawn over as well; it has to end with this code."""
    screen, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    command, own = [sys.executable, "-m", "whet", *words], environment | {"TERM": "xterm"} | variables
    process = subprocess.Popen(command, env=own, stdin=side, stdout=side, stderr=side, start_new_session=True)
    os.close(side)
    shown = b""
    while True:
        try:
            shown += os.read(screen, 1 << 16)
        except OSError:  # the process has closed its side
            break
    os.close(screen)
    assert process.wait() == code, shown.decode()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    return [line for line in re.split(r"[\r\n]+", text) if line.strip()]
