"""Sums over two ranks of one machine: gloo over loopback, and an exchange through shared memory.

    python benchmarks/dist/shared_memory.py
    python benchmarks/dist/shared_memory.py --table

Through shared memory each rank copies its numbers to a segment that both see, adds one half of them, and copies the
result of both halves back. Each rank has one thread. The two ways alternate in the same two processes. Processor time
is that of a rank with all its threads; the load of the machine is stored with the results.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor, multiprocessing

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from machine import facts  # noqa: E402

RESULTS = HERE / "shared_memory.json"
SIZES_MB = (1, 4, 10, 42.6, 100)
"""Megabytes (1e6 bytes); 42.6 are the dense gradients of MiniLM."""
_MINILM_MB = 42.6
_WARM_UP = 2


def main() -> None:
    """Measure and store, or print what is on file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--table", action="store_true", help="print what is on file, measure nothing")
    asked = parser.parse_args()
    if not asked.table:
        RESULTS.write_text(json.dumps(_measure(asked.rounds), indent=1) + "\n", "utf-8")
    steps = json.loads((HERE / "results.json").read_text("utf-8"))["minilm whet fp32"]["step_s"]["one"]
    print("\n".join(lines(json.loads(RESULTS.read_text("utf-8")), statistics.median(steps))))


def _measure(n_rounds: int) -> dict[str, Any]:
    load = os.getloadavg()[0]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    most = int(max(SIZES_MB) * 1e6) // 4
    slots = [torch.zeros(most).share_memory_() for _ in range(2)]
    context = multiprocessing.get_context("spawn")
    meet, results = context.Barrier(2), context.SimpleQueue()
    ranks = [context.Process(target=_rank, args=(n, port, slots, meet, n_rounds, results)) for n in range(2)]
    for rank in ranks:
        rank.start()
    found = results.get()
    for rank in ranks:
        rank.join()
    return {"sizes": found, "load_before": load, "load_after": os.getloadavg()[0], "machine": facts()}


def _rank(number: int, port: int, slots: list[Tensor], meet: Any, n_rounds: int, results: Any) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=number, world_size=2)
    found: dict[str, dict[str, list[list[float]]]] = {}
    for size in SIZES_MB:
        numbers = torch.full((int(size * 1e6) // 4,), float(number + 1))
        ways = {"gloo": _by_gloo(), "shared memory": _by_shared_memory(number, slots, meet)}
        times: dict[str, list[list[float]]] = {name: [] for name in ways}
        for _ in range(n_rounds + _WARM_UP):
            for name, way in ways.items():
                numbers.fill_(number + 1.0)
                meet.wait()
                wall, used = time.perf_counter(), time.process_time()
                way(numbers)
                times[name].append([time.perf_counter() - wall, time.process_time() - used])
                assert float(numbers[0]) == float(numbers[-1]) == 3.0
        found[str(size)] = {name: one[_WARM_UP:] for name, one in times.items()}
    torch.distributed.barrier()
    if number == 0:
        results.put(found)
    torch.distributed.destroy_process_group()


def _by_gloo() -> Callable[[Tensor], None]:
    return lambda numbers: torch.distributed.all_reduce(numbers) and None


def _by_shared_memory(number: int, slots: list[Tensor], meet: Any) -> Callable[[Tensor], None]:
    def exchange(numbers: Tensor) -> None:
        n, half = numbers.numel(), numbers.numel() // 2
        own, other = slots[number][:n], slots[1 - number][:n]
        own.copy_(numbers)
        meet.wait()
        mine = slice(0, half) if number == 0 else slice(half, n)
        rest = slice(half, n) if number == 0 else slice(0, half)
        torch.add(own[mine], other[mine], out=numbers[mine])
        own[mine].copy_(numbers[mine])
        meet.wait()
        numbers[rest].copy_(other[rest])
        meet.wait()  # the slots are free for the next exchange

    return exchange


def lines(stored: dict[str, Any], step_s: float) -> list[str]:
    """Return the results as a table, and what MiniLM's step of `step_s` would gain."""
    found = [
        "| MB | gloo: wall, processor | shared memory: wall, processor | processor, shared memory / gloo |",
        "|---|---|---|---|",
    ]
    for size, ways in stored["sizes"].items():
        cells = [f"{_median(ways[way], 0) * 1e3:.1f} ms, {_median(ways[way], 1) * 1e3:.1f} ms" for way in ways]
        ratio = _median(ways["shared memory"], 1) / _median(ways["gloo"], 1)
        found.append(f"| {size} | {cells[0]} | {cells[1]} | {ratio:.2f} |")
    ways = stored["sizes"][str(_MINILM_MB)]
    gains = [(_median(ways["gloo"], column) - _median(ways["shared memory"], column)) / step_s for column in (0, 1)]
    return [
        *found,
        "",
        f"MiniLM's step of {step_s:.2f} s: shared memory saves {gains[1]:.1%} of it in processor time, and "
        f"{gains[0]:.1%} in wall clock if nothing of the sum were hidden behind the backward pass.",
        f"Load of the machine: {stored['load_before']:.1f} before, {stored['load_after']:.1f} after.",
    ]


def _median(times: list[list[float]], column: int) -> float:
    return statistics.median(one[column] for one in times)


if __name__ == "__main__":
    main()
