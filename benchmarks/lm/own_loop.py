"""A loop of the user's own over a decoder with a vocabulary of 128,000: without whet, and after whet.optimize.

    python benchmarks/lm/own_loop.py

Each side runs in processes of its own, by turns, with one thread: a forward and a backward pass of 4 rows of 512 tokens
with labels. It prints the medians of processor time and of peak memory of the complete process.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time

SIDES = ("plain", "whet")
VOCABULARY, ROWS, LENGTH = 128_000, 4, 512


def one(side: str) -> dict[str, float]:
    """Take the passes in this process; return seconds of processor time and the peak of memory in GiB."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import whet

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, use_cache=False, **sizes)).train()
    if side == "whet":
        whet.optimize(model)
    ids = torch.randint(5, VOCABULARY, (ROWS, LENGTH))
    began = time.process_time()
    model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss.backward()
    seconds = time.process_time() - began
    return {"seconds": seconds, "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}


def main() -> None:
    """Run the sides by turns and print their medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options.one)))
        return
    found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for number in range(options.rounds):
        for side in SIDES[:: 1 if number % 2 else -1]:
            command = [sys.executable, __file__, "--one", side]
            threads = {"OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | threads)
            found[side].append(json.loads(done.stdout.splitlines()[-1]))
    for side, runs in found.items():
        seconds, peak = (statistics.median(run[name] for run in runs) for name in ("seconds", "peak_gib"))
        print(f"{side:6} {seconds:6.2f} s of processor time   {peak:5.2f} GiB at the peak")


if __name__ == "__main__":
    main()
