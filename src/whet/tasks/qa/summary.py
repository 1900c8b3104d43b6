"""The metrics that the table at the end of `whet qa` shows."""

from __future__ import annotations

from whet.jobs.summary import OF_TRAINING

SHOWN = {
    **OF_TRAINING,
    "train_samples_per_second": ("windows a second", "{:,.2f}"),
    "eval_exact_match": ("exact match", "{:.2f}"),
    "eval_exact": ("exact match", "{:.2f}"),
    "eval_f1": ("F1", "{:.2f}"),
    "eval_HasAns_f1": ("F1, answerable", "{:.2f}"),
    "eval_NoAns_f1": ("F1, unanswerable", "{:.2f}"),
    "predict_f1": ("F1 of the predictions", "{:.2f}"),
}
