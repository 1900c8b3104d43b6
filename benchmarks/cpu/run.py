"""How fast whet trains on this CPU, compared with its peers: every figure in one run. See docs/benchmarks.md.

python benchmarks/cpu/run.py --data FOLDER_WITH_XQUAD --peers .venv-peers/bin/python
python benchmarks/cpu/run.py --data FOLDER_WITH_XQUAD --only steps limit --models minilm --rounds 3
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import figure_between
import figure_limit
import figure_rest
import figure_steps
from figures import Measured, summary, table

from bench import HERE, MODELS, Bench

sys.path.insert(0, str(HERE.parent))
from machine import facts

Figures = Callable[[Bench], tuple[list[Measured], dict[str, Any]]]
PARTS: dict[str, Figures] = {
    "steps": figure_steps.run,
    "limit": figure_limit.run,
    "between": figure_between.run,
    "evaluation": figure_rest.run_evaluation,
    "windows": figure_rest.run_windows,
    "memory": figure_rest.run_memory,
    "threads": figure_limit.run_threads,
    "adamw": figure_rest.run_adamw,
}
BUSY_CORES = 0.3
"""Cores that others use, on average over LOOK_S, from which on a part says that it was not alone."""
LOOK_S = 1.0


def options_of(words: list[str] | None = None) -> argparse.Namespace:
    """Return the command line's choices."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with train.json and dev.json of XQuAD")
    parser.add_argument("--peers", default=".venv-peers/bin/python", help="Python of the peers' environment")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="measure these parts only")
    parser.add_argument("--models", nargs="+", choices=MODELS, help="default: those that each part asks for")
    parser.add_argument("--rounds", type=int, help="rounds of each comparison; default: 15 to 2, by part and model")
    parser.add_argument("--batch", type=int, default=12, help="rows of a step")
    parser.add_argument("--questions", type=int, default=88_000, help="questions of the part windows")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--all_peers", action="store_true", help="measure peers in bf16, slow or not")
    parser.add_argument("--output", type=Path, default=HERE, help="folder of results.json and its pictures")
    return parser.parse_args(words)


def busy_cores() -> float:
    """Return how many cores are in use now, seen for LOOK_S. No worker runs yet, so that it is by others.

    The system's load would still hold the part before.
    """
    before = _busy_ticks()
    time.sleep(LOOK_S)
    return (_busy_ticks() - before) / os.sysconf("SC_CLK_TCK") / LOOK_S


def _busy_ticks() -> int:
    """Return the ticks that all cores have worked: all but idle and waiting for a disk (proc(5), /proc/stat)."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4]


def measure(name: str, bench: Bench) -> dict[str, Any]:
    """Return a part of results.json: lines, raw rounds, and what they were measured on."""
    busy = round(busy_cores(), 2)
    started_s = time.perf_counter()
    if busy > BUSY_CORES:
        print(f"{name}: other work uses {busy:.1f} cores: read the ratios with care", flush=True)
    bench.workers.clear()
    lines, raw = PARTS[name](bench)
    seconds = round(time.perf_counter() - started_s, 1)
    print(f"{name}: measured in {seconds:.0f} s", flush=True)
    settings = {"threads": bench.n_threads, "batch": bench.batch, "busy_cores_before": busy, "seconds": seconds}
    where = {"settings": settings, "machine": facts(), "measured": time.strftime("%Y-%m-%d %H:%M", time.gmtime())}
    return {"lines": [line.record() for line in lines]} | where | {"workers": list(bench.workers), "raw": raw}


def keep(name: str, bench: Bench, results: dict[str, Any], file: Path) -> bool:
    """Measure a part and write it down at once; return whether it worked. The others shall not be lost for it."""
    try:
        results[name] = measure(name, bench)
    except Exception:
        traceback.print_exc()
        return False
    file.write_text(json.dumps(results, indent=1) + "\n")
    return True


def check(options: argparse.Namespace) -> None:
    """End with a sentence where something is missing, before minutes have been spent."""
    missing = [str(file) for name in ("train", "dev") if not (file := options.data / f"{name}.json").is_file()]
    if missing:
        fix = "make bench-cpu DATA=FOLDER, or --data FOLDER, with XQuAD's two files in it"
        sys.exit(f"error: {' and '.join(missing)} not found\n  fix: {fix}")
    if subprocess.run([options.peers, "-c", "import accelerate"], capture_output=True, check=False).returncode:
        sys.exit(f"error: {options.peers} has no transformers Trainer\n  fix: make bench-cpu DATA=... sets it up")


def main() -> None:
    """Measure, keep each part as it ends, print the table, draw the picture."""
    options = options_of()
    try:
        check(options)
    except FileNotFoundError:
        sys.exit(f"error: {options.peers} does not exist\n  fix: make bench-cpu DATA=... sets the peers up")
    options.output.mkdir(parents=True, exist_ok=True)
    file = options.output / "results.json"
    results = json.loads(file.read_text()) if file.exists() else {}
    with tempfile.TemporaryDirectory(prefix="whet-bench-") as folder:
        bench = Bench(
            data=options.data, folder=Path(folder), peers=options.peers, n_threads=options.threads,
            models=tuple(options.models) if options.models else None, n_rounds=options.rounds, batch=options.batch,
            n_questions=options.questions, all_peers=options.all_peers,
        )  # fmt: skip
        failed = [name for name in options.only if not keep(name, bench, results, file)]
    if not results:
        sys.exit("error: nothing was measured; the reasons stand above")
    lines = [Measured.of(record) for part in results.values() for record in part["lines"]]
    print(f"\n{table(lines)}\n\n{summary(lines)}", flush=True)
    subprocess.run([options.peers, str(HERE / "plot.py"), str(file), str(options.output)], check=True)
    print(file)
    if failed:
        sys.exit(f"error: not measured: {', '.join(failed)}; the reasons stand above")


if __name__ == "__main__":
    main()
