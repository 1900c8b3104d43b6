"""Whether training became slower: steps of this checkout and of another one, by turns, on the same rows.

    git worktree add ../before COMMIT   # and install it into ../before/.venv
    python benchmarks/cpu/against.py --data FOLDER_WITH_XQUAD --other ../before

Compared are training and evaluation by whet's Trainer in fp32 and in its own choice, transformers' Trainer with
`whet.optimize` over a padded batch, and cutting windows. A ratio above 1 means that this checkout takes longer, or more
memory.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from checkouts import script_of
from protocol import Worker
from questions import write_questions

from bench import HERE, Bench, turn

_MAKE_ROWS = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from bench import Bench
bench = Bench(data=Path(sys.argv[2]), folder=Path(sys.argv[3]), peers=sys.executable, n_threads=1)
bench.train_rows
"""


@dataclass(frozen=True)
class Way:
    """A worker, and what each round asks it for."""

    script: str
    words: tuple[str, ...]
    asks: str = "step"
    takes_rows: bool = True


WAYS = {
    "Trainer, fp32": Way("whet_worker", ("--precision", "fp32")),
    "Trainer, own choice": Way("whet_worker", ("--precision", "auto")),
    "whet.optimize, fp32": Way("peer_worker", ("--peer", "optimize_fp32", "--steps", "1000"), takes_rows=False),
    "evaluation, fp32": Way("whet_worker", ("--precision", "fp32", "--mode", "predict"), "predict"),
    "evaluation, own choice": Way("whet_worker", ("--precision", "auto", "--mode", "predict"), "predict"),
    "windows": Way("whet_windows", (), "windows", takes_rows=False),
}
N_QUESTIONS = 6000
"""Questions of the way `windows`, with a context each."""


def start(checkout: Path, way: Way, model: Path, folder: Path, n_threads: int) -> Worker:
    """Start a worker of this checkout's code, in its own environment."""
    command = [*script_of(checkout, HERE / f"{way.script}.py"), *way.words]
    command += ["--model", str(model)]
    if way.asks != "windows":
        command += ["--rows", str(folder / "train.safetensors"), "--folder", str(folder / "out")]
    log = folder / f"{way.script}-{way.asks}-{'-'.join(way.words[1:2])}.log"
    worker = Worker(command, log, n_threads=n_threads, with_whet=True)
    worker.wait_ready()
    return worker


def seconds_of(worker: Worker, way: Way, words: dict[str, object], clock: str) -> float:
    """Return the seconds of a turn: by the clock, or of processor time, which other work moves less."""
    before = worker.processor_s()
    seconds = turn(worker, way.asks, **words)["seconds"]
    return worker.processor_s() - before if clock == "cpu" else seconds


def compare(bench: Bench, checkouts: dict[str, Path], way: Way, model: str, clock: str) -> tuple[list[float], float]:
    """Return this checkout's seconds over the other's, a ratio for each round, and the ratio of their peak memory."""
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
            words: dict[str, object] = {"rows": rows} if way.takes_rows else {}
            if way.asks == "windows":
                words = {"file": str(bench.folder / "questions.jsonl")}
            found = {name: seconds_of(workers[name], way, words, clock) for name in order}
            if number >= len(batches) - bench.rounds(9):
                ratios.append(found["here"] / found["other"])
        peaks = {name: worker.peak_bytes() for name, worker in workers.items()}
    return ratios, peaks["here"] / peaks["other"]


def main() -> None:
    """Print the median ratio of times, the least and the most, and the ratio of memory, of each way and model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with train.json of XQuAD")
    parser.add_argument("--other", type=Path, required=True, help="another checkout, with its .venv")
    parser.add_argument("--models", nargs="+", default=["minilm", "bert-base"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: processor time of the process")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
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
        write_questions(options.data, bench.folder / "questions.jsonl", N_QUESTIONS, "copied")
        for model in options.models:
            for name in options.ways:
                found, memory = compare(bench, checkouts, WAYS[name], model, options.clock)
                spread = f"{min(found):.2f} to {max(found):.2f}, {len(found)} rounds"
                print(f"{model}, {name}: {statistics.median(found):.3f} ({spread}), memory {memory:.3f}", flush=True)


if __name__ == "__main__":
    main()
