"""Ranks that only join: each returns what it met, or the error that `forked.py` writes for it."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from whet import log
from whet.dist import group

_LONGEST_S = 60.0


def joins(job: dict[str, Any], rank: int) -> dict[str, Any]:
    """Join the other ranks, with more variables for all or for one of them, and agree on something."""
    log.set_up()
    log.set_level("error")  # as every rank but rank 0 has it in a run
    os.environ.update(job.get("of_rank", {}).get(str(rank), {}))
    act = job.get("rank_0_does") if rank == 0 else None
    if act is not None:
        _ACTS[act](Path(job["folder"]))
        if act != "starts late":
            return {}
    joined = group.join(job.get("backend"), job.get("timeout_s", 60))
    assert joined is not None
    return {"agreed": joined.any_of(rank == 1), "interface": os.environ.get("GLOO_SOCKET_IFNAME")}


def listens(job: dict[str, Any], rank: int) -> dict[str, Any]:
    """Join, and return the addresses at which the processes of this job listen, as Linux shows them."""
    joined = group.join(None, 60)
    assert joined is not None
    joined.any_of(False)
    own = {str(one.readlink()) for one in Path("/proc/self/fd").iterdir() if one.is_symlink()}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text("utf-8").splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and f"socket:[{rest[5]}]" in own:
                found.append(local.partition(":")[0])
    joined.wait()
    return {"listens": found}


def _start_late(folder: Path) -> None:
    """Wait until rank 1 says that it waits."""
    until, said = time.monotonic() + _LONGEST_S, folder / "output-1.txt"
    while "waits at" not in (said.read_text("utf-8") if said.exists() else ""):
        assert time.monotonic() < until, "rank 1 did not say that it waits"
        time.sleep(0.05)


def _serve_something_else(folder: Path) -> None:
    """Answer every connection on rank 0's port as a web server does, until rank 1 has ended."""
    server = socket.create_server(("127.0.0.1", int(os.environ["MASTER_PORT"])))

    def answer() -> None:
        while True:
            connection, _ = server.accept()
            with connection, suppress(OSError):
                connection.recv(1024)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")

    threading.Thread(target=answer, daemon=True).start()
    until = time.monotonic() + _LONGEST_S
    while not (folder / "rank-1.json").exists() and time.monotonic() < until:
        time.sleep(0.05)


_ACTS = {"starts late": _start_late, "is something else": _serve_something_else}
