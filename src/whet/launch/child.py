"""Starts one rank and stays with it: `python -m whet.launch.child SPEC`, where SPEC is JSON.

This process binds itself to the rank's CPUs and memory, which the rank inherits, and passes signals on. The launcher
holds the other end of standard input. When that closes, because the launcher was killed or its host is gone, the rank
is stopped: no rank outlives its launcher. It runs the same on this machine and at the other end of ssh.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

STOP_S = 4.0
"""Seconds that a rank has to end by itself when another one failed or the launcher is gone."""
WORDS: dict[bytes, signal.Signals] = {
    b"t": signal.SIGTERM, b"i": signal.SIGINT, b"h": signal.SIGHUP, b"k": signal.SIGKILL,
}  # fmt: skip
"""What the launcher writes to standard input -> the signal that the rank gets."""
NOT_PRELOADED = 78
_PR_SET_PDEATHSIG = 1
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_MPOL_PREFERRED = 1
_LOADED_S = 5.0
_EVERY_S = 0.05


def main(spec: Mapping[str, Any]) -> int:
    """Run the command of the specification; return its exit code, 128 + the signal that killed it."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the launcher decides, and says so on standard input
    if spec["cpus"]:
        os.sched_setaffinity(0, spec["cpus"])
    prefer_memory_of(spec["nodes"])
    try:
        rank = _started(spec["command"])
    except OSError as error:
        print(f"whet launch: {spec['command'][0]} cannot be started: {error.strerror}", file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126
    try:
        code = _missing_libraries(rank, spec["preload"]) or _watched(rank)
    finally:
        _signal(rank, signal.SIGKILL)  # what the rank has started and left behind
    return code if code >= 0 else 128 - code


def prefer_memory_of(nodes: Sequence[int]) -> bool:
    """Have the memory of this process and its children come from one NUMA node; return whether the kernel allows it."""
    call = _SET_MEMPOLICY.get(os.uname().machine)
    if len(nodes) != 1 or call is None:
        return False
    mask = (ctypes.c_ulong * (nodes[0] // 64 + 1))()
    mask[nodes[0] // 64] = 1 << nodes[0] % 64
    return ctypes.CDLL(None).syscall(call, _MPOL_PREFERRED, mask, 64 * len(mask) + 1) == 0


def _started(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start the rank in a session of its own, so that a signal to the group reaches all that it starts."""
    library, parent = ctypes.CDLL(None), os.getpid()

    def before_exec() -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        library.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))  # if this process is killed, nobody else would stop it
        if os.getppid() != parent:
            os._exit(1)

    return subprocess.Popen(  # noqa: S603 (the command of the user)
        command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=before_exec
    )


def _missing_libraries(rank: subprocess.Popen[bytes], paths: Sequence[str]) -> int:
    """Return 0 once every library is in the rank's memory; the linker ignores one that it cannot load."""
    wanted, until = {os.path.realpath(path) for path in paths}, time.monotonic() + _LOADED_S
    while wanted and rank.poll() is None:
        with suppress(OSError):
            lines = Path(f"/proc/{rank.pid}/maps").read_text("utf-8", "replace").splitlines()
            wanted -= {os.path.realpath(line.split(maxsplit=5)[5]) for line in lines if line.count(" /")}
        if wanted and time.monotonic() > until:
            print(f"whet launch: not loaded, though preloaded: {', '.join(sorted(wanted))}", file=sys.stderr)
            return NOT_PRELOADED
        if wanted:
            time.sleep(_EVERY_S)
    return 0


def _watched(rank: subprocess.Popen[bytes]) -> int:
    """Pass on what the launcher says until the rank ends; stop the rank once the launcher is gone."""
    kill_at = float("inf")
    says: list[int] = [0]
    while (code := rank.poll()) is None:
        ready, _, _ = select.select(says, [], [], _EVERY_S)
        word = os.read(0, 1) if ready else None
        if word == b"":
            says, kill_at = [], min(kill_at, time.monotonic() + STOP_S)
            _signal(rank, signal.SIGTERM)
        elif word in WORDS:
            _signal(rank, WORDS[word])
        if time.monotonic() > kill_at:
            _signal(rank, signal.SIGKILL)
        elif not says:
            time.sleep(_EVERY_S)
    return code


def _signal(rank: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to the rank and to all that it has started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(rank.pid, number)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
