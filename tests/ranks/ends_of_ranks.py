"""Ways for the ranks of a test to end: all at once, with and without a trace, or one during a save."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from pathlib import Path
from typing import IO, Any

from transformers import TrainerCallback

from whet.store import snapshot

_held: list[IO[str]] = []
"""Files whose locks this process holds to its end."""


def die_in_save(rank: int, save: int, output: Path) -> None:
    """End rank 1 while rank 0 writes the files of this save (from 1), which waits for the end of rank 1."""
    begun, alive = output.with_name("save has begun"), output.with_name("rank 1 is alive")
    if rank == 1:
        output.parent.mkdir(parents=True, exist_ok=True)
        _held.append(alive.open("w"))
        fcntl.flock(_held[0], fcntl.LOCK_EX)  # until this process ends
        threading.Thread(target=_end_when_there, args=(begun,), daemon=True).start()
        return
    real, count = snapshot.write_tensors, 0

    def slow(*given: Any) -> None:
        nonlocal count
        count += 1
        if count == save:
            begun.touch()
            with alive.open("r") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
        real(*given)

    snapshot.write_tensors = slow


def _end_when_there(path: Path) -> None:
    while not path.exists():
        time.sleep(0.001)
    os._exit(9)


class AllStop(TrainerCallback):
    """Ends training after a step on all ranks."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            control.should_training_stop = True


class AllDie(TrainerCallback):
    """Ends this process without a trace when a step begins, as a power cut does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            os._exit(9)
