"""The training loss of runs in fp32 and in int8, step by step, in one picture. Needs matplotlib.

    whet qa ... --logging_steps 25 --precision fp32 --output_dir fp32
    whet qa ... --logging_steps 25 --precision int8 --output_dir int8
    python benchmarks/xquad/curve.py --fp32 fp32 --int8 int8 --output curve.png

A folder is a run's --output_dir: the losses are those of its trainer_state.json. Several folders after one option are
runs with other seeds, in the same order after both. Prints how far each int8 run is from its fp32 run.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

COLOURS = {"fp32": "#0b6bcb", "int8": "#d9580d"}


def losses(folder: Path) -> dict[int, float]:
    """Return the logged training loss by step."""
    history = json.loads((folder / "trainer_state.json").read_text("utf-8"))["log_history"]
    found = {entry["step"]: entry["loss"] for entry in history if "loss" in entry}
    if not found:
        raise SystemExit(f"{folder}: no training loss in trainer_state.json; train with --logging_steps 25")
    return found


def gaps(fp32: dict[int, float], int8: dict[int, float]) -> list[float]:
    """Return how far int8's loss is from fp32's at each step that both have, as a part of fp32's."""
    return [abs(int8[step] - fp32[step]) / abs(fp32[step]) for step in sorted(fp32.keys() & int8.keys())]


def draw(curves: dict[str, list[dict[int, float]]], title: str, file: Path) -> None:
    """Draw every run: one colour for each format, int8 dashed so that fp32 shows through."""
    figure, axes = plt.subplots(figsize=(9, 4.5))
    axes.set_title(title, loc="left", weight="bold")
    for name, runs in curves.items():
        style = "--" if name == "int8" else "-"
        for number, run in enumerate(runs):
            label = name if number == 0 else None
            axes.plot(list(run), list(run.values()), style, color=COLOURS[name], linewidth=1.8, label=label)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("training loss, mean since the last point")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def main() -> None:
    """Draw the picture, print the distances."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in COLOURS:
        parser.add_argument(f"--{name}", type=Path, nargs="+", required=True, metavar="FOLDER", help=f"runs in {name}")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("curve.png"))
    options = parser.parse_args()
    if len(options.fp32) != len(options.int8):
        parser.error(f"{len(options.fp32)} runs in fp32 and {len(options.int8)} in int8: they are compared in pairs")
    curves = {name: [losses(folder) for folder in getattr(options, name)] for name in COLOURS}
    every = []
    for folder, fp32, int8 in zip(options.int8, curves["fp32"], curves["int8"], strict=True):
        found = gaps(fp32, int8)
        if not found:
            parser.error(f"{folder} has logged no step that its fp32 run has; use the same --logging_steps")
        print(f"{folder}: {statistics.mean(found):.1%} from fp32's loss on average, {max(found):.1%} at most")
        every += found
    draw(curves, f"The loss of int8 stays within {max(every):.1%} of fp32's", options.output)


if __name__ == "__main__":
    main()
