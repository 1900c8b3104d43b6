"""Draws F1 after training in fp32 and in int8 from results.json, for light and for dark pages. Needs matplotlib.

python benchmarks/xquad/plot.py benchmarks/xquad/results.json out
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bars import Chart, draw

FORMATS = {"fp32": "whet", "int8": "whet int8"}
"""The formats, and the names of their runs in the file."""


def chart(results: dict[str, Any]) -> Chart:
    """Return the picture: the seeds that both formats have."""
    seeds = [seed for seed in results[FORMATS["int8"]] if seed in results[FORMATS["fp32"]]]
    f1 = {name: {seed: results[run][seed]["eval_f1"] for seed in seeds} for name, run in FORMATS.items()}
    gap = mean(f1["int8"].values()) - mean(f1["fp32"].values())
    within = max(abs(f1["int8"][seed] - f1["fp32"][seed]) for seed in seeds)
    return Chart(
        headline=f"Training in int8 reaches the F1 of fp32:\nat most {within:.1f} points apart, {gap:+.1f} on average",
        note="F1 on XQuAD after five epochs of MiniLM, larger is better. Differences of two points are chance.",
        groups=[f"seed {seed}" for seed in seeds],
        series={name: {f"seed {seed}": [value] for seed, value in found.items()} for name, found in f1.items()},
    )


def main() -> None:
    """Draw the file of the first argument into the folder of the second."""
    file, folder = map(Path, sys.argv[1:])
    print(*draw(chart(json.loads(file.read_text("utf-8"))), folder, "int8"), sep="\n")


if __name__ == "__main__":
    main()
