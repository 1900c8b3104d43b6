"""Chooses one answer per question from the best starts and ends of each window, like the guides' script."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from whet.errors import ConfigError, DataError, NonFiniteError, OutputError, Problem
from whet.tasks.qa.evaluate.candidates import Candidates, best_of_each, null_candidates, text_candidates
from whet.tasks.qa.types import Predictions, Questions, SpanScores, Windows
from whet.train.output import files as output_files

_FALLBACK_TEXT = "empty"
_FALLBACK_AT = -1
"""Marks the fallback answer, which has no position in the context."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeOptions:
    """How the answer of a question is chosen; names and defaults are those of the guides' `run_qa.py`."""

    n_best_size: int = 20
    """Starts and ends considered in each window, and answers kept for each question."""
    max_answer_length: int = 30
    """Longest answer, in tokens. Start and end are predicted separately, so nothing else limits their distance."""
    null_score_diff_threshold: float = 0.0
    """Answer "" if "no answer" scores higher than the best answer by more than this."""
    version_2_with_negative: bool = False
    """Some questions have no answer in their context, as in SQuAD v2.0."""

    def __post_init__(self) -> None:
        """Refuse sizes that leave no candidates."""
        problems = [
            Problem(
                what=f"--{name} is too small",
                got=got,
                why="at least one must be looked at",
                fix=f"use --{name} 1 or more",
            )
            for name, got in (("n_best_size", self.n_best_size), ("max_answer_length", self.max_answer_length))
            if got < 1
        ]
        if problems:
            raise ConfigError.of(problems)


def decode(questions: Questions, windows: Windows, scores: SpanScores, options: DecodeOptions) -> Predictions:
    """Return the best answer of every question, its n-best list, and for SQuAD v2.0 the lead of "no answer".

    Behaves as `postprocess_qa_predictions` of the guides' `utils_qa.py` does; of equal scores the first window, then
    the likelier start, then the likelier end wins. If several answers of a SQuAD v2.0 question are kept and all are
    empty texts, the script fails; here the question gets the answer "empty", as in the script if only one is kept.
    Probabilities are computed in float64. Raises DataError if the parts do not fit together, NonFiniteError if a
    logit is infinite or not a number.
    """
    _check(questions, windows, scores, options)
    n_best = options.n_best_size
    found = text_candidates(windows, scores, n_best=n_best, max_tokens=options.max_answer_length)
    if not options.version_2_with_negative:
        kept = found.take(best_of_each(found.question, found.score, n_best))
        return _without_null(questions, _with_fallback(kept, len(questions), only_alone=True))
    nulls = null_candidates(windows, scores)
    found = Candidates.join([found, nulls])
    kept = _with_null(found.take(best_of_each(found.question, found.score, n_best)), nulls)
    kept = _with_fallback(kept, len(questions), only_alone=False)
    return _with_null_odds(questions, kept, nulls, options.null_score_diff_threshold)


def write_predictions(predictions: Predictions, folder: Path, prefix: str, *, on_error: str = "stop") -> list[Path]:
    """Write the JSON files that the guides' script writes, and return their paths.

    `{prefix}_predictions.json`, `{prefix}_nbest_predictions.json` and, for SQuAD v2.0, `{prefix}_null_odds.json`; the
    folder is made if need be. Raises OutputError if that is not possible, and StorageError if the disk refuses a file,
    or logs it with `on_error` "continue".
    """
    files = {"predictions": predictions.best, "nbest_predictions": predictions.nbest}
    if predictions.null_odds is not None:
        files["null_odds"] = predictions.null_odds
    paths = {folder / f"{prefix}_{name}.json": content for name, content in files.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            what="the predictions cannot be written",
            got=f"{folder}: {error.strerror}",
            why="the folder must exist or be creatable, and be writable",
            fix="choose another --output_dir",
        ) from error
    for path, content in paths.items():
        with output_files.stored(f"{path.name} cannot be written", folder, on_error=on_error):
            output_files.write_text(path, json.dumps(content, indent=4) + "\n")
    return list(paths)


def _with_null(kept: Candidates, nulls: Candidates) -> Candidates:
    """Append "no answer" to its question again if the cut to n_best removed it."""
    there = np.zeros(len(nulls.question), dtype=bool)
    there[kept.question[(kept.begin == 0) & (kept.end == 0)]] = True
    return Candidates.join([kept, nulls.take(~there)]).by_question()


def _with_fallback(kept: Candidates, n_questions: int, *, only_alone: bool) -> Candidates:
    """Put the fallback first if no candidate has text; `only_alone`: not if there are several empty ones."""
    n_texts = np.bincount(kept.question[kept.has_text], minlength=n_questions)
    n_kept = np.bincount(kept.question, minlength=n_questions)
    lacking = np.flatnonzero((n_texts == 0) & ((n_kept <= 1) | (not only_alone)))
    nowhere, zero = np.full(len(lacking), _FALLBACK_AT), np.zeros(len(lacking), dtype=np.float32)
    return Candidates.join([Candidates(lacking, nowhere, nowhere, zero, zero), kept]).by_question()


