"""The training loss of runs in fp32 and in int8, step by step, in one picture. It trains nothing; it needs matplotlib.

    whet qa ... --logging_steps 25 --precision fp32 --output_dir fp32
    whet qa ... --logging_steps 25 --precision int8 --output_dir int8
    python benchmarks/xquad/curve.py --fp32 fp32 --int8 int8 --output curve.png

A folder is a run's --output_dir: the losses are those of its trainer_state.json. Several folders after one option are
runs with other seeds, in the same order after both. Prints how far each int8 run is from the fp32 run beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

COLOURS = {"fp32": "#4d4d4d", "int8": "#b2182b"}


def losses(folder: Path) -> dict[int, float]:
    """Return the training loss by step, as the run has logged it."""
    history = json.loads((folder / "trainer_state.json").read_text("utf-8"))["log_history"]
    found = {entry["step"]: entry["loss"] for entry in history if "loss" in entry}
    if not found:
        raise SystemExit(f"{folder}: no training loss in trainer_state.json; train with --logging_steps 25")
    return found


def gaps(fp32: dict[int, float], int8: dict[int, float]) -> list[float]:
    """Return how far int8's loss is from fp32's at each step that both have, as a part of it."""
    return [abs(int8[step] - fp32[step]) / abs(fp32[step]) for step in sorted(fp32.keys() & int8.keys())]


def draw(curves: dict[str, list[dict[int, float]]], file: Path) -> None:
    """Draw every run: one colour a format, the first run of each darker than those with other seeds."""
    figure, axes = plt.subplots(figsize=(9, 4.5))
    for name, runs in curves.items():
        for number, run in enumerate(runs):
            label, alpha = (name, 1.0) if number == 0 else (None, 0.35)
            axes.plot(list(run), list(run.values()), color=COLOURS[name], linewidth=1.2, alpha=alpha, label=label)
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
    for folder, fp32, int8 in zip(options.int8, curves["fp32"], curves["int8"], strict=True):
        found = gaps(fp32, int8)
        if not found:
            parser.error(f"{folder} has logged no step that the fp32 run beside it has; use the same --logging_steps")
        print(f"{folder}: {statistics.mean(found):.1%} from fp32's loss on average, {max(found):.1%} at most")
    draw(curves, options.output)


if __name__ == "__main__":
    main()
