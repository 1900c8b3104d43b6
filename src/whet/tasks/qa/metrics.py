"""Exact match and F1 of predicted answers, as the official SQuAD v1.1 and v2.0 scripts define them."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable

import numpy as np

from whet.errors import DataError, Problem
from whet.tasks.qa.types import Predictions, Questions

_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLE = re.compile(r"\b(a|an|the)\b")


def squad_metrics(questions: Questions, predictions: Predictions, *, version_2: bool) -> dict[str, float]:
    """Return the metrics of the official script (Rajpurkar et al. 2016, 2018), scores in percent.

    v1.1: `exact_match`, `f1`. v2.0: `exact`, `f1`, `total`; the same with `HasAns_` and `NoAns_` before them, over the
    questions with and without an answer (left out where there are none); `best_exact`, `best_exact_thresh`, `best_f1`,
    `best_f1_thresh`.

    The best_* are what the official script reports for these predictions with `null_odds` as its `--na-prob-file`: the
    best score if questions with odds above a threshold stay unanswered, and the threshold, which is meant for
    --null_score_diff_threshold. Three things follow from its definition. Decoding has already emptied the answers with
    odds above its own threshold, so a higher one gains nothing here: decode with a high one to search them all. Where
    it is best to answer nothing, the threshold reads 0.0. Within equal odds the search may stop between two questions.
    The guides' `run_qa.py` gives a no-answer probability of 0.0 for every question instead: its thresholds are always
    0.0, and its best scores depend on the order of the questions. Those are not reproduced.

    Raises DataError if a question of v1.1 has no answer.
    """
    check_scorable(questions, version_2=version_2)
    return _version_2(questions, predictions) if version_2 else _version_1(questions, predictions)


def scores(questions: Questions, predictions: Predictions, *, version_2: bool) -> list[tuple[float, float] | None]:
    """Return exact match and F1 of each answer, from 0 to 1; None for a question of v1.1 without a reference."""
    both = zip(questions.ids, questions.answers, strict=True)
    given = ((predictions.best[name], answers.texts) for name, answers in both)
    if version_2:
        return [_with_no_answer(text, references) for text, references in given]
    return [_of_references(text, references) if references else None for text, references in given]


def check_scorable(questions: Questions, *, version_2: bool) -> None:
    """Raise DataError if these questions cannot be scored, before any prediction."""
    problems = [] if version_2 else _no_answer(questions)
    if problems:
        raise DataError.of(problems)


def normalise(text: str) -> str:
    """Return the text in lower case, without ASCII punctuation and English articles, words separated by one space."""
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_WITHOUT_PUNCTUATION)).split())


def word_f1(prediction: str, reference: str) -> float:
    """Return the F1 of the words that two normalised texts share, counted with repetition; 0 if they share none."""
    predicted, wanted = prediction.split(), reference.split()
    shared = (Counter(predicted) & Counter(wanted)).total()
    if not shared:
        return 0.0
    precision, recall = shared / len(predicted), shared / len(wanted)
    return 2 * precision * recall / (precision + recall)


def _version_1(questions: Questions, predictions: Predictions) -> dict[str, float]:
    exact, f1 = np.array(scores(questions, predictions, version_2=False), dtype=np.float64).T
    return {"exact_match": _percent(exact), "f1": _percent(f1)}


def _of_references(text: str, answers: Iterable[str]) -> tuple[float, float]:
    """Return exact match and F1 by v1.1: those of the best reference."""
    prediction, references = normalise(text), [normalise(answer) for answer in answers]
    return float(prediction in references), max(word_f1(prediction, reference) for reference in references)


def _version_2(questions: Questions, predictions: Predictions) -> dict[str, float]:
    exact, f1 = np.array(scores(questions, predictions, version_2=True), dtype=np.float64).T
    has_answer = np.array([bool(answers.texts) for answers in questions.answers])
    metrics: dict[str, float] = {}
    for prefix, which in (("", np.ones_like(has_answer)), ("HasAns_", has_answer), ("NoAns_", ~has_answer)):
        if which.any():
            metrics[f"{prefix}exact"] = _percent(exact[which])
            metrics[f"{prefix}f1"] = _percent(f1[which])
            metrics[f"{prefix}total"] = int(which.sum())
    said = np.array([bool(predictions.best[name]) for name in questions.ids])
    odds = np.array([(predictions.null_odds or {})[name] for name in questions.ids])
    for name, score in (("exact", exact), ("f1", f1)):
        gain = np.where(has_answer, score, np.where(said, -1.0, 0.0))
        metrics[f"best_{name}"], metrics[f"best_{name}_thresh"] = _best_threshold(gain, int((~has_answer).sum()), odds)
    return metrics


def _with_no_answer(text: str, answers: Iterable[str]) -> tuple[float, float]:
    """Return exact match and F1 by v2.0: without a reference that has a word, only an empty text is correct."""
    prediction = normalise(text)
    references = [reference for answer in answers if (reference := normalise(answer))] or [""]
    exact = float(prediction in references)
    # Equal texts already have an F1 of 1, except for two empty ones, which v2.0 gives 1.
    return exact, max(exact, *(word_f1(prediction, reference) for reference in references))


def _best_threshold(gain: np.ndarray, unanswered: int, odds: np.ndarray) -> tuple[float, float]:
    """Return the highest score in percent, and the odds up to which questions are answered to reach it.

    All unanswered, each question without an answer scores 1, `unanswered` in all; `gain` is what answering changes.
    """
    order = np.argsort(odds, kind="stable")
    total = unanswered + np.cumsum(gain[order])
    best = int(total.argmax())  # the first of equals, because only an increase counts
    if total[best] <= unanswered:
        return 100.0 * unanswered / len(gain), 0.0
    return 100.0 * float(total[best]) / len(gain), float(odds[order[best]])


def _percent(scores: Iterable[float]) -> float:
    return 100.0 * float(np.mean(np.asarray(scores, dtype=np.float64)))


def _no_answer(questions: Questions) -> list[Problem]:
    without = [name for name, answers in zip(questions.ids, questions.answers, strict=True) if not answers.texts]
    what = f"{len(without)} of {len(questions)} questions have no reference answer"
    why, fix = "SQuAD v1.1 asks only what has an answer", "add --version_2_with_negative"
    return [Problem(what=what, got=without[:5], why=why, fix=fix)] if without else []
