"""How long a save holds up training: written on the spot, and written behind the run's back (--save_async).

    python benchmarks/reliability/async_save.py --rounds 7 --folder out

A new model of DistilBERT's size (66 M parameters, 797 MB a checkpoint), some optimizer steps, then saves of both kinds
in alternation, so that a busy moment affects both. The stall is the time the loop waits in a save; training goes on for
`--steps` steps after each, and the time to the end of the write is taken too. The first save of each kind fills caches
and memory and is reported separately. Prints medians and writes async_save.json in this folder.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForQuestionAnswering

from whet.config import arguments as settings
from whet.engine.engine import Engine, RunSpec
from whet.engine.loop import TrainingLoop
from whet.store import snapshot

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests")]
from machine import facts  # noqa: E402

from tiny import tiny_rows  # noqa: E402

RESULTS = Path(__file__).with_name("async_save.json")
GOAL_FRAC = 0.15


def make_loop(folder: Path, *, behind: bool) -> TrainingLoop:
    """Return a run after its first step, ready to save."""
    torch.manual_seed(0)
    model = AutoModelForQuestionAnswering.from_config(AutoConfig.for_model("distilbert"))
    args = settings.TrainingArguments(
        output_dir=str(folder), use_cpu=True, per_device_train_batch_size=4, max_steps=10**6, save_steps=10**6,
        save_async=behind, save_total_limit=1, disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    loop = Engine(RunSpec(model=model, args=args, train_dataset=tiny_rows(4000, "distilbert"))).new_loop()
    loop.start(None)
    loop.take_step()
    return loop


def one_save(loop: TrainingLoop, n_steps: int) -> dict[str, Any]:
    """Save, train on, wait; return what it took."""
    began_s = time.perf_counter()
    loop.saver.save(loop.counters.global_step, better=False)
    stall_s = time.perf_counter() - began_s
    step_s = []
    for _ in range(n_steps):
        step_began_s = time.perf_counter()
        loop.take_step()
        step_s.append(time.perf_counter() - step_began_s)
    loop.saver.wait()
    return {"stall_s": stall_s, "until_written_s": time.perf_counter() - began_s, "step_s": step_s}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps after each save")
    parser.add_argument(
        "--folder", type=Path, help="where to save: the disk that is measured (default: a temporary one)"
    )
    given = parser.parse_args()
    place = Path(tempfile.mkdtemp(dir=given.folder))
    try:
        loops = {name: make_loop(place / name, behind=name == "async") for name in ("sync", "async")}
        size = snapshot.forecast_bytes(loops["sync"].run_state)
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in loops}
        for number in range(given.rounds + 1):
            for name, loop in loops.items():
                runs[name].append(one_save(loop, given.steps))
                print(f"round {number}, {name}: stall {runs[name][-1]['stall_s']:.3f} s", flush=True)
        real = sum(path.stat().st_size for path in next((place / "sync").glob("checkpoint-*")).iterdir())
    finally:
        shutil.rmtree(place)
    medians = {name: statistics.median(run["stall_s"] for run in kept[1:]) for name, kept in runs.items()}
    frac = medians["async"] / medians["sync"]
    print(f"checkpoint: forecast {size / 1e6:.1f} MB, real {real / 1e6:.1f} MB ({size / real - 1:+.3%})")
    print(f"stall, median of {given.rounds}: sync {medians['sync']:.3f} s, async {medians['async']:.3f} s")
    print(f"async / sync = {frac:.1%}, goal at most {GOAL_FRAC:.0%}: {'reached' if frac <= GOAL_FRAC else 'MISSED'}")
    found = {
        "machine": facts(), "forecast_bytes": size, "real_bytes": real, "median_stall_s": medians,
        "stall_frac": frac, "goal_frac": GOAL_FRAC, "first": {name: kept[0] for name, kept in runs.items()},
        "runs": {name: kept[1:] for name, kept in runs.items()},
    }  # fmt: skip
    RESULTS.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
