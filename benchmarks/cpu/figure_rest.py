"""The figures that need no round by round story: evaluation, windows, memory, the optimizer."""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from typing import Any

from figures import Measured
from questions import VARIANTS, write_questions

from bench import MODELS, Bench, turn

EVALUATION_ROUNDS = {"minilm": 5, "distilbert": 2, "bert-base": 2, "tiny": 2}
EVALUATED_ROWS = 48
MEMORY_STEPS = {"minilm": 4, "distilbert": 3, "bert-base": 2, "tiny": 2}
WINDOW_ROUNDS = 3
ADAMW_ROUNDS = 15


def run_evaluation(bench: Bench) -> tuple[list[Measured], dict[str, Any]]:
    """Return rows/s of predictions: the same windows, forward only."""
    from whet.data.store import RowStore

    lines, raw = [], {}
    n_all = len(RowStore.load(bench.dev_rows))
    for model in bench.chosen("minilm", "bert-base"):
        rounds = []
        with ExitStack() as stack:
            workers = {name: bench.start_peer(name, model, n_steps=1, mode="predict") for name in bench.guides}
            workers |= {f"whet_{name}": one for name, one in bench.start_whets(model, mode="predict").items()}
            for worker in workers.values():
                stack.enter_context(worker)
            for number in range(bench.rounds(EVALUATION_ROUNDS[model]) + 1):
                rows = bench.sample(number, n_all, EVALUATED_ROWS)
                rounds.append({name: turn(one, "predict", rows=rows) for name, one in workers.items()})
        raw[model] = rounds[1:]
        for peer, own in bench.guides.items():
            whet = own if own in workers else "whet_fp32"
            values = [one[peer]["seconds"] / one[whet]["seconds"] for one in rounds[1:]]
            words = f"whet ({'fp32' if whet == 'whet_fp32' else 'own choice'}) / {peer.replace('_', ' ')}"
            lines.append(Measured("evaluation", MODELS[model], words, values))
    return lines, raw


def run_windows(bench: Bench) -> tuple[list[Measured], dict[str, Any]]:
    """Return questions/s of tokenising and cutting windows, for each way to make many questions of XQuAD's."""
    lines, raw = [], {}
    tokenizer = bench.model("tiny")
    with (
        bench.start("peer_windows", "--model", tokenizer, peer=True) as peer,
        bench.start("whet_windows", "--model", tokenizer) as whet,
    ):
        for name, variant in VARIANTS.items():
            n_questions = int(bench.n_questions * variant.share)
            file = bench.folder / f"{name}.jsonl"
            made = write_questions(bench.data, file, n_questions, name)
            ours = [turn(whet, "windows", file=str(file))]
            theirs = turn(peer, "windows", file=str(file))
            ours += [turn(whet, "windows", file=str(file)) for _ in range(bench.rounds(WINDOW_ROUNDS) - 1)]
            require_same_windows(theirs, ours[0])
            raw[name] = made | {"whet": ours, "guides": theirs}
            values = [theirs["seconds"] / one["seconds"] for one in ours]
            words = f"{made['questions']:,} questions, {made['contexts']:,} contexts"
            lines.append(Measured("windows", variant.words, words, values, counts=variant.counts))
    return lines, raw


def require_same_windows(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """Raise where both did not do the same work."""
    if any(theirs[name] != ours[name] for name in ("n_windows", "start_sum")):
        raise RuntimeError(f"the windows differ: {theirs} and {ours}")


def run_memory(bench: Bench) -> tuple[list[Measured], dict[str, Any]]:
    """Return the most memory that a fresh process held over a few steps on the same rows."""
    lines, raw = [], {}
    for model in bench.chosen("minilm", "bert-base"):
        n_steps = bench.rounds(MEMORY_STEPS[model])
        found: dict[str, int] = {}
        for peer in bench.guides:
            with bench.start_peer(peer, model, n_steps=n_steps) as worker:
                rows = [turn(worker, "step")["rows"] for _ in range(n_steps)]
                found[peer] = worker.peak_bytes()
        for whet in bench.guides.values():
            with bench.start_whet(model, whet.removeprefix("whet_")) as worker:
                for step_rows in rows:
                    turn(worker, "step", rows=step_rows)
                found[whet] = worker.peak_bytes()
        raw[model] = {"peak_bytes": found, "n_steps": n_steps}
        for peer, whet in bench.guides.items():
            words = f"whet ({whet.removeprefix('whet_').replace('auto', 'own choice')}) / {peer.replace('_', ' ')}"
            lines.append(Measured("memory", MODELS[model], words, [found[whet] / found[peer]]))
    return lines, raw


def run_adamw(bench: Bench) -> tuple[list[Measured], dict[str, Any]]:
    """Return the bytes/s of an AdamW step over all parameters, as a part of a copy's."""
    lines, raw = [], {}
    for model in bench.chosen("minilm", "bert-base"):
        with bench.start("adamw_worker", "--config", bench.model(model) / "config.json") as worker:
            rounds = [turn(worker, "round")["bytes_per_s"] for _ in range(bench.rounds(ADAMW_ROUNDS))]
            raw[model] = {"rounds": rounds} | worker.ready
        for who in ("whet", "torch"):
            values = [one[who] / one["copy"] for one in rounds]
            rate = statistics.median(one[who] for one in rounds) / 1e9
            words = f"{who} ({rate:.1f} GB/s)"
            lines.append(Measured("adamw", MODELS[model], words, values, counts=who == "whet"))
    return lines, raw
