"""Time to the same quality: three real trainings of MiniLM, by the library alone and by whet, five seeds each.

    python benchmarks/encoders/quality.py --data FOLDER --libraries .venv-libraries/bin/python
    python benchmarks/encoders/quality.py --table

FOLDER holds the folders banking77, xquad and ud_ewt. Each run trains for the same epochs, is judged on held-out data,
and is kept in quality.json as it ends; runs that are there are not repeated. Runs of one seed follow each other, the
library first in every other seed. The seconds are those of training alone: by the clock, and of processor time, which
other work on the machine moves less (OMP_NUM_THREADS=1). The library runs in fp32, its default; whet chooses.

- intents: 2,000 rows of BANKING77, spread over all of them, with 77 labels, transformers' Trainer against whet's;
  accuracy on the test set.
- tags: parts of speech of 2,000 sentences of EWT, the same two; accuracy of the words of the test set.
- retrieval: questions to paragraphs of XQuAD by SentenceTransformer with in-batch negatives, without and with
  whet.optimize; mean reciprocal rank among all paragraphs of the held-out articles.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from jobs import JOBS as KINDS
from jobs import minilm, tokenizer_of
from machine import facts

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "quality.json"
JOBS = ("intents", "tags", "retrieval")
SIDES = ("library", "whet")
N_ROWS = 2_000
"""Training rows of a head: the library takes minutes for them."""
Found = dict[str, float]


def accuracy(evaluated: Any) -> Found:
    """Return the share of right labels, places without a label left out."""
    labels = evaluated.label_ids
    counted = labels != -100
    return {"accuracy": float((np.argmax(evaluated.predictions, axis=-1)[counted] == labels[counted]).mean())}


def timed(train: Callable[[], object]) -> Found:
    """Train; return the seconds of it by the clock and of the processor."""
    began = time.perf_counter(), time.process_time()
    train()
    return {"seconds": time.perf_counter() - began[0], "processor_seconds": time.process_time() - began[1]}


def heads(job: str, side: str, data: Path, seed: int) -> Found:
    """Train a head by a Trainer; return its seconds and accuracy."""
    import transformers

    import whet

    collator, epochs, batch = {
        "intents": (transformers.DataCollatorWithPadding, 5, 32),
        "tags": (transformers.DataCollatorForTokenClassification, 3, 16),
    }[job]
    library: Any = transformers if side == "library" else whet
    tokenizer, kind = tokenizer_of("minilm"), KINDS[job]
    rows, test = (list(kind.rows(data, tokenizer, part)) for part in ("train", "test"))
    train = [rows[number * len(rows) // N_ROWS] for number in range(N_ROWS)]
    transformers.set_seed(seed)
    model = getattr(transformers, kind.head).from_pretrained(minilm(), num_labels=kind.n_labels)
    with tempfile.TemporaryDirectory() as folder:
        args = library.TrainingArguments(
            output_dir=folder, per_device_train_batch_size=batch, per_device_eval_batch_size=64, learning_rate=2e-4,
            num_train_epochs=epochs, seed=seed, save_strategy="no", logging_strategy="no", report_to="none",
            use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        trainer = library.Trainer(
            model=model, args=args, train_dataset=train, data_collator=collator(tokenizer), compute_metrics=accuracy
        )
        seconds = timed(trainer.train)
        return seconds | {"quality": float(trainer.evaluate(test)["eval_accuracy"])}


def retrieval(job: str, side: str, data: Path, seed: int) -> Found:
    """Train a SentenceTransformer by its own Trainer; return its seconds and the mean reciprocal rank."""
    import sentence_transformers as library
    import torch
    from datasets import Dataset
    from sentence_transformers.sentence_transformer import losses

    import whet

    def articles(name: str) -> list[Any]:
        found = json.loads((data / "xquad" / f"{name}.json").read_text("utf-8"))["data"]
        return [paragraph for article in found for paragraph in article["paragraphs"]]

    def asked(paragraphs: list[Any]) -> tuple[list[str], list[int]]:
        pairs = [(qa["question"], at) for at, paragraph in enumerate(paragraphs) for qa in paragraph["qas"]]
        return [question for question, _ in pairs], [at for _, at in pairs]

    paragraphs = articles("train")
    questions, right = asked(paragraphs)
    rows = Dataset.from_dict({"anchor": questions, "positive": [paragraphs[at]["context"] for at in right]})
    torch.manual_seed(seed)
    model = library.SentenceTransformer(minilm(), device="cpu")
    if side == "whet":
        whet.optimize(model)
    with tempfile.TemporaryDirectory() as folder:
        args = library.SentenceTransformerTrainingArguments(
            output_dir=folder, per_device_train_batch_size=16, learning_rate=5e-5, num_train_epochs=2, seed=seed,
            save_strategy="no", logging_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
            batch_sampler="no_duplicates",
        )  # fmt: skip
        loss = losses.MultipleNegativesRankingLoss(model)
        trainer = library.SentenceTransformerTrainer(model=model, args=args, train_dataset=rows, loss=loss)
        seconds = timed(trainer.train)
    held_out = articles("dev")
    questions, right = asked(held_out)
    found = torch.tensor(model.encode(questions)) @ torch.tensor(model.encode([one["context"] for one in held_out])).T
    ranks = (found >= found.gather(1, torch.tensor(right)[:, None])).sum(dim=1)
    return seconds | {"quality": float((1 / ranks.float()).mean())}


RUNS: dict[str, Callable[[str, str, Path, int], Found]] = {"intents": heads, "tags": heads, "retrieval": retrieval}


def kept() -> dict[str, Any]:
    """Return the runs on file: job -> side -> seed -> what was found."""
    return json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}


def run_all(options: argparse.Namespace) -> None:
    """Run what is missing, each in a process of its own, and keep it."""
    for seed in options.seeds:
        for job in options.jobs:
            for side in SIDES if seed % 2 else SIDES[::-1]:
                if str(seed) in kept().get(job, {}).get(side, {}):
                    continue
                python = options.libraries if job == "retrieval" else sys.executable
                words = ["--data", options.data, "--one", job, side, seed]
                done = subprocess.run(
                    [python, __file__, *map(str, words)], stdout=subprocess.PIPE, text=True, check=True
                )
                found = json.loads(done.stdout.splitlines()[-1])
                with FileLock(RESULTS.with_suffix(".lock")):  # several processes may run seeds at once
                    results = kept()
                    results.setdefault(job, {}).setdefault(side, {})[str(seed)] = found
                    RESULTS.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
                print(
                    f"{job:10} {side:8} seed {seed}: {found['quality']:.4f} in {found['processor_seconds']:.0f} s",
                    flush=True,
                )


def table() -> list[str]:
    """Return the lines of the table: quality, its standard error, seconds, and how many times as fast whet was."""
    lines = [
        "| job | quality, library | quality, whet | difference | processor seconds | times as fast |",
        "|---|---|---|---|---|---|",
    ]
    for job, sides in kept().items():
        seeds = sorted(sides.get("library", {}).keys() & sides.get("whet", {}).keys(), key=int)
        if len(seeds) < 2:
            continue
        one, other = ([sides[side][seed] for seed in seeds] for side in SIDES)
        differences = [b["quality"] - a["quality"] for a, b in zip(one, other, strict=True)]
        error = statistics.stdev(differences) / math.sqrt(len(seeds))
        means = [statistics.mean(run["quality"] for run in runs) for runs in (one, other)]
        seconds = [statistics.median(run["processor_seconds"] for run in runs) for runs in (one, other)]
        ratios = [a["processor_seconds"] / b["processor_seconds"] for a, b in zip(one, other, strict=True)]
        lines.append(
            f"| {job}, {len(seeds)} seeds | {means[0]:.4f} | {means[1]:.4f} | {statistics.mean(differences):+.4f} "
            f"(standard error {error:.4f}) | {seconds[0]:.0f}, {seconds[1]:.0f} | {statistics.median(ratios):.2f} |"
        )
    return lines


def main() -> None:
    """Run the jobs that are missing, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with banking77, xquad and ud_ewt")
    parser.add_argument("--libraries", default=".venv-libraries/bin/python", help="Python with sentence-transformers")
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 1, 2, 3, 4])
    parser.add_argument("--table", action="store_true", help="print what is on file, train nothing")
    parser.add_argument("--one", nargs=3, metavar=("JOB", "SIDE", "SEED"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.table:
        print("\n".join(table()))
    elif options.data is None:
        parser.error("--data is needed to train")
    elif options.one:
        job, side, seed = options.one
        found = RUNS[job](job, side, options.data.resolve(), int(seed))
        print(json.dumps(found | {"load": os.getloadavg()[0], "machine": facts()}))
    else:
        run_all(options)


if __name__ == "__main__":
    main()
