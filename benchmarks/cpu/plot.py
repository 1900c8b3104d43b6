"""Draws the speed of whet from results.json, for light and for dark pages. Needs matplotlib.

python benchmarks/cpu/plot.py benchmarks/cpu/results.json benchmarks/cpu
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from figures import Measured

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bars import Chart, draw

GROUPS = {
    "guides": "compared with the usual\nrun_qa.py command (bf16,\nrows padded to 384 tokens)",
    "best": "compared with transformers'\nfastest options (bf16, rows\nof similar length together)",
    "optimize": "whet.optimize in transformers'\nTrainer, compared with the\nsame Trainer without it (fp32)",
}
"""The figures that the picture shows, and the words next to their bars."""
MODELS = ("MiniLM", "BERT-base size")


def chosen(results: dict[str, Any]) -> list[Measured]:
    """Return the lines that the picture shows: for each figure and model, the last one that counts.

    If two precisions count, the last one is the one that whet chooses by itself."""
    lines = [Measured.of(record) for record in results.get("steps", {}).get("lines", [])]
    shown = [line for line in lines if line.counts and line.figure in GROUPS and line.model in MODELS]
    return list({(line.figure, line.model): line for line in shown}.values())


def headline(lines: Sequence[Measured]) -> str:
    """Return the finding in one sentence, from the measured lines."""
    guides, best = (_span([line.median for line in lines if line.figure == key]) for key in ("guides", "best"))
    first = f"whet trains {guides} times as fast as the usual run_qa.py command" if guides else ""
    second = f"{best} times as fast as transformers' fastest options" if best else ""
    return ",\n".join(part for part in (first, second) if part) or "Training steps per second with whet"


def _span(values: Sequence[float]) -> str:
    shown = sorted({f"{value:.1f}" if value < 5 else f"{value:.0f}" for value in values}, key=float)
    return " to ".join(dict.fromkeys((shown[0], shown[-1]))) if shown else ""


def chart(results: dict[str, Any], lines: Sequence[Measured]) -> Chart:
    """Return the picture of the lines."""
    machine = results["steps"]["machine"]
    return Chart(
        headline=headline(lines),
        note=f"Training steps per second as a ratio. {machine['cores']} cores of {machine['processor']}, "
        f"torch {machine['versions']['torch'].partition('+')[0]}. Bar: median; line: smallest to largest.",
        groups=[words for key, words in GROUPS.items() if any(line.figure == key for line in lines)],
        series={
            model: {GROUPS[line.figure]: line.values for line in lines if line.model == model}
            for model in MODELS
            if any(line.model == model for line in lines)
        },
        unit="x",
        mark=1.0,
    )


def main() -> None:
    """Draw the file of the first argument into the folder of the second."""
    file, folder = map(Path, sys.argv[1:])
    results = json.loads(file.read_text("utf-8"))
    lines = chosen(results)
    if not lines:
        print("no picture: the part `steps` has not measured MiniLM or BERT-base size")
        return
    print(*draw(chart(results, lines), folder, "speed"), sep="\n")


if __name__ == "__main__":
    main()
