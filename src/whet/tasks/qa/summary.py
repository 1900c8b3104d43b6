"""The metrics that the table at the end of `whet qa` shows."""

from __future__ import annotations

SHOWN = {
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
