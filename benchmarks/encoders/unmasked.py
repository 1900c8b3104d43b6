"""How far a pooling that reads padding is from the untouched model's, by what `whet.optimize` computes of padding.

    python benchmarks/encoders/unmasked.py --model FOLDER_OR_NAME --data FOLDER_WITH_XQUAD

A line has the norm of the difference over the norm of the pooled vector (D,) of a row: the median row, the tenth
largest of a hundred, and the largest. The rows are contexts, in random batches that are padded to their longest.
Evaluation, float32.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from torch import Tensor

import whet

POOLINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda states: states.mean(1),
    "max": lambda one: one.amax(1),
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--batches", type=int, default=30)
    parser.add_argument("--rows", type=int, default=8, help="of a batch")
    asked = parser.parse_args()
    tokenizer = transformers.AutoTokenizer.from_pretrained(asked.model)
    untouched = transformers.AutoModel.from_pretrained(asked.model).eval()
    articles = json.loads((asked.data / "dev.json").read_text("utf-8"))["data"]
    texts = [paragraph["context"] for article in articles for paragraph in article["paragraphs"]]
    numbers = random.Random(0)
    picked = [numbers.sample(texts, asked.rows) for _ in range(asked.batches)]
    batches = [tokenizer(some, padding=True, truncation=True, return_tensors="pt") for some in picked]
    padding = sum(int((batch["attention_mask"] == 0).sum()) for batch in batches)
    share = padding / sum(batch["attention_mask"].numel() for batch in batches)
    print(f"{asked.batches} batches of {asked.rows} rows, {share:.0%} padding, transformers {transformers.__version__}")
    for amount in ("sampled", "all", "none"):
        model = whet.optimize(copy.deepcopy(untouched), padding=amount)
        gaps: dict[str, list[float]] = {name: [] for name in POOLINGS}
        for batch in batches:
            with torch.no_grad():
                wanted, found = (one(**batch).last_hidden_state for one in (untouched, model))
            for name, pool in POOLINGS.items():
                gaps[name] += ((pool(wanted) - pool(found)).norm(dim=1) / pool(wanted).norm(dim=1)).tolist()
        for name, each in gaps.items():
            each.sort()
            print(f"{amount:8} {name:5} {each[len(each) // 2]:9.2g} {each[len(each) * 9 // 10]:9.2g} {each[-1]:9.2g}")


if __name__ == "__main__":
    main()