def _without_null(questions: Questions, kept: Candidates) -> Predictions:
    nbest = _nbest(questions, kept)
    best = {name: str(entries[0]["text"]) for name, entries in nbest.items()}
    return Predictions(best=best, nbest=nbest, spans=_spans(questions, kept))


def _with_null_odds(questions: Questions, kept: Candidates, nulls: Candidates, threshold: float) -> Predictions:
    nbest = _nbest(questions, kept)
    speaking = np.flatnonzero(kept.has_text | (kept.begin == _FALLBACK_AT))
    best = kept.take(speaking[best_of_each(kept.question[speaking], np.zeros(len(speaking)), 1)])  # the first of each
    odds = nulls.score - best.start_logit - best.end_logit
    texts = [next(str(entry["text"]) for entry in entries if entry["text"]) for entries in nbest.values()]
    silent = (odds > threshold).tolist()
    return Predictions(
        best={name: "" if no else text for name, no, text in zip(nbest, silent, texts, strict=True)},
        nbest=nbest,
        spans=_spans(questions, kept),
        null_odds=dict(zip(nbest, odds.tolist(), strict=True)),
    )


def _nbest(questions: Questions, kept: Candidates) -> dict[str, list[dict[str, float | str]]]:
    """Return the entries of every question; `kept` is sorted by question and has at least one of each."""
    bounds = np.searchsorted(kept.question, np.arange(len(questions) + 1))
    probability = _softmax(kept.score, bounds).tolist()
    start_logit, end_logit = kept.start_logit.tolist(), kept.end_logit.tolist()
    begin, end = kept.begin.tolist(), kept.end.tolist()

    def entry(i: int, context: str) -> dict[str, float | str]:
        logits: dict[str, float | str] = {"start_logit": start_logit[i], "end_logit": end_logit[i]}
        if begin[i] == _FALLBACK_AT:  # the script's files have these keys in another order
            return {"text": _FALLBACK_TEXT, **logits, "probability": probability[i]}
        return {**logits, "text": context[begin[i] : end[i]], "probability": probability[i]}

    return {
        name: [entry(i, questions.context(q)) for i in range(bounds[q], bounds[q + 1])]
        for q, name in enumerate(questions.ids)
    }


def _spans(questions: Questions, kept: Candidates) -> dict[str, list[tuple[int, int]]]:
    """Return the characters of every question's entries, in the order of `_nbest`."""
    bounds = np.searchsorted(kept.question, np.arange(len(questions) + 1))
    places = list(zip(kept.begin.tolist(), kept.end.tolist(), strict=True))
    return {name: places[bounds[q] : bounds[q + 1]] for q, name in enumerate(questions.ids)}


def _softmax(score: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Return the softmax over each stretch between two bounds; no stretch is empty."""
    if not len(score):
        return score
    highest = np.maximum.reduceat(score, bounds[:-1])
    power = np.exp(score.astype(np.float64) - np.repeat(highest, np.diff(bounds)))
    return power / np.repeat(np.add.reduceat(power, bounds[:-1]), np.diff(bounds))


def _check(questions: Questions, windows: Windows, scores: SpanScores, options: DecodeOptions) -> None:
    problems = _mismatches(questions, windows, scores, options)
    if problems:
        raise DataError.of(problems)
    real_starts, real_ends = scores.start_index >= 0, scores.end_index >= 0
    logits = [scores.start_logit[real_starts], scores.end_logit[real_ends], scores.null_start, scores.null_end]
    broken = sum(int((~np.isfinite(logit)).sum()) for logit in logits)
    if broken:
        raise NonFiniteError(
            what="the model's logits are infinite or not numbers",
            got=f"{broken} of {sum(map(len, logits))} logits",
            why="answers are ranked by their logits",
            fix="use an earlier checkpoint; or train again with a lower --learning_rate, or --bf16 instead of --fp16",
        )


def _mismatches(questions: Questions, windows: Windows, scores: SpanScores, options: DecodeOptions) -> list[Problem]:
    n_rows, k = scores.start_index.shape
    repeated = [name for name, n in Counter(questions.ids).items() if n > 1]
    n_windows = np.bincount(windows.question_of, minlength=len(questions))
    checks = [
        (not repeated, "questions share an id", repeated[:5],
         "predictions are kept by question id", "give every question its own id"),
        (len(n_windows) == len(questions) and n_windows.all(), "questions and windows do not belong together",
         f"{len(questions)} questions; windows of {np.count_nonzero(n_windows)}, the last of them {len(n_windows) - 1}",
         "an answer is sought in the windows of its question", "make the windows of these questions"),
        (n_rows == len(windows), "scores and windows differ in number", f"{n_rows} scores, {len(windows)} windows",
         "each window has one row of scores", "score all windows, in order"),
        (k >= options.n_best_size, "too few starts and ends are kept", f"{k}, n_best_size={options.n_best_size}",
         "the n_best_size best of each window are paired", "call top_spans with k=n_best_size"),
    ]  # fmt: skip
    return [Problem(what=what, got=got, why=why, fix=fix) for fits, what, got, why, fix in checks if not fits]
