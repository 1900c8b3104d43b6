"""How much more than what is alive a process holds: what its allocator keeps in gaps.

Between the blocks that torch asks for, aligned to 64 bytes, glibc puts small objects. A gap that a block has left then
does not take another one of its size, and the heap grows: by a fifth of what a step keeps, and where blocks are
recomputed by several times of it. How far follows from the sizes and their order. So these are replayed, by the
allocator that the run will have, in a process of their own that touches none of the memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from whet.log import logger
from whet.plan.rehearsal import Trace

_MOST_STEPS = 8
_LIMIT_S = 20.0
_REPLAYS = 3
_OBJECTS = {None: 1.0, "blocks": 1.25, "selective": 2.0}
"""Small objects for each block of memory, by what is recomputed: fitted to runs (`benchmarks/plan/run.py`)."""
_USUAL_FRAC = 0.29
"""Of what a step allocates beyond its peak, where no replay is made: the measured share for a model that recomputes
nothing (`benchmarks/plan/run.py`)."""


@dataclass(frozen=True)
class Steps:
    """The steps that are replayed."""

    n_tokens: int
    """Tokens of the micro-batch that was rehearsed."""
    tokens: Sequence[int]
    """Tokens of the micro-batches of some steps: holes of one do not fit another."""
    state_bytes: Sequence[int]
    """The tensors of the optimizer's state, which the first step makes."""
    checkpointing: Literal["blocks", "selective"] | None = None


def gap_bytes(trace: Trace, steps: Steps) -> int:
    """Return by how much the heap outgrows what is alive at its peak: the most of some replays of some steps."""
    plan = {
        "events": trace.events,
        "sizes": [[memory.n_bytes, steps.n_tokens in memory.shape] for memory in trace.memories],
        "factors": [n / steps.n_tokens for n in steps.tokens[:_MOST_STEPS]],
        "state": list(steps.state_bytes),
        "objects": _OBJECTS[steps.checkpointing],
    }
    try:
        grown = max(_replayed(json.dumps(plan | {"seed": seed}) for seed in range(_REPLAYS)))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        logger.info("the allocator's gaps are the usual ones: no replay (%s)", type(error).__name__)
        return usual_gap_bytes(trace)
    return max(grown - trace.peak()[0] - sum(steps.state_bytes), 0)


def _replayed(plans: Iterable[str]) -> list[int]:
    """Return how far the heap grows in each of these replays, which run side by side."""
    command = [sys.executable, "-S", "-c", _REPLAY]
    runs = [
        (subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True), plan)  # noqa: S603
        for plan in plans
    ]
    try:
        return [int(run.communicate(plan, timeout=_LIMIT_S)[0]) for run, plan in runs]
    finally:
        for run, _ in runs:
            run.kill()
            run.wait()


def usual_gap_bytes(trace: Trace) -> int:
    """Return the gaps of a step as they usually are, without a replay."""
    return int(_USUAL_FRAC * (trace.turnover_bytes - trace.peak()[0]))


_REPLAY = """
import ctypes, json, random, sys
plan = json.load(sys.stdin)
libc = ctypes.CDLL(None)
libc.prctl(1, 9)  # it ends with the process that reads its result
malloc, free, aligned = libc.malloc, libc.free, libc.posix_memalign
malloc.restype, malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
free.argtypes = [ctypes.c_void_p]
aligned.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
for name, value in ((-3, 1 << 30), (-1, -1), (-2, 64 << 20)):  # as kernels/allocator.py has it
    libc.mallopt(name, value)
place, numbers, small, spans = ctypes.c_void_p(), random.Random(plan["seed"]), [], []

def take(n_bytes):
    n_objects = int(plan["objects"]) + (numbers.random() < plan["objects"] % 1)
    for _ in range(n_objects):  # of torch and of Python, which live for a while
        small.append(malloc(numbers.choice((24, 48, 88, 120, 200, 300, 520, 700))))
        if len(small) > 30000:
            number = numbers.randrange(len(small))
            small[number], small[-1] = small[-1], small[number]
            free(small.pop())
    aligned(ctypes.byref(place), 64, n_bytes)
    spans.append((place.value, place.value + n_bytes))
    return place.value

sizes = plan["sizes"]
for step, factor in enumerate(plan["factors"]):
    there = {}
    for number in plan["events"]:
        if number >= 0:
            n_bytes, grows = sizes[number]
            there[number] = take(int(n_bytes * factor) if grows else n_bytes)
        elif ~number in there:
            free(there.pop(~number))
    if step == 0:
        for n_bytes in plan["state"]:
            take(n_bytes)
    for address in there.values():
        free(address)
covered, end = 0, 0
for first, last in sorted(spans):  # what was used of the heap, and of mappings apart from it
    covered += max(last - max(first, end), 0)
    end = max(end, last)
print(covered)
"""
