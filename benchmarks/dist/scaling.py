"""How training scales to several ranks over a network: 2 ranks of one thread against one, with as many tokens each.

    python benchmarks/dist/scaling.py
    python benchmarks/dist/scaling.py --models minilm --rounds 5 --precision auto
    python benchmarks/dist/scaling.py --table

The ranks are in network namespaces of this machine, each bound to a core of its own, with a link that is shaped to 1
and 10 Gbit/s (needs root, `ip` and `tc`). Efficiency is the rate of the pair over twice that of the one. Two single
ranks at the same time show what the machine itself takes: memory and clock rate are shared. The runs alternate. A model
of cost (cost.py) predicts each pair from the single rank and the measured rates of the link; curve.py prints more nodes
from these.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import links
from cost import Network, Work, step_s
from machine import facts
from rates import SIZE

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results.json"
SIDES = {"whet": "engine of the commands", "torch": "transformers' model in torch's DDP, fp32, padded"}
LINKS: dict[str, float | None] = {"1 Gbit/s": 1.0, "10 Gbit/s": 10.0}
ROWS = {"minilm": 12, "distilbert": 12}
"""Rows of a rank and step, as many as in the guides' command."""
BUCKETS = {"whet": 4 << 20, "torch": 25 << 20}
"""Their sizes as each side has them by default."""
_WARM_UP = 2
_ENTRIES = 30522
"""Of BERT's vocabulary, which both models have."""


def main() -> None:
    """Measure and store, or print the stored table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(ROWS), default=sorted(ROWS, reverse=True))
    parser.add_argument("--sides", nargs="+", choices=sorted(SIDES), default=sorted(SIDES, reverse=True))
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16", "auto"])
    parser.add_argument("--hook", default="none", choices=["none", "bf16", "fp16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--table", action="store_true", help="print what is on file, measure nothing")
    asked = parser.parse_args()
    if not asked.table:
        stored = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
        with links.linked(), tempfile.TemporaryDirectory() as folder:
            for found in _measure(asked, Path(folder)):
                stored |= found
                RESULTS.write_text(json.dumps(stored, indent=1) + "\n", "utf-8")
    print("\n".join(table(json.loads(RESULTS.read_text("utf-8")))))


def _measure(asked: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the result of each model and side by its name."""
    rates = {name: _rates(folder, gbit) for name, gbit in {**LINKS, "none": None}.items()}
    for model in asked.models:
        for side in asked.sides:
            precision = asked.precision if side == "whet" else "fp32"
            settings = {"model": model, "side": side, "rows": ROWS[model], "steps": asked.steps,
                        "precision": precision, "hook": asked.hook}  # fmt: skip
            rounds = [_round(settings, folder) for _ in range(asked.rounds)]
            name = f"{model} {side} {rounds[0]['one'][1]['precision']}" + (
                f" {asked.hook}" if asked.hook != "none" else ""
            )
            found = _summary(rounds) | {"rates": rates, "machine": facts()}
            print(name, json.dumps(found["efficiency"]), flush=True)
            yield {name: found}


def _round(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return {what ran: (seconds of a step, all that rank 0 wrote)}, each once."""
    links.shape(None)
    found = {"one": _ran(settings, folder, 1), "two apart": _ran(settings, folder, 1, at_once=2)}
    for name, gbit in LINKS.items():
        links.shape(gbit)
        found[name] = _ran(settings, folder, 2)
    return found


def _ran(settings: dict[str, Any], folder: Path, n_ranks: int, at_once: int = 1) -> tuple[float, dict[str, Any]]:
    ranks = []
    for n in range(max(n_ranks, at_once)):
        own = folder / f"settings-{n}.json"
        own.write_text(json.dumps(settings | {"out": str(folder / f"out-{n}.json")}), "utf-8")
        words = [sys.executable, str(HERE / "rank_worker.py"), str(own)]
        ranks.append(links.start(n, n, words, _environment(n, n_ranks)))
    _wait(ranks)
    kept = json.loads((folder / "out-0.json").read_text("utf-8"))
    return statistics.median(kept["step_s"][_WARM_UP - 1 :]), kept


def _rates(folder: Path, gbit: float | None) -> dict[str, float]:
    links.shape(gbit)
    out = folder / "rates.json"
    words = [sys.executable, str(HERE / "rates.py"), str(out)]
    _wait([links.start(n, n, words, _environment(n, 2)) for n in range(2)])
    return json.loads(out.read_text("utf-8"))


def _environment(rank: int, n_ranks: int) -> dict[str, str]:
    given = dict(os.environ) | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    if n_ranks > 1:
        given |= {"RANK": str(rank), "WORLD_SIZE": str(n_ranks), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                  "MASTER_PORT": "29511"}  # fmt: skip
    return given


def _wait(ranks: Sequence[Any]) -> None:
    codes = [rank.wait(timeout=900) for rank in ranks]
    if any(codes):
        raise RuntimeError(f"a rank ended with {codes}")


def _summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    seconds = {name: [one[name][0] for one in rounds] for name in rounds[0]}
    of_one = rounds[0]["one"][1]
    of_pair = rounds[0]["1 Gbit/s"][1]
    efficiency = {
        name: sorted(one / both for one, both in zip(seconds["one"], seconds[name], strict=True))
        for name in seconds if name != "one"
    }  # fmt: skip
    return {"step_s": seconds, "efficiency": efficiency, "dense": of_one["dense"], "width": of_one["width"],
            "table_rows": of_pair["table_rows"]}  # fmt: skip


def table(stored: dict[str, Any]) -> list[str]:
    """Return the results as a table in Markdown, with what the model of cost says."""
    lines = ["| model, side, precision | step of one rank | two apart | " + " | ".join(
        f"{name}: efficiency | predicted" for name in LINKS) + " |"]  # fmt: skip
    lines.append("|---" * (3 + 2 * len(LINKS)) + "|")
    for name, found in stored.items():
        cells = [name, f"{statistics.median(found['step_s']['one']):.2f} s",
                 f"{statistics.median(found['efficiency']['two apart']):.1%}"]  # fmt: skip
        for link in LINKS:
            seen = found["efficiency"][link]
            cells += [
                f"{statistics.median(seen):.1%} ({seen[0]:.1%} to {seen[-1]:.1%})",
                f"{predicted(found, link):.1%}",
            ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def predicted(found: dict[str, Any], link: str) -> float:
    """Return the efficiency of two ranks that the model of cost predicts from two single ranks at once and the link."""
    network, work = network_of(found, link), work_of(found, statistics.median(found["step_s"]["two apart"]))
    return statistics.median(found["step_s"]["one"]) / step_s(work, network, 2)


def network_of(found: dict[str, Any], link: str) -> Network:
    """Return the measured rates of a link."""
    rates, free = found["rates"][link], found["rates"]["none"]
    return Network(SIZE / rates["large_s"], free["large_s"] / SIZE, rates["latency_s"])


def work_of(found: dict[str, Any], alone_s: float) -> Work:
    """Return the step of a rank alone that takes so long, with the bytes that were counted."""
    rows, table = (n * found["width"] * 4 for n in (found["table_rows"], _ENTRIES))
    dense, bucket = found["dense"] * 4, BUCKETS["whet" if rows else "torch"]
    return Work(alone_s, dense, rows, table, bucket) if rows else Work(alone_s, dense + table, 0, 0, bucket)


if __name__ == "__main__":
    main()
