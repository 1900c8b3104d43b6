"""How fast blocks of base-sized encoders train on ragged rows: whet against transformers' sdpa and eager, by turns.

    python benchmarks/encoders/blocks.py --models mpnet modernbert --rounds 7

Random weights, two blocks, one forward and backward pass of 8 rows of 40 to 384 tokens in fp32; transformers pads to
the longest row. The ratio is of medians; the spread is (largest - smallest) / median. Say what else ran on the machine.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForTokenClassification

import whet

SIZES: dict[str, dict[str, Any]] = {
    "bert": {},
    "mpnet": {"max_position_embeddings": 514},
    "modernbert": {"num_hidden_layers": 3, "vocab_size": 30522, "pad_token_id": 1},  # one with full attention
}
LENGTHS = (384, 60, 210, 40, 128, 300, 90, 170)


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    settings = {"num_hidden_layers": 2, **SIZES[name]}
    if name == "modernbert":
        settings |= {"bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
    return AutoModelForTokenClassification.from_config(AutoConfig.for_model(name, **settings))


def batch_of() -> dict[str, torch.Tensor]:
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    ids = torch.randint(10, 30000, mask.shape, generator=torch.Generator().manual_seed(0))
    labels = torch.where(mask, ids % 2, -100)
    return {"input_ids": torch.where(mask, ids, 1), "attention_mask": mask.long(), "labels": labels}


def step_of(model: Any, batch: dict[str, torch.Tensor]) -> Callable[[], float]:
    """Return a function that takes a step and returns its seconds."""

    def step() -> float:
        begin = time.perf_counter()
        model(**batch).loss.backward()
        model.zero_grad()
        return time.perf_counter() - begin

    return step


def sides(name: str) -> dict[str, Callable[[], float]]:
    plain, batch, found = model_of(name).train(), batch_of(), {}
    for attention in ("sdpa", "eager"):
        model = copy.deepcopy(plain)
        model.set_attn_implementation(attention)
        if model.config._attn_implementation == attention:
            found[attention] = step_of(model, batch)
    found["whet"] = step_of(whet.optimize(plain), batch)
    return found


def measure(name: str, n_rounds: int) -> dict[str, Any]:
    steps = sides(name)
    for step in steps.values():
        step()
    times: dict[str, list[float]] = {side: [] for side in steps}
    for _ in range(n_rounds):
        for side, step in steps.items():
            times[side].append(step())
    medians = {side: statistics.median(seconds) for side, seconds in times.items()}
    spreads = {side: (max(seconds) - min(seconds)) / medians[side] for side, seconds in times.items()}
    best = min(value for side, value in medians.items() if side != "whet")
    return {"model": name, "median_s": medians, "spread": spreads, "times_as_fast": best / medians["whet"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    for name in given.models:
        print(json.dumps(measure(name, given.rounds)), flush=True)


if __name__ == "__main__":
    main()
