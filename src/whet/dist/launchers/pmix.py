"""An exchange of short texts between the ranks of Open MPI's launcher, or Slurm's with --mpi=pmix, by their library PMIx."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

_STRING, _GLOBAL = 3, 3
"""PMIX_STRING and PMIX_GLOBAL of pmix_common.h."""
_LONGEST_NAMESPACE = 255


class PMIxError(Exception):
    """The library is missing or reports an error."""


class _Process(ctypes.Structure):
    _fields_ = [("space", ctypes.c_char * (_LONGEST_NAMESPACE + 1)), ("rank", ctypes.c_uint32)]


class _Value(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_uint16), ("text", ctypes.c_char_p), ("more", ctypes.c_uint64 * 3)]


def serves(environment: Mapping[str, str]) -> bool:
    """Return whether the launcher of this process offers the exchange."""
    return "PMIX_RANK" in environment and "PMIX_NAMESPACE" in environment


def exchange(text: str, n_ranks: int) -> list[str]:
    """Return the texts of all ranks, in the order of their numbers; every rank has to call this, once. Raises PMIxError."""
    library, own = _library(), _Process()
    _check(library.PMIx_Init(ctypes.byref(own), None, ctypes.c_size_t(0)), "PMIx_Init")
    value = _Value(kind=_STRING, text=text.encode())
    _check(library.PMIx_Put(ctypes.c_uint8(_GLOBAL), b"whet", ctypes.byref(value)), "PMIx_Put")
    _check(library.PMIx_Commit(), "PMIx_Commit")
    _check(library.PMIx_Fence(None, ctypes.c_size_t(0), None, ctypes.c_size_t(0)), "PMIx_Fence")
    found = [_get(library, _Process(own.space, number)) for number in range(n_ranks)]
    _check(library.PMIx_Fence(None, ctypes.c_size_t(0), None, ctypes.c_size_t(0)), "PMIx_Fence")
    _check(library.PMIx_Finalize(None, ctypes.c_size_t(0)), "PMIx_Finalize")
    return found


def _get(library: ctypes.CDLL, process: _Process) -> str:
    answer = ctypes.POINTER(_Value)()
    code = library.PMIx_Get(ctypes.byref(process), b"whet", None, ctypes.c_size_t(0), ctypes.byref(answer))
    _check(code, "PMIx_Get")
    if answer.contents.kind != _STRING or answer.contents.text is None:
        raise PMIxError("PMIx_Get returned no text")
    return answer.contents.text.decode()


def _library() -> ctypes.CDLL:
    for name in (*_of_launcher(), "libpmix.so.2", ctypes.util.find_library("pmix")):
        if name is not None:
            try:
                return ctypes.CDLL(name)
            except OSError:
                continue
    raise PMIxError("neither the launcher nor this machine has the library libpmix.so.2")


def _of_launcher() -> Iterator[str]:
    """Yield the library that the nearest parent process uses: Open MPI 5 brings one that the linker does not find."""
    pid = os.getppid()
    while pid > 1:
        try:
            maps, stat = (Path(f"/proc/{pid}/{name}").read_text("utf-8", "replace") for name in ("maps", "stat"))
        except OSError:
            return
        for line in maps.splitlines():
            if Path(path := line[line.find("/") :]).name.startswith("libpmix.so"):
                yield path
                return
        pid = int(stat.rpartition(")")[2].split()[1])


def _check(code: int, call: str) -> None:
    if code != 0:
        raise PMIxError(f"{call} ended with {code}")
