"""How fast encoders train compared with transformers' Trainer: four kinds of rows, four shapes of models, in one run.

    python benchmarks/encoders/steps.py --data FOLDER --peers .venv-peers/bin/python
    python benchmarks/encoders/steps.py --data FOLDER --jobs pairs --models minilm
    python benchmarks/encoders/steps.py --data FOLDER --other CHECKOUT   # has whet become slower?

FOLDER holds the folders banking77, xquad and ud_ewt. Each match starts one worker of transformers' Trainer and whet's;
they take the same steps by turns, MiniLM on short rows ten at a time after thirty. The first match has the library's
defaults (fp32, rows in random order, padded to the longest of the batch) on random batches; the others its best options
(rows grouped by length, fused AdamW, fp32 or bf16) on batches of like length. docs/benchmarks.md has the results.

With `--other`, whet of another checkout, with its `.venv`, takes the steps on random batches instead of a peer; nothing
is kept. A ratio above 1 means that this checkout takes longer, or more memory.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cpu"))
from checkouts import OTHERS, WHETS, against_other, script_of
from jobs import JOBS, SEED, SHAPES, Row, make_model, tokenizer_of, turn_of
from machine import facts, has_bf16_products
from protocol import Worker
from sampling import spread
from transformers.trainer_pt_utils import get_length_grouped_indices

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results.json"
PEERS = ("defaults", "best_fp32", "best_bf16")
BEST_MUST = 1.5
"""How many times as fast as the library's best options a step must be."""
PAUSE_S = 0.2


@dataclass
class Bench:
    """The settings of a run."""

    data: Path
    folder: Path
    """Where models, batches and logs go; removed after the run."""
    peers: str
    """The Python of the peers' environment."""
    n_threads: int
    rounds: int | None = None
    other: Path | None = None
    """A checkout of whet to compare this one with."""

    def worker(self, side: str) -> list[str]:
        """Return the Python, the script and the name there of a side."""
        script = HERE / "encoder_worker.py"
        if side in OTHERS and self.other is not None:
            return [*script_of(self.other, script), "--side", side.replace("other", "whet")]
        return [sys.executable if side in WHETS else self.peers, str(script), "--side", side]


def batches_of(rows: list[Row], size: int, n_steps: int, *, grouped: bool) -> list[list[Row]]:
    """Return the batches of n_steps steps, the longest first: at random, or spread over an epoch grouped by length.

    Two more follow, because transformers makes batches ahead.
    """
    lengths = [len(row["input_ids"]) for row in rows]
    if grouped:
        import torch

        order = get_length_grouped_indices(lengths, size, generator=torch.Generator().manual_seed(SEED))
        split = [order[at : at + size] for at in range(0, len(order) - size + 1, size)]
        longest, *others = spread(split, lengths, n_steps)
        chosen = [longest, *random.Random(SEED).sample(others[:-2], len(others) - 2), *others[-2:]]
    else:
        order = random.Random(SEED).sample(range(len(rows)), len(rows))
        split = [order[at : at + size] for at in range(0, len(order) - size + 1, size)][: n_steps + 2]
        longest = max(range(len(split)), key=lambda at: sum(lengths[row] for row in split[at]))
        chosen = [split.pop(longest), *split]
    return [[rows[row] for row in batch] for batch in chosen]


def start(bench: Bench, side: str, head: str, model: Path, batches: Path) -> Worker:
    """Start a side, wait until it is ready, and let it take the first step, which warms up."""
    words = ["--head", head, "--model", model, "--batches", batches, "--folder", bench.folder / side]
    command = [*bench.worker(side), *map(str, words)]
    with_whet = side in (*WHETS, *OTHERS)
    return Worker(command, bench.folder / f"{side}.log", n_threads=bench.n_threads, with_whet=with_whet).warm_up()


