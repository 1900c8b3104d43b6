"""Compares training on a GPU: transformers' Trainer by its defaults and by its best flags, and whet's, with losses.

Each side runs in a process of its own, by turns; `worker.py` says what it does. On a machine without a GPU it refuses.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from worker import JOBS

_HERE = Path(__file__).resolve()
_DEMO = _HERE.parents[2] / "src" / "whet" / "jobs" / "demo_data" / "train.json"
_RESULTS = _HERE.with_name("results.json")
_COMPARED = ("best", "best_compiled", "whet")


def main() -> None:
    """Measure, print a table and write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=_DEMO, help="a file in SQuAD's form (default: that of the demo)")
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--sides", nargs="+", default=list(_COMPARED))
    parser.add_argument("--batches", nargs="+", type=int, default=[32])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--budget", type=float, default=450.0, help="seconds after which no side is begun")
    parser.add_argument("--out", type=Path, default=_RESULTS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("there is no GPU here")
    begun, found = time.perf_counter(), []
    for _ in range(options.rounds):
        for job in options.jobs:
            for batch in options.batches:
                for side in options.sides:
                    if time.perf_counter() - begun > options.budget:
                        print(f"left out, the time is over: {job} {batch} {side}")
                        continue
                    found.append({"job": job, "batch": batch, "side": side} | measured(job, batch, side, options.data))
                    print(json.dumps(found[-1]), flush=True)
    result = {"machine": machine(), "data": options.data.name, "rows": found}
    options.out.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    print(table(result))


def measured(job: str, batch: int, side: str, data: Path) -> dict[str, Any]:
    """Run one side; return what it measured, or the last lines of what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        given = ["--job", job, "--batch", str(batch), "--side", side, "--data", str(data), "--folder", folder]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        ran = subprocess.run(
            [sys.executable, str(_HERE.with_name("worker.py")), *given],
            capture_output=True, text=True, check=False, env=environment,
        )  # fmt: skip
    lines = [line for line in ran.stdout.splitlines() if line.startswith('{"ms"')]
    return json.loads(lines[-1]) if lines else {"failed": ran.stderr.splitlines()[-6:]}


def machine() -> dict[str, Any]:
    """Return what the numbers were measured on."""
    import transformers

    return {
        "gpu": torch.cuda.get_device_name(),
        "cores": len(os.sched_getaffinity(0)),
        "python": sys.version.split()[0],
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "cuda": torch.version.cuda,
        "date": time.strftime("%Y-%m-%d"),
    }


def table(result: dict[str, Any]) -> str:
    """Return the table of the docs: medians of milliseconds a step, with their range, memory and the last loss."""
    lines = [
        f"{result['machine']['gpu']}, {result['machine']['versions']}",
        "| model | rows | side | ms a step | range | against best flags | GB | loss |",
        "|---|---|---|---|---|---|---|---|",
    ]
    rows = [row for row in result["rows"] if "ms" in row]
    for job, batch in dict.fromkeys((row["job"], row["batch"]) for row in rows):
        sides: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            if (row["job"], row["batch"]) == (job, batch):
                sides.setdefault(row["side"], []).append(row)
        times = {side: [ms for row in of for ms in row["ms"]] for side, of in sides.items()}
        best = min((median(ms) for side, ms in times.items() if side.startswith("best")), default=float("nan"))
        for side, ms in times.items():
            last = sides[side][-1]
            lines.append(
                f"| {job} | {batch} | {side} | {median(ms):.1f} | {min(ms):.1f} to {max(ms):.1f} "
                f"| {best / median(ms):.2f} | {last['peak_mb'] / 1000:.1f} | {last['losses'][-1]:.3f} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
