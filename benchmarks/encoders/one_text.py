"""How long a model takes for one short text, before and after `whet.optimize`, in evaluation and in training.

    python benchmarks/encoders/one_text.py --model FOLDER_OR_NAME --threads 1

`--width` makes a BERT of this width with random weights in place of a model. The two take turns; a line has the medians
of both in milliseconds, and the ratio: below 1 the optimised model is faster. With one thread that is processor time.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

import whet

LENGTHS = (4, 8, 16, 32, 64, 128)
N_WARM = 8


def model_of(options: argparse.Namespace) -> Any:
    """Return the model that is asked for, with a head for two classes."""
    if options.model:
        return transformers.AutoModelForSequenceClassification.from_pretrained(options.model, num_labels=2)
    heads = max(1, options.width // 64)
    config = transformers.BertConfig(
        hidden_size=options.width, num_attention_heads=heads, intermediate_size=4 * options.width, num_labels=2
    )
    return transformers.BertForSequenceClassification(config)


def step_of(model: Any, ids: torch.Tensor, mask: torch.Tensor, *, trains: bool) -> Callable[[], None]:
    """Return what is timed: a call, or a call and its backward pass."""

    def evaluate() -> None:
        with torch.no_grad():
            model(input_ids=ids, attention_mask=mask)

    def train() -> None:
        model(input_ids=ids, attention_mask=mask).logits.sum().backward()
        model.zero_grad()

    return train if trains else evaluate


def main() -> None:
    """Print a line for each length and mode."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or a name of the hub")
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=50)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    plain = model_of(options)
    models = {"plain": plain, "whet": whet.optimize(copy.deepcopy(plain))}
    for length in LENGTHS:
        ids = torch.randint(1000, 20000, (1, length))
        for trains in (False, True):
            times: dict[str, list[float]] = {name: [] for name in models}
            steps = {}
            for name, model in models.items():
                model.train(trains)
                steps[name] = step_of(model, ids, torch.ones_like(ids), trains=trains)
            for _ in range(options.rounds + N_WARM):
                for name, step in steps.items():
                    begun = clock()
                    step()
                    times[name].append(1000 * (clock() - begun))
            before, after = (statistics.median(times[name][N_WARM:]) for name in models)
            mode = "training" if trains else "evaluation"
            print(f"{length:3} tokens, {mode:10}: {before:7.2f} and {after:7.2f} ms, {after / before:.2f}", flush=True)


if __name__ == "__main__":
    main()
