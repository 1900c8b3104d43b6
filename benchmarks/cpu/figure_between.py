"""Where a step's time goes outside of its matrix products, next to the least that each part must take.

A step is measured without a profiler, its operators by torch's in another on the same rows, which counts no operator
that another one calls. `products` are those of linear layers. What no operator accounts for, such as Python and
autograd, is `rest`. The least time of a part is that of the bytes it has to move at the rate of a copy, or, of
attention, that of its operations at the rate of the linear layers' products; `rest` must take none. A part that takes
less finds its tensors in a cache.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from figure_limit import products
from figures import Measured
from flops import Encoder, attention_flops, linear_flops

from bench import MODELS, Bench, dtype_of, turn

ROUNDS = {"minilm": 5, "distilbert": 3, "bert-base": 3, "tiny": 2}
PARTS: dict[str, tuple[str, ...]] = {
    "products": ("aten::mm", "aten::addmm", "mkldnn::", "whet::weight_gradient", "whet::product"),
    "attention": ("whet::attention",),
    "norms": ("whet::add_norm",),
    "activations": ("whet::bias_act", "whet::gated"),
    "embeddings": ("whet::embed",),
    "optimizer": ("whet::adamw", "whet::grad_norm", "whet::optimizer", "Optimizer.", "whet::scale"),
    "copies": (
        "aten::copy_", "aten::cat", "aten::fill_", "aten::zero_", "aten::add", "aten::mul", "aten::clone",
        "aten::index", "aten::sum", "whet::scatter",
    ),
}  # fmt: skip
"""Part -> how the names of its operators begin."""
REST = "rest"
BYTES = {"bf16": 2, "fp32": 4}
_NORM, _ACTIVATION, _ATTENTION = 4 + 5, 2 + 3, 4 + 8
"""Tensors of a token that forward and backward read and write. A norm: product, residual, sum, result; both gradients,
sum, and the gradients of product and residual. An activation: in, out; gradient, in, out. Attention: query, key, value,
result; these, two gradients of the result's size less one that is kept, and three that are written."""
_ADAMW = 4 * 7
"""Bytes of a weight: itself, its gradient and two moments are read, and all but the gradient written. Of the table of
words these are the rows of the batch."""


def run(bench: Bench) -> tuple[list[Measured], dict[str, Any]]:
    """Return no line that is judged, and the parts of each model and format; print them."""
    raw: dict[str, Any] = {}
    for model in bench.chosen("minilm", "bert-base"):
        raw[model] = {}
        with ExitStack() as stack:
            gemm = stack.enter_context(bench.start("gemm_worker"))
            rate = turn(gemm, "copy")["bytes_per_s"]
            for worker in bench.start_whets(model).values():
                stack.enter_context(worker)
                dtype = dtype_of(worker)
                rounds = []
                for number in range(bench.rounds(ROUNDS[model]) + 1):
                    rows = bench.sample(number, len(bench.lengths), bench.batch)
                    lengths, encoder = bench.lengths[rows].tolist(), bench.encoder(model)
                    step = turn(worker, "step", rows=rows)["seconds"]
                    found = seconds_of(turn(worker, "step", rows=rows, profiled=True)["operators"], step)
                    limit = products(gemm, encoder, sum(lengths), dtype)["seconds"]
                    least = least_s(encoder, lengths, dtype, rate, limit)
                    least["optimizer"] = _ADAMW * (worker.ready["n_dense"] + sum(lengths) * encoder.width) / rate
                    rounds.append({"step_s": step, "n_tokens": sum(lengths), "parts_s": found, "least_s": least})
                raw[model][dtype] = {"copy_bytes_per_s": rate, "rounds": rounds[1:]}
                print(f"\n{MODELS[model]} in {dtype}\n{table(rounds[1:])}", flush=True)
    return [], raw


def seconds_of(operators: Mapping[str, Sequence[float]], step_s: float) -> dict[str, float]:
    """Return the seconds of each part of a step that took `step_s` without a profiler."""
    found = dict.fromkeys(PARTS, 0.0)
    for name, (seconds, _) in operators.items():
        part = next((part for part, begins in PARTS.items() if name.startswith(begins)), None)
        if part is not None:
            found[part] += seconds
    return found | {REST: step_s - sum(found.values())}


def least_s(encoder: Encoder, lengths: Sequence[int], dtype: str, rate: float, linear_s: float) -> dict[str, float]:
    """Return the least seconds of each part, at this rate of a copy in bytes a second, read and written.

    `linear_s` is what the products of the linear layers take, one by one at their best.
    """
    n_tokens, size, layers = sum(lengths), BYTES[dtype], encoder.n_layers
    of_width, of_inner = n_tokens * encoder.width * size, n_tokens * encoder.inner * size
    flops_per_s = linear_flops(encoder, n_tokens) / linear_s
    return {
        "products": linear_s,
        "attention": max(attention_flops(encoder, lengths) / flops_per_s, layers * _ATTENTION * of_width / rate),
        "norms": 2 * layers * _NORM * of_width / rate,
        "activations": layers * _ACTIVATION * of_inner / rate,
        "embeddings": _NORM * of_width / rate,
        "copies": 0.0,
        REST: 0.0,
    }


def table(rounds: Sequence[Mapping[str, Any]]) -> str:
    """Return milliseconds of each part, medians over rounds, with the least and the share of the step."""
    step = statistics.median(one["step_s"] for one in rounds)
    lines = [f"{'part':12} {'ms':>8} {'least':>8} {'of step':>8}"]
    outside = 0.0
    for part in (*PARTS, REST):
        ms, least = (1000 * statistics.median(one[kind][part] for one in rounds) for kind in ("parts_s", "least_s"))
        outside += 0.0 if part == "products" else ms
        lines.append(f"{part:12} {ms:8.1f} {least:8.1f} {ms / 1000 / step:8.1%}")
    lines.append(f"{'step':12} {1000 * step:8.1f}")
    lines.append(f"{'outside':12} {outside:8.1f} {'':8} {outside / 1000 / step:8.1%}")
    return "\n".join(lines)
