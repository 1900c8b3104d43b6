"""How training would scale to more nodes than were measured, next to what the guides say of their four.

    python benchmarks/dist/curve.py

Computed by the model of cost (cost.py) from results.json; nothing is measured here. Measured are the step of one rank
alone, the bytes of its gradients, and sums over the shaped link. The model assumes:
- one rank for each node, with as many tokens as the rank that was measured, and a step as long as that of a rank alone;
- sums by rings, 2 (n - 1) / n times the bytes, in buckets that travel as soon as the backward pass has filled them;
- the core that computes also copies and adds, at the rate of a sum over a link without a limit;
- rows of embedding tables, or the tables if these are shorter, after the backward pass; a rank's rows are taken to be
  those that were counted for two ranks together, which is more than it sends.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from cost import Network, Work, step_s
from scaling import LINKS, RESULTS, network_of, predicted, work_of

NODES = (2, 4, 16, 64)
NAMES = {
    "minilm whet fp32": "MiniLM, whet",
    "minilm torch fp32": "MiniLM, transformers in torch's DDP",
    "distilbert whet fp32": "DistilBERT's size, whet",
}
GUIDES_MINUTES = {1: 26.0, 4: 7.5}
"""Nodes -> minutes of an epoch of DistilBERT on SQuAD, as the guides give them."""
_LIKE_THE_GUIDES = "distilbert whet fp32"
_LONGEST_STEP_S = 1e4


def main() -> None:
    """Print the curve."""
    print("\n".join(lines(json.loads(RESULTS.read_text("utf-8")))))


def lines(stored: dict[str, Any]) -> list[str]:
    """Return the curve in Markdown, how far the model was off at two ranks, and the guides' claim."""
    return [*_curve(stored), "", _error(stored), "", *_guides(stored[_LIKE_THE_GUIDES])]


def efficiency(found: dict[str, Any], link: str, nodes: int) -> float:
    """Return the rate of so many nodes over as many times that of one."""
    work = work_of(found, statistics.median(found["step_s"]["one"]))
    return work.step_s / step_s(work, network_of(found, link), nodes)


def _curve(stored: dict[str, Any]) -> list[str]:
    found = [f"| computed: efficiency, and rate over one node | link | {' | '.join(f'{n} nodes' for n in NODES)} |"]
    found.append("|---" * (2 + len(NODES)) + "|")
    for name, said in NAMES.items():
        for link in LINKS:
            rates = [efficiency(stored[name], link, nodes) for nodes in NODES]
            cells = [f"{rate:.0%} ({nodes * rate:.1f}x)" for nodes, rate in zip(NODES, rates, strict=True)]
            found.append("| " + " | ".join([said, link, *cells]) + " |")
    return found


def _error(stored: dict[str, Any]) -> str:
    gaps = [
        100 * (predicted(stored[name], link) - statistics.median(stored[name]["efficiency"][link]))
        for name in NAMES for link in LINKS
    ]  # fmt: skip
    return (
        f"At two ranks, where it was measured, the model is {min(gaps):.1f} to {max(gaps):.1f} points too high; the "
        "curve is not corrected for that."
    )


def _guides(found: dict[str, Any]) -> list[str]:
    """Return the guides' claim next to what the model says for as many nodes."""
    (_, alone), (nodes, many) = GUIDES_MINUTES.items()
    claimed, dense = alone / many / nodes, dense_as_in_ddp(found)
    rates = [efficiency(found, link, nodes) for link in LINKS]
    shortest = [shortest_step_s(dense, network_of(found, link), nodes, claimed) for link in LINKS]
    table = {
        f"computed for {nodes} nodes": list(LINKS),
        "---": ["---"] * len(LINKS),
        "DistilBERT's size, whet: efficiency": [f"{rate:.1%}" for rate in rates],
        f"with it, {alone:g} minutes on one node become": [f"{alone / nodes / rate:.1f} minutes" for rate in rates],
        f"shortest step with {claimed:.1%} if all {dense.dense_bytes / 1e6:.0f} MB of gradients are dense": [
            f"{one:.1f} s" for one in shortest
        ],
    }
    said = (
        f"The guides' epoch, {alone:g} minutes on one node and {many:g} on {nodes}, is {claimed:.1%} of linear scaling."
    )
    return [said, "", *("| " + " | ".join([name, *cells]) + " |" for name, cells in table.items())]


def dense_as_in_ddp(found: dict[str, Any]) -> Work:
    """Return the work of torch's DDP for the same model: tables are summed like all other gradients."""
    work = work_of(found, 1.0)
    return Work(1.0, work.dense_bytes + work.table_bytes, 0, 0, 25 << 20)


def shortest_step_s(work: Work, network: Network, nodes: int, wanted: float) -> float:
    """Return the seconds of a step from which on so many nodes reach this efficiency."""
    low, high = 0.0, _LONGEST_STEP_S
    for _ in range(60):
        middle = (low + high) / 2
        reached = middle / step_s(replace(work, step_s=middle), network, nodes) >= wanted
        low, high = (low, middle) if reached else (middle, high)
    return high


if __name__ == "__main__":
    main()
