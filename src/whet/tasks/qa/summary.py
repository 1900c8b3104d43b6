"""The end of a run, in one short table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

_SHOWN = {
    "train_runtime": ("training", "{:,.1f} s"),
    "train_samples_per_second": ("windows a second", "{:,.2f}"),
    "train_tokens_per_second": ("real tokens a second", "{:,.0f}"),
    "train_padding_avoided": ("padding avoided", "{:.0%}"),
    "train_loss": ("mean training loss", "{:.4f}"),
    "eval_runtime": ("evaluation", "{:,.1f} s"),
    "eval_exact_match": ("exact match", "{:.2f}"),
    "eval_exact": ("exact match", "{:.2f}"),
    "eval_f1": ("F1", "{:.2f}"),
    "eval_HasAns_f1": ("F1, answerable", "{:.2f}"),
    "eval_NoAns_f1": ("F1, unanswerable", "{:.2f}"),
    "predict_f1": ("F1 of the predictions", "{:.2f}"),
}


def show(metrics: Mapping[str, float], folder: Path, total_s: float) -> None:
    """Print what the run reached, how fast, and where its files are."""
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 2))
    for name, (words, form) in _SHOWN.items():
        if name in metrics:
            table.add_row(words, form.format(metrics[name]))
    table.add_row("everything", f"{total_s:,.1f} s")
    table.add_row("files in", str(folder))
    Console(soft_wrap=True).print(table)
