"""Metrics of tags: entities by seqeval's definition, plain tags by accuracy and macro F1."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from whet.errors import ConfigError
from whet.jobs import metrics
from whet.log import logger
from whet.optional import extra, require
from whet.tasks.tag.labels import Tags

INSTALL = extra("tag")
_BIOES = {"L-": "E-", "U-": "S-"}
"""The last word of an entity, and a word alone, as BILOU writes them -> as seqeval reads them."""


def judge(
    expected: Sequence[np.ndarray], found: Sequence[np.ndarray], tags: Tags, *, each_entity: bool
) -> dict[str, float]:
    """Return the metrics of the words' tags, given as numbers, sentence by sentence."""
    flat_expected, flat_found = np.concatenate(expected), np.concatenate(found)
    accuracy = float((flat_expected == flat_found).mean())
    if not tags.are_entities:
        counts = metrics.confusion(flat_expected, flat_found, len(tags.names))
        return {"accuracy": accuracy, "f1_macro": metrics.macro_f1(counts)}
    try:
        seqeval = require("seqeval.metrics", needed_for="F1 of entities", install=INSTALL)
    except ConfigError:
        logger.warning("accuracy of words alone: precision, recall and F1 of entities need: pip install %s", INSTALL)
        return {"accuracy": accuracy}
    known = [re.sub("^[LU]-", lambda mark: _BIOES[mark[0]], name) for name in tags.names]
    names = [[known[n] for n in one] for one in expected], [[known[n] for n in one] for one in found]
    values = {
        "precision": float(seqeval.precision_score(*names, zero_division=0)),
        "recall": float(seqeval.recall_score(*names, zero_division=0)),
        "f1": float(seqeval.f1_score(*names, zero_division=0)),
        "accuracy": accuracy,
    }
    return values | (_each(seqeval, names) if each_entity else {})


def _each(seqeval: Any, names: Any) -> dict[str, float]:
    report = seqeval.classification_report(*names, output_dict=True, zero_division=0)
    words = {"precision": "precision", "recall": "recall", "f1": "f1-score", "number": "support"}
    return {
        f"{entity}_{word}": float(values[theirs])
        for entity, values in report.items()
        if not entity.endswith(" avg")
        for word, theirs in words.items()
    }
