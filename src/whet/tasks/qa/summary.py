"""The end of a run, in one short table."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from pathlib import Path

from whet.errors import escape_controls
from whet.log import logger

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
    rows = [(words, form.format(metrics[name])) for name, (words, form) in _SHOWN.items() if name in metrics]
    rows += [("everything", f"{total_s:,.1f} s"), ("files in", escape_controls(str(folder)))]
    # Where standard output is no terminal it holds JSON lines, so the words for people go to standard error.
    out = sys.stdout if sys.stdout.isatty() else sys.stderr
    if out is sys.stderr and not logger.isEnabledFor(logging.INFO):
        return
    for words, figure in rows:
        print(f"  {words:<22}{figure}", file=out)
