"""The end of a job, in one short table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from whet.train.output import printing, run_log, table

Shown = Mapping[str, tuple[str, str]]
"""Name of a metric -> the words for it, and the format of its value."""
OF_TRAINING: Shown = {
    "train_runtime": ("training", "{:,.1f} s"),
    "train_samples_per_second": ("rows a second", "{:,.2f}"),
    "train_tokens_per_second": ("real tokens a second", "{:,.0f}"),
    "train_padding_avoided": ("padding avoided", "{:.0%}"),
    "train_loss": ("mean training loss", "{:.4f}"),
    "eval_runtime": ("evaluation", "{:,.1f} s"),
}
"""What the table of every task begins with."""


def show(shown: Shown, metrics: Mapping[str, float], folder: Path, total_s: float, lines: Sequence[str] = ()) -> None:
    """Print what the run reached, how fast, and where its files are."""
    with run_log.written_to(folder):
        printing.show([*table.lines(shown, metrics, folder, total_s), *lines])
