"""Measures sums over two ranks: seconds of one number and of 16 MiB. One rank of `scaling.py`.

python benchmarks/dist/rates.py OUT.json
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch

SIZE = 16 << 20


def main() -> None:
    """Write the medians."""
    torch.distributed.init_process_group("gloo")
    found = {"latency_s": _median(torch.zeros(1), 40), "large_s": _median(torch.zeros(SIZE // 4), 6)}
    if os.environ["RANK"] == "0":
        Path(sys.argv[1]).write_text(json.dumps(found), "utf-8")
    torch.distributed.barrier()  # a rank that is first to leave takes its connections from the other
    torch.distributed.destroy_process_group()


def _median(numbers: torch.Tensor, rounds: int) -> float:
    times = []
    for _ in range(rounds + 2):
        begun = time.perf_counter()
        torch.distributed.all_reduce(numbers)
        times.append(time.perf_counter() - begun)
    return statistics.median(times[2:])


if __name__ == "__main__":
    main()
