"""An exchange of short texts between the ranks of Intel MPI's or MPICH's launcher, by its own protocol (PMI-1).

The launcher gives each rank a connection, PMI_FD, that an MPI library would use to start up. whet uses it before torch's
process group exists, to learn where rank 0 is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

_FD, _RANK, _SIZE = "PMI_FD", "PMI_RANK", "PMI_SIZE"
_LONGEST = 1024
"""Bytes of a value that every launcher takes."""


class PMIError(Exception):
    """The launcher does not speak the protocol as expected."""


def serves(environment: Mapping[str, str]) -> bool:
    """Return whether the launcher of this process offers the exchange."""
    return all(environment.get(name, "").isdigit() for name in (_FD, _RANK, _SIZE))


def exchange(text: str, environment: Mapping[str, str]) -> list[str]:
    """Return the texts of all ranks, in the order of their numbers; every rank has to call this, once.

    Raises PMIError. The launcher has time until the ranks end: this waits for all of them.
    """
    if len(text) > _LONGEST or not text.isascii() or " " in text or "=" in text:
        raise PMIError(f"this text cannot be sent: {text[:80]}")
    connection = _Connection(int(environment[_FD]))
    rank, n_ranks = int(environment[_RANK]), int(environment[_SIZE])
    connection.ask("init pmi_version=1 pmi_subversion=1", "response_to_init")
    space = connection.ask("get_my_kvsname", "my_kvsname")["kvsname"]
    connection.ask(f"put kvsname={space} key=whet-{rank} value={text}", "put_result")
    connection.ask("barrier_in", "barrier_out")
    asked = (f"get kvsname={space} key=whet-{number}" for number in range(n_ranks))
    found = [connection.ask(one, "get_result")["value"] for one in asked]
    connection.ask("finalize", "finalize_ack")  # a rank that ends without this ends all others
    return found


class _Connection:
    """Questions and answers, a line each."""

    def __init__(self, fd: int) -> None:
        self._fd, self._rest = fd, b""

    def ask(self, question: str, expected: str) -> dict[str, str]:
        """Return the fields of the answer; raises PMIError if it is another one."""
        try:
            os.write(self._fd, f"cmd={question}\n".encode())
            line = self._line()
        except OSError as error:
            raise PMIError(f"{question.split()[0]}: {error.strerror}") from error
        fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
        if fields.get("cmd") != expected or fields.get("rc", "0") != "0":
            raise PMIError(f"{question.split()[0]} was answered by {line or 'nothing'}")
        return fields

    def _line(self) -> str:
        while b"\n" not in self._rest:
            data = os.read(self._fd, 4096)
            if not data:
                break
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode("utf-8", "replace")
