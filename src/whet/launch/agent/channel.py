"""Messages between the launcher and the agent of a host: lines of JSON over pipes or a socket, and a beat when idle."""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

Message = Mapping[str, Any]

_MARK = b"whet-launch: "
"""Begins every message; what the start files of a remote shell print is before it, on the same line or on others."""
_BEAT_S = 2.0
_MOST_WAITING = 1000
_CLOSING_S = 2.0


class Channel:
    """One end of the connection. No call but `send_output` ever waits for the other side."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self.noise: list[str] = []
        """Lines that are no messages, such as those of a shell's start files."""
        self._read_fd, self._write_fd = read_fd, write_fd
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._outbox: deque[bytes] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self.ended = threading.Event()
        """Set when the other side has closed the connection and all its messages are in the inbox."""
        self._n_lines = 0
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._writer.start()
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def n_lines(self) -> int:
        """How many lines have come from the other side, beats included."""
        return self._n_lines

    def send(self, **message: Any) -> None:
        """Send a message as soon as the other side takes it."""
        with self._changed:
            self._outbox.append(_MARK + json.dumps(message).encode() + b"\n")
            self._changed.notify_all()

    def send_output(self, **message: Any) -> None:
        """Send output of a rank; wait while too much of it is on the way, as a pipe would."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._outbox) < _MOST_WAITING or self._closing)
        self.send(**message)

    def receive(self, within_s: float) -> Message | None:
        """Return the next message; None if none comes in time, or the other side is gone."""
        until = time.monotonic() + within_s
        while True:
            with suppress(queue.Empty):
                return self._inbox.get(timeout=0.05)
            if time.monotonic() > until or self.is_over():
                return None

    def is_over(self) -> bool:
        """Return whether the other side is gone, and all its messages have been taken."""
        return self.ended.is_set() and self._inbox.empty()

    def received(self) -> list[Message]:
        """Return the messages that are here."""
        found: list[Message] = []
        with suppress(queue.Empty):
            while True:
                found.append(self._inbox.get_nowait())
        return found

    def close(self) -> None:
        """Send what still waits, if the other side takes it soon, and close the connection."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._writer.join(_CLOSING_S)

    def _write(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._outbox or self._closing, _BEAT_S)
                    data = b"".join(self._outbox) or (_MARK + b"{}\n")
                    if self._closing and not self._outbox:
                        break
                    self._outbox.clear()
                    self._changed.notify_all()
                while data:
                    data = data[os.write(self._write_fd, data) :]
        except OSError:  # the other side is gone: the reader says so
            with self._changed:
                self._closing = True
                self._changed.notify_all()
        finally:
            with suppress(OSError):
                os.close(self._write_fd)

    def _read(self) -> None:
        rest = b""
        with suppress(OSError):
            while data := os.read(self._read_fd, 1 << 16):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._take(line)
        self.ended.set()

    def _take(self, line: bytes) -> None:
        noise, mark, text = line.partition(_MARK)
        if noise or not mark:
            self.noise.append(noise.decode("utf-8", "replace"))
        if not mark:
            return
        self._n_lines += 1
        if message := json.loads(text):
            self._inbox.put({**message, "arrived": time.time()})


class Silence:
    """How long the other side has been silent, in time that this process was running."""

    _LONGEST_TICK_S = 0.5
    """A process that was stopped, or a machine that slept, has not listened: its own absence does not count."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._n_lines = channel.n_lines
        self._at = time.monotonic()
        self._silent_s = 0.0

    def seconds(self) -> float:
        """Return the seconds since the last line; to be called several times a second."""
        now = time.monotonic()
        self._silent_s += min(now - self._at, self._LONGEST_TICK_S)
        self._at = now
        if self._channel.n_lines != self._n_lines:
            self._n_lines, self._silent_s = self._channel.n_lines, 0.0
        return self._silent_s
