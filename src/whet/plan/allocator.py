"""How much memory a run's allocator takes from the system: what is alive at the peak, and the gaps it keeps between.

Between the blocks that torch asks for, glibc puts small objects, and a gap is filled by what is smaller: the heap grows
beyond what is alive. How far follows from the sizes and their order. So these are replayed, by the allocator that the
run will have (kernels/allocator.py), in a process of their own that touches none of the memory.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from whet import system
from whet.kernels.library import library
from whet.log import logger
from whet.plan.rehearsal import Trace

_LIMIT_S = 20.0
_REPLAYS = 3
_OBJECTS = {"least": 0.1, "bytes": 10e6}
"""How many small objects come to lie behind a block of memory: at least so many, one more for so many bytes, and never
more than one. Fitted to the runs of `benchmarks/plan/run.py`."""
_USUAL_FRAC = 0.29
"""Of what a step allocates beyond its peak, where no replay is made: the measured share for a model that recomputes
nothing (`benchmarks/plan/run.py`)."""


@dataclass(frozen=True)
class Pass:
    """A piece of a run as it was rehearsed, for so many tokens as it has then."""

    trace: Trace
    factor: float = 1.0
    """Tokens of the pass over those of the rehearsal; what grows with them is as much larger."""
    n_tokens: int = 0
    """Tokens of the rehearsal, a dimension of what grows with them; 0: nothing does."""
    gradients: Set[int] = frozenset()
    """Memories of the trace that stay until the update is done."""
    update: Trace | None = None
    """What the update after the pass takes; what it does not free is the optimizer's state."""


def heap_bytes(passes: Sequence[Pass]) -> int:
    """Return how far these passes, one after the other, make the heap grow: the most of some replays."""
    traces = {id(one): one for each in passes for one in (each.trace, each.update) if one is not None}
    plan = {
        "traces": {
            str(key): {"events": trace.events, "sizes": [[one.n_bytes, list(one.shape)] for one in trace.memories]}
            for key, trace in traces.items()
        },
        "passes": [
            {
                "trace": str(id(each.trace)),
                "factor": each.factor,
                "n_tokens": each.n_tokens,
                "kept": sorted(each.gradients),
                "update": None if each.update is None else str(id(each.update)),
            }
            for each in passes
        ],
        "objects": _OBJECTS,
        "fills": library() is not None,
    }
    if not system.is_linux():
        return _usual_heap_bytes(passes)
    try:
        return max(_replayed(json.dumps(plan | {"seed": seed}) for seed in range(_REPLAYS)))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        logger.info("the allocator's gaps are the usual ones: no replay (%s)", type(error).__name__)
        return _usual_heap_bytes(passes)


def _replayed(plans: Iterable[str]) -> list[int]:
    """Return how far the heap grows in each of these replays, which run side by side."""
    command = system.python("-S", "-c", _REPLAY)
    runs = [
        (subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True), plan)  # noqa: S603
        for plan in plans
    ]
    try:
        return [int(run.communicate(plan, timeout=_LIMIT_S)[0]) for run, plan in runs]
    finally:
        for run, _ in runs:
            with run:  # which closes its pipes
                run.kill()


def _usual_heap_bytes(passes: Sequence[Pass]) -> int:
    """Return the growth of the heap as it usually is, without a replay."""
    state = sum(each.update.left_bytes for each in passes if each.update is not None)
    most = max(passes, key=lambda each: each.trace.peak()[0])
    peak = most.trace.peak()[0]
    return state + peak + int(_USUAL_FRAC * (most.trace.turnover_bytes - peak))


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
    if numbers.random() < plan["objects"]["least"] + n_bytes / plan["objects"]["bytes"]:  # which lives for a while
        small.append(malloc(numbers.choice((24, 48, 88, 120, 200, 300, 520, 700))))
        if len(small) > 30000:
            number = numbers.randrange(len(small))
            small[number], small[-1] = small[-1], small[number]
            free(small.pop())
    fills = plan["fills"] and n_bytes >= 4096  # as kernels/native/heap.cpp has it
    wanted = (n_bytes + 79) // 64 * 64 - 16 if fills else n_bytes
    address = malloc(wanted) if fills else 1
    if address % 64:
        if fills:
            free(address)
        aligned(ctypes.byref(place), 64, wanted)
        address = place.value
    spans.append((address, address + n_bytes))
    return address

def replay(name, factor, n_tokens, kept):
    trace, there, late = plan["traces"][name], {}, []
    for number in trace["events"]:
        if number >= 0:
            n_bytes, shape = trace["sizes"][number]
            there[number] = take(int(n_bytes * factor) if n_tokens in shape else n_bytes)
        elif ~number in there:
            address = there.pop(~number)
            late.append(address) if ~number in kept else free(address)
    return [*there.values()], late

for each in plan["passes"]:
    left, late = replay(each["trace"], each["factor"], each["n_tokens"], set(each["kept"]))
    for address in left:
        free(address)
    if each["update"] is not None:
        replay(each["update"], 1.0, 0, ())  # what it leaves is the optimizer's state, which stays
    for address in late:
        free(address)
covered, end = 0, 0
for first, last in sorted(spans):  # what was used of the heap, and of mappings apart from it
    covered += max(last - max(first, end), 0)
    end = max(end, last)
print(covered)
"""
