"""A process that has torch and a tiny run in memory and forks one child a trial; spoken to in lines of JSON."""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import traceback
from pathlib import Path

import trials


def main() -> None:
    """Answer `{"start": name, "given": {}}` with a pid, and `{"ask": pid}` with its wait status or null."""
    with tempfile.TemporaryDirectory() as folder:
        trials.prepare(Path(folder))
        print(json.dumps(folder), file=sys.__stdout__, flush=True)
        for line in sys.stdin:
            order = json.loads(line)
            answer = _start(order) if "start" in order else _state(order["ask"])
            print(json.dumps(answer), file=sys.__stdout__, flush=True)


def _start(order: dict) -> int:
    child = os.fork()
    if child:
        return child
    try:
        os._exit(getattr(trials, order["start"])(**order["given"]))
    except BaseException:
        traceback.print_exc()
        os._exit(99)


def _state(child: int) -> int | None:
    done, status = os.waitpid(child, os.WNOHANG)
    return status if done else None


if __name__ == "__main__":
    sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115 - the figures of runs; the answers go past it
    logging.getLogger("whet").setLevel(logging.ERROR)
    main()