def match(bench: Bench, job: str, shape: str, *others: str) -> dict[str, Any]:
    """Return seconds of each turn by side, tokens and places of each turn, peak memory, and what each side says."""
    turn, n_turns = turn_of(JOBS[job], SHAPES[shape]), bench.rounds or SHAPES[shape].rounds
    n_steps = n_turns * turn.n_steps + turn.n_warm
    rows = list(JOBS[job].rows(bench.data, tokenizer_of(shape)))
    batches = batches_of(rows, SHAPES[shape].batch, n_steps, grouped=others[0].startswith("best"))
    file = bench.folder / "batches.json"
    file.write_text(json.dumps([[dict(row) for row in batch] for batch in batches]), "utf-8")
    model = bench.folder / f"{shape}-{job}"
    if not model.exists():
        make_model(shape, JOBS[job], model)
    with ExitStack() as stack:
        head, names = JOBS[job].head, (*others, *WHETS)
        sides = {side: stack.enter_context(start(bench, side, head, model, file)) for side in names}
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        for worker in sides.values():
            take(worker, turn.n_warm - 1)
        for number in range(n_turns):
            for side in list(sides)[:: 1 if number % 2 else -1]:
                time.sleep(PAUSE_S)
                seconds[side].append(take(sides[side], turn.n_steps))
        peaks = {side: worker.peak_bytes() for side, worker in sides.items()}
        ready = {side: worker.ready for side, worker in sides.items()}
    lengths = [[len(row["input_ids"]) for row in batch] for batch in batches[turn.n_warm : n_steps]]
    tokens, places = [sum(step) for step in lengths], [max(step) * len(step) for step in lengths]
    sizes = {"tokens": by_turn(tokens, turn.n_steps), "places": by_turn(places, turn.n_steps)}
    return {"seconds": seconds, "steps_a_turn": turn.n_steps, "peak_bytes": peaks, "ready": ready} | sizes


def take(worker: Worker, n_steps: int) -> float:
    """Let a worker take steps, one after the other; return their seconds."""
    return sum(worker.ask("step")["seconds"] for _ in range(n_steps))


def by_turn(steps: list[int], n_steps: int) -> list[int]:
    """Return the sum over the steps of each turn."""
    return [sum(steps[at : at + n_steps]) for at in range(0, len(steps), n_steps)]


def line_of(job: str, peer: str, found: dict[str, Any]) -> str:
    """Return a match's line of the table: whet's own choice against the peer, and fp32 against it."""
    ratios = {side: quotients(found["seconds"][peer], found["seconds"][side]) for side in WHETS}
    memory = found["peak_bytes"]["whet_fp32"] / found["peak_bytes"][peer]
    must = JOBS[job].must if peer == "defaults" else BEST_MUST
    good = max(map(statistics.median, ratios.values())) >= must and memory <= JOBS[job].most_memory
    shown = "  ".join(f"{statistics.median(one):5.2f} ({min(one):.2f} to {max(one):.2f})" for one in ratios.values())
    return f"  {peer:10} {shown:44} {memory:6.2f} {must:5.1f} {'yes' if good else 'NO'}"


def quotients(one: Sequence[float], other: Sequence[float]) -> list[float]:
    """Return one's seconds over the other's, step by step."""
    return [a / b for a, b in zip(one, other, strict=True)]


def options_of() -> argparse.Namespace:
    """Return the command line's choices."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with banking77, xquad and ud_ewt")
    parser.add_argument("--peers", default=".venv-peers/bin/python", help="Python of the peers' environment")
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=[name for name in SHAPES if name != "tiny"])
    usual = [peer for peer in PEERS if has_bf16_products() or peer != "best_bf16"]
    parser.add_argument(
        "--against", nargs="+", choices=PEERS, default=usual, help="default: all that run natively here"
    )
    parser.add_argument("--rounds", type=int, help="turns of each match; default: 8 for MiniLM, 3 for others")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--other", type=Path, help="another checkout of whet, with its .venv, instead of the peers")
    return parser.parse_args()


def main() -> None:
    """Run the matches, keep each as it ends, print a line for it."""
    options = options_of()
    missing = [name for name in ("banking77", "xquad", "ud_ewt") if not (options.data / name).is_dir()]
    if missing:
        sys.exit(f"error: {options.data} has no {' and no '.join(missing)}\n  fix: make bench-encoders DATA=FOLDER")
    results = json.loads(options.output.read_text("utf-8")) if options.output.exists() else {}
    if options.other is None:
        print("steps/s against transformers' Trainer, median (range)        memory  must")
    with tempfile.TemporaryDirectory(prefix="whet-bench-") as folder:
        bench = Bench(options.data, Path(folder), options.peers, options.threads, options.rounds, options.other)
        for shape in options.models:
            for job in options.jobs:
                print(f"{SHAPES[shape].title}, {JOBS[job].title}: whet in fp32, in its own choice", flush=True)
                if options.other is not None:
                    found = match(bench, job, shape, *OTHERS)
                    print(f"  {against_other(found['seconds'], found['peak_bytes'])}", flush=True)
                    continue
                for peer in options.against:
                    found = match(bench, job, shape, peer)
                    results.setdefault(shape, {}).setdefault(job, {})[peer] = found | {"machine": facts()}
                    options.output.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
                    print(line_of(job, peer, found), flush=True)


if __name__ == "__main__":
    main()
