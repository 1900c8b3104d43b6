"""Connections between the hosts of a run: names that are resolved, ports that are reached, and the speed of links."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass

from whet.hardware.network import listening

_CONNECT_S = 3.0
_CHUNK = bytes(1 << 16)
_TRANSFER_S = 1.0
"""The longest that a measurement of a link takes."""
_TRANSFER_BYTES = 64 << 20


@dataclass(frozen=True)
class Greeting:
    """What a try to connect to another host's listener led to."""

    error: str
    """Why it failed, "" if it did not."""
    answer: str = ""
    """What the listener calls itself."""
    bytes_per_s: float = 0.0


class Listener:
    """Answers the other hosts of the run until it is closed: only those that know the run's secret word."""

    def __init__(self, port: int, word: str, name: str) -> None:
        self._socket = listening(port)
        self._word, self._name = word, name
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """Give the port back."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._socket.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with closing(connection), suppress(OSError):
            connection.settimeout(_CONNECT_S)
            if connection.recv(len(self._word), socket.MSG_WAITALL).decode("ascii", "replace") != self._word:
                return
            connection.sendall(f"{self._name}\n".encode())
            n_bytes, started = 0, time.monotonic()
            while data := connection.recv(1 << 18):
                n_bytes += len(data)
            connection.sendall(f"{n_bytes / max(time.monotonic() - started, 1e-6)}\n".encode())


def greet(address: str, port: int, word: str, *, source: str = "", measure: bool = False) -> Greeting:
    """Connect to another host's listener, from an address of this host if one is given; measure the speed if asked."""
    try:
        connection = socket.create_connection((address, port), _CONNECT_S, (source, 0) if source else None)
    except OSError as error:
        return Greeting("no answer" if isinstance(error, TimeoutError) else error.strerror or str(error))
    with closing(connection):
        try:
            connection.sendall(word.encode())
            lines = connection.makefile("r", encoding="utf-8")
            answer = lines.readline().strip()
            if not answer:
                return Greeting("something else answers on this port")
            if measure:
                _send_for_a_while(connection)
            connection.shutdown(socket.SHUT_WR)
            return Greeting("", answer, float(lines.readline() or 0))
        except OSError as error:
            return Greeting("the connection hangs" if isinstance(error, TimeoutError) else str(error))


def greet_all(targets: Mapping[str, tuple[str, int]], word: str, source: str = "") -> dict[str, Greeting]:
    """Return what a try to connect to each (address, port) led to, all tried at the same time."""
    found: dict[str, Greeting] = {}

    def attempt(name: str, address: str, port: int) -> None:
        found[name] = greet(address, port, word, source=source)

    threads = [threading.Thread(target=attempt, args=(name, *target)) for name, target in targets.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def _send_for_a_while(connection: socket.socket) -> None:
    until, n_sent = time.monotonic() + _TRANSFER_S, 0
    while n_sent < _TRANSFER_BYTES and time.monotonic() < until:
        connection.sendall(_CHUNK)
        n_sent += len(_CHUNK)
