"""Complete training steps: whet compared with transformers' Trainer with several options, always on the same rows."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from figures import Measured
from protocol import Worker

from bench import MODELS, Bench, turn

ROUNDS = {"minilm": 5, "distilbert": 3, "bert-base": 2, "tiny": 2}
ONCE = ("minilm", "tiny")
"""Models on which the guides' command in bf16 is measured, for a single round, where it takes minutes a step."""
MATCHES = (("guides_bf16",), ("guides_fp32", "optimize_fp32"), ("best_fp32",), ("best_bf16",))
"""Peers that are up together, with whet's workers: each match holds who is compared, and few enough for the memory."""
FIGURE_OF = {"guides_bf16": "guides", "guides_fp32": "guides_fp32", "best_fp32": "best", "best_bf16": "best"}
WORDS = {
    "guides_bf16": "the guides' command",
    "guides_fp32": "the guides' command in fp32",
    "best_fp32": "best options in fp32",
    "best_bf16": "best options in bf16",
}


def run(bench: Bench) -> tuple[list[Measured], dict[str, Any]]:
    """Return the lines of the table, and all rounds."""
    lines, raw = [], {}
    for model in bench.chosen("minilm", "distilbert", "bert-base"):
        raw[model] = {}
        with ExitStack() as stack:
            whets = {name: stack.enter_context(worker) for name, worker in bench.start_whets(model).items()}
            for peers in MATCHES:
                if peers == ("best_bf16",) and "auto" not in whets and not bench.all_peers:
                    continue
                once = peers == ("guides_bf16",) and bench.crawls_in_bf16
                if once and model not in ONCE:
                    continue
                rounds = match(bench, model, peers, whets, once=once)
                raw[model]["+".join(peers)] = rounds
                lines += judged(model, peers, rounds)
    return lines, raw


def match(
    bench: Bench, model: str, peers: tuple[str, ...], whets: dict[str, Worker], *, once: bool = False
) -> list[dict[str, Any]]:
    """Return the rounds of a match. In each, everybody takes one step on the same rows; a first one warms up.

    With `once` the first round is the only one: a step of minutes needs no warm-up.
    """
    n_rounds = 0 if once else bench.rounds(ROUNDS[model])
    rounds = []
    with ExitStack() as stack:
        workers = {
            peer: stack.enter_context(bench.start_peer(peer, model, n_steps=n_rounds + 1)) for peer in peers
        }  # fmt: skip
        for _ in range(n_rounds + 1):
            found = {peer: turn(worker, "step") for peer, worker in workers.items()}
            rows = found[peers[0]]["rows"]
            require_same_rows(found)
            found |= {f"whet_{name}": turn(worker, "step", rows=rows) for name, worker in whets.items()}
            rounds.append(found)
    return rounds if once else rounds[1:]


def require_same_rows(found: dict[str, dict[str, Any]]) -> None:
    """Raise where two took a step on different rows: nothing could be said about them."""
    rows = [answer["rows"] for answer in found.values()]
    if any(one != rows[0] for one in rows):
        raise RuntimeError(f"the peers {', '.join(found)} took steps on different rows")


def judged(model: str, peers: tuple[str, ...], rounds: list[dict[str, Any]]) -> list[Measured]:
    """Return the lines of a match; in those that count, whet's own choice meets --bf16, and fp32 meets fp32."""
    lines = []
    whets = [name for name in rounds[0] if name.startswith("whet_")]
    for peer in peers:
        for whet in whets if peer in FIGURE_OF else ():
            fp32 = peer.endswith("fp32")
            counts = whet == ("whet_fp32" if fp32 else whets[-1])
            if peer == "best_bf16":
                counts = counts and whet == "whet_auto"
            name = "fp32" if whet == "whet_fp32" else "own choice"
            values = [one[peer]["seconds"] / one[whet]["seconds"] for one in rounds]
            words = f"whet ({name}) / {WORDS[peer]}"
            lines.append(Measured(FIGURE_OF[peer], MODELS[model], words, values, counts))
            if FIGURE_OF[peer] == "best":
                totals = [sum(one[who]["seconds"] for one in rounds) for who in (peer, whet)]
                whole = f"{words}, all steps together"
                lines.append(Measured("best", MODELS[model], whole, [totals[0] / totals[1]], counts=False))
    if "optimize_fp32" in peers:
        values = [one["guides_fp32"]["seconds"] / one["optimize_fp32"]["seconds"] for one in rounds]
        lines.append(Measured("optimize", MODELS[model], "with / without whet.optimize", values))
    return lines
