"""How long the matrix products of a decoder's training step take on this machine, and nothing else."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cpu"))
from protocol import Worker

GEMM = Path(__file__).resolve().parents[1] / "cpu" / "gemm_worker.py"
_N_RUNS = 3


def layers_of(config: dict[str, Any]) -> list[list[int]]:
    """Return the linear layers (k, m, count) of a decoder with gated feed-forwards, its head among them."""
    d, n = config["hidden_size"], config["num_hidden_layers"]
    head = config.get("head_dim") or d // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    return [[d, queries + 2 * keys, n], [queries, d, n], [d, 2 * config["intermediate_size"], n],
            [config["intermediate_size"], d, n], [d, config["vocab_size"], 1]]  # fmt: skip


def limit_s(model: Path, lengths: list[int], python: str, n_threads: int) -> dict[str, float]:
    """Return the least seconds of a step on rows of these lengths, by number format.

    The linear layers are measured, each product in its fastest way. The products of causal attention are counted at
    their rate: two forward and four backward, over the half of each row's square that is used.
    """
    config = json.loads((model / "config.json").read_text("utf-8"))
    if "num_key_value_heads" not in config:
        return {}
    layers, n_tokens = layers_of(config), sum(lengths)
    linear_flops = sum(3 * 2 * n_tokens * k * m * count for k, m, count in layers)
    width = layers[1][0]
    attention_flops = sum(6 * 2 * length * length * width * config["num_hidden_layers"] // 2 for length in lengths)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "gemm.log"
        with Worker([python, str(GEMM)], log, n_threads=n_threads, with_whet=False) as worker:
            worker.wait_ready()
            for dtype in ("fp32", "bf16"):
                answer = worker.ask("measure", n_tokens=n_tokens, layers=layers, dtype=dtype, n_runs=_N_RUNS)
                found[dtype] = answer["seconds"] * (1 + attention_flops / linear_flops)
    return found
