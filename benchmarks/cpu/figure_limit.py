"""A step's part of the machine's matrix-product limit, and what more threads bring, both against plain products."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from figures import Measured
from flops import Encoder, limit_s, linears, step_flops
from protocol import Worker

from bench import MODELS, Bench, dtype_of, turn

LIMIT_ROUNDS = {"minilm": 7, "distilbert": 3, "bert-base": 3, "tiny": 2}
THREAD_ROUNDS = 5
N_RUNS = 5
"""Runs of each product in a round; the median counts."""


def run(bench: Bench) -> tuple[list[Measured], dict[str, Any]]:
    """Return the part of the limit: in each round a step, then the products of the same number of tokens."""
    lines, raw = [], {}
    for model in bench.chosen("minilm", "distilbert", "bert-base"):
        raw[model] = {}
        with ExitStack() as stack:
            gemm = stack.enter_context(bench.start("gemm_worker"))
            for name, worker in bench.start_whets(model).items():
                stack.enter_context(worker)
                rounds = [
                    one_round(bench, model, worker, gemm, i) for i in range(bench.rounds(LIMIT_ROUNDS[model]) + 1)
                ]
                raw[model][name] = rounds[1:]
                figure = "limit_base" if model == "bert-base" else "limit"
                words = f"whet ({'fp32' if name == 'fp32' else 'own choice'}) at the {dtype_of(worker)} rate"
                parts = [one["limit_s"] / one["seconds"] for one in rounds[1:]]
                lines.append(Measured(figure, MODELS[model], words, parts, counts=model != "distilbert"))
    return lines, raw


def one_round(bench: Bench, model: str, worker: Worker, gemm: Worker, number: int) -> dict[str, Any]:
    """Return the seconds of a step, and the least that its products could take."""
    rows = bench.sample(number, len(bench.lengths), bench.batch)
    lengths, encoder = bench.lengths[rows].tolist(), bench.encoder(model)
    step = turn(worker, "step", rows=rows)
    found = products(gemm, encoder, sum(lengths), dtype_of(worker))
    limits = {"flops": step_flops(encoder, lengths), "limit_s": limit_s(encoder, lengths, found["seconds"])}
    return step | limits | {"linear_s": found["seconds"], "products": found["products"]}


def products(gemm: Worker, encoder: Encoder, n_tokens: int, dtype: str) -> dict[str, Any]:
    """Return what the gemm worker finds for the linear layers over so many tokens."""
    layers = [[layer.k, layer.m, layer.count] for layer in linears(encoder)]
    return turn(gemm, "gemm", n_tokens=n_tokens, layers=layers, dtype=dtype, n_runs=N_RUNS)


def run_threads(bench: Bench) -> tuple[list[Measured], dict[str, Any]]:
    """Return what all threads gain over one in a step, as a part of what they gain in its plain products."""
    lines, raw = [], {}
    if bench.n_threads == 1:
        return lines, {"left out": "there is only one thread here"}
    for model in bench.chosen("minilm"):
        with ExitStack() as stack:
            counts = (1, bench.n_threads)
            whets = {n: stack.enter_context(bench.start_whet(model, "fp32", n_threads=n)) for n in counts}
            gemms = {n: stack.enter_context(bench.start("gemm_worker", n_threads=n)) for n in counts}
            rounds = []
            for number in range(bench.rounds(THREAD_ROUNDS) + 1):
                rows = bench.sample(number, len(bench.lengths), bench.batch)
                n_tokens = int(bench.lengths[rows].sum())
                steps = {n: turn(worker, "step", rows=rows)["seconds"] for n, worker in whets.items()}
                encoder = bench.encoder(model)
                plain = {n: products(gemm, encoder, n_tokens, "fp32")["seconds"] for n, gemm in gemms.items()}
                rounds.append({"step_s": steps, "products_s": plain})
        raw[model] = rounds[1:]
        values = [gain(one["step_s"]) / gain(one["products_s"]) for one in rounds[1:]]
        lines.append(Measured("threads", MODELS[model], f"{bench.n_threads} threads against 1", values))
    return lines, raw


def gain(seconds: dict[int, float]) -> float:
    """Return how many times faster the most threads are than one."""
    return seconds[1] / seconds[max(seconds)]
