"""Whether training became slower: steps of this checkout and of another one, by turns, on the same rows.

    git worktree add ../before COMMIT   # and install it into ../before/.venv
    python benchmarks/cpu/against.py --data FOLDER_WITH_XQUAD --other ../before

Compared are whet's Trainer in fp32 and in its own choice, and transformers' Trainer with `whet.optimize` over a padded
batch. A ratio above 1 means that this checkout takes longer.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from protocol import Worker

from bench import HERE, Bench, turn

_MAKE_ROWS = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from bench import Bench
bench = Bench(data=Path(sys.argv[2]), folder=Path(sys.argv[3]), peers=sys.executable, n_threads=1)
bench.train_rows
"""
WAYS = {
    "Trainer, fp32": ("whet_worker", ["--precision", "fp32"]),
    "Trainer, own choice": ("whet_worker", ["--precision", "auto"]),
    "whet.optimize, fp32": ("peer_worker", ["--peer", "optimize_fp32", "--steps", "1000"]),
}


def start(checkout: Path, way: str, model: Path, folder: Path, n_threads: int) -> Worker:
    """Start a worker of this checkout's code, in its own environment."""
    script, words = WAYS[way]
    here = checkout / "benchmarks" / "cpu"
    command = [str(checkout / ".venv" / "bin" / "python"), str(here / f"{script}.py"), *words]
    command += ["--model", str(model), "--rows", str(folder / "train.safetensors"), "--folder", str(folder / "out")]
    worker = Worker(command, folder / f"{script}-{words[1]}.log", n_threads=n_threads, with_whet=True)
    worker.wait_ready()
    return worker


def compare(bench: Bench, checkouts: dict[str, Path], way: str, model: str) -> list[float]:
    """Return this checkout's seconds over the other's, a ratio for each round."""
    ratios = []
    with ExitStack() as stack:
        workers = {
            name: stack.enter_context(start(checkout, way, bench.model(model), bench.folder / name, bench.n_threads))
            for name, checkout in checkouts.items()
        }
        batches = bench.warm_up_batches() + [
            bench.sample(number, len(bench.lengths), bench.batch) for number in range(bench.rounds(9))
        ]
        for number, rows in enumerate(batches):
            order = list(workers) if number % 2 else list(workers)[::-1]
            words = {} if way.startswith("whet.optimize") else {"rows": rows}
            found = {name: turn(workers[name], "step", **words)["seconds"] for name in order}
            if number >= len(batches) - bench.rounds(9):
                ratios.append(found["here"] / found["other"])
    return ratios


def main() -> None:
    """Print the median ratio, the least and the most, of each way and model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with train.json of XQuAD")
    parser.add_argument("--other", type=Path, required=True, help="another checkout, with its .venv")
    parser.add_argument("--models", nargs="+", default=["minilm", "bert-base"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    checkouts = {"here": HERE.parents[1], "other": options.other.resolve()}
    with tempfile.TemporaryDirectory() as temporary:
        bench = Bench(options.data, Path(temporary), sys.executable, options.threads, n_rounds=options.rounds)
        for name, checkout in checkouts.items():  # each reads rows that its own code wrote
            (Path(temporary) / name).mkdir()
            command = [str(checkout / ".venv" / "bin" / "python"), "-c", _MAKE_ROWS]
            places = [checkout / "benchmarks" / "cpu", options.data.resolve(), Path(temporary) / name]
            subprocess.run([*command, *map(str, places)], check=True)
        bench.__dict__["train_rows"] = Path(temporary) / "here" / "train.safetensors"
        for model in options.models:
            for way in WAYS:
                found = compare(bench, checkouts, way, model)
                spread = f"{min(found):.2f} to {max(found):.2f}"
                print(f"{model}, {way}: {statistics.median(found):.3f} ({spread}, {len(found)} rounds)", flush=True)


if __name__ == "__main__":
    main()
