"""The best answer to each question, from the logits of all its windows, chosen like the guides' script does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whet.errors import OutputError
from whet.models.finite import require_finite_logits
from whet.tasks.qa.arguments import QaArguments
from whet.tasks.qa.types import Predictions, Questions, SpanScores, Windows
from whet.watch import files as output_files


def top_spans(start_logits: Tensor, end_logits: Tensor, cu_seqlens: Tensor | np.ndarray, k: int) -> SpanScores:
    """Return the k likeliest starts and ends of each row, best first; the lowest index among equals.

    The logits are (N,), rows end to end without padding, as `cu_seqlens` (rows + 1,) cuts them; no row is empty.
    All tokens of a row compete, not only those of the context: the guides' script (`utils_qa.py`) drops the others
    after the choice, and so does `decode`. Padding never competes, so packing cannot change the choice.
    """
    starts = torch.as_tensor(cu_seqlens, dtype=torch.int64, device=start_logits.device)
    lengths = starts.diff()
    padded = _padded(torch.stack([start_logits, end_logits]).detach().float(), starts, at_least=k)  # (2, rows, T)
    # A stable sort, not topk: the choice of topk among equal logits is undefined and differs by device.
    # Padding is last in its row, so a real token with a logit of -inf still comes before it.
    logit, index = padded.sort(dim=-1, descending=True, stable=True)
    logit, index = logit[..., :k].clone(), index[..., :k]  # views would keep the logits of all tokens
    index = index.masked_fill(index >= lengths[:, None], -1)
    null = padded[:, :, 0].clone()
    return SpanScores(
        start_index=index[0].cpu().numpy(),
        start_logit=logit[0].cpu().numpy(),
        end_index=index[1].cpu().numpy(),
        end_logit=logit[1].cpu().numpy(),
        null_start=null[0].cpu().numpy(),
        null_end=null[1].cpu().numpy(),
    )


def concat(batches: Sequence[SpanScores]) -> SpanScores:
    """Return the scores of all batches, one after the other; there is at least one batch, and all have the same k."""
    return SpanScores(
        **{
            column.name: np.concatenate([getattr(batch, column.name) for batch in batches])
            for column in fields(SpanScores)
        }
    )


def _padded(logits: Tensor, starts: Tensor, *, at_least: int) -> Tensor:
    """Return (2, rows, T) with -inf after each row's tokens; T is the longest row, at least `at_least`."""
    lengths = starts.diff()
    rows, n_tokens = len(lengths), logits.shape[1]
    assert int(starts[-1]) == n_tokens, "cu_seqlens must cover the logits"
    width = max(at_least, int(lengths.max()) if rows else 0)
    row = torch.repeat_interleave(torch.arange(rows, device=logits.device), lengths, output_size=n_tokens)
    column = torch.arange(n_tokens, device=logits.device) - starts[row]
    padded = logits.new_full((2, rows, width), float("-inf"))
    padded[:, row, column] = logits
    return padded


_PAIRS_AT_ONCE = 1 << 20
"""Start and end pairs processed at a time, which limits the memory for any number of windows."""


@dataclass(frozen=True)
class Candidates:
    """Possible answers, column by column, (candidates,) each."""

    question: np.ndarray
    """int64 index of the question."""
    begin: np.ndarray
    """int64, first character of the answer in the context."""
    end: np.ndarray
    """int64, one past its last character; an answer without characters is the empty text."""
    start_logit: np.ndarray
    end_logit: np.ndarray

    @property
    def score(self) -> np.ndarray:
        """The sum of both logits, float32 as in the guides' script: equality of scores depends on it."""
        return self.start_logit + self.end_logit

    @property
    def has_text(self) -> np.ndarray:
        """True if the answer has characters, (candidates,) bool."""
        return self.end > self.begin

    def take(self, which: np.ndarray) -> Candidates:
        """Return these candidates, by index or by mask."""
        return Candidates(*(column[which] for column in self._columns()))

    def by_question(self) -> Candidates:
        """Return them sorted by question, with the order within a question unchanged."""
        return self.take(np.argsort(self.question, kind="stable"))

    @classmethod
    def join(cls, parts: Sequence[Candidates]) -> Candidates:
        """Return the candidates of all parts, one after the other."""
        return cls(*(np.concatenate(columns) for columns in zip(*(part._columns() for part in parts), strict=True)))

    def _columns(self) -> tuple[np.ndarray, ...]:
        return self.question, self.begin, self.end, self.start_logit, self.end_logit


def best_of_each(group: np.ndarray, score: np.ndarray, n: int) -> np.ndarray:
    """Return the indices of the n highest scores of each group, best first; the first among equals."""
    order = np.lexsort((-score, group))
    grouped = group[order]
    rank = np.arange(len(order)) - np.searchsorted(grouped, grouped)
    return order[rank < n]


def text_candidates(windows: Windows, scores: SpanScores, *, n_best: int, max_tokens: int) -> Candidates:
    """Return the n_best spans of each window that are in the context and have at most `max_tokens` tokens.

    Window by window, best first. A span pairs one of the window's n_best starts with one of its n_best ends.
    """
    rows_at_once = max(1, _PAIRS_AT_ONCE // n_best**2)
    firsts = range(0, max(1, len(windows)), rows_at_once)
    chunks = (np.arange(first, min(first + rows_at_once, len(windows))) for first in firsts)
    return Candidates.join(
        [_spans_of_rows(windows, scores, rows, n_best=n_best, max_tokens=max_tokens) for rows in chunks]
    )


def null_candidates(windows: Windows, scores: SpanScores) -> Candidates:
    """Return "no answer" of every question that has a window, by question: the window with the lowest score decides.

    A window that does not hold the answer says "no answer" with right; only when all of them do is there none.
    """
    lowest = best_of_each(windows.question_of, -(scores.null_start + scores.null_end), 1)
    nowhere = np.zeros(len(lowest), dtype=np.int64)
    return Candidates(windows.question_of[lowest], nowhere, nowhere, scores.null_start[lowest], scores.null_end[lowest])


def _spans_of_rows(
    windows: Windows, scores: SpanScores, rows: np.ndarray, *, n_best: int, max_tokens: int
) -> Candidates:
    starts, ends = scores.start_index[rows, :n_best], scores.end_index[rows, :n_best]
    n_tokens = ends[:, None, :] - starts[:, :, None] + 1  # (rows, starts, ends)
    inside = _in_context(windows, rows, starts)[:, :, None] & _in_context(windows, rows, ends)[:, None, :]
    at, start, end = np.nonzero(inside & (n_tokens >= 1) & (n_tokens <= max_tokens))
    row, start_index, end_index = rows[at], starts[at, start], ends[at, end]
    found = Candidates(
        windows.question_of[row],
        windows.spans[_context_token(windows, row, start_index), 0],
        windows.spans[_context_token(windows, row, end_index), 1],
        scores.start_logit[row, start],
        scores.end_logit[row, end],
    )
    # Reduced per window: the best of a question are among the best of its windows, which are far fewer.
    return found.take(best_of_each(row, found.score, n_best))


def _in_context(windows: Windows, rows: np.ndarray, index: np.ndarray) -> np.ndarray:
    offset = index - windows.context_first[rows, None]
    return (offset >= 0) & (offset < windows.n_context[rows, None])


def _context_token(windows: Windows, row: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Return the index into `windows.spans` of the token at `index` of its row."""
    first = windows.context_starts[windows.context_of[row]] + windows.context_from[row]
    return first + index - windows.context_first[row]


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

    @classmethod
    def of(cls, qa: QaArguments) -> DecodeOptions:
        """Return what the options of a run say."""
        return cls(**{name: getattr(qa, name) for name in cls.__dataclass_fields__})

    @classmethod
    def trained(cls, known: Mapping[str, Any], *, n_best: int, **asked: Any) -> DecodeOptions:
        """Return what was asked for, unless it is None, else what the training has left (`known`), else the defaults.

        So many answers are kept at least.
        """
        values = {name: known[name] for name in cls.__dataclass_fields__ if name in known}
        found = cls(**values | {name: value for name, value in asked.items() if value is not None})
        return replace(found, n_best_size=max(found.n_best_size, n_best))


def decode(questions: Questions, windows: Windows, scores: SpanScores, options: DecodeOptions) -> Predictions:
    """Return the best answer of every question, its n-best list, and for SQuAD v2.0 the lead of "no answer".

    Behaves as `postprocess_qa_predictions` of the guides' `utils_qa.py` does; of equal scores the first window, then
    the likelier start, then the likelier end wins. If several answers of a SQuAD v2.0 question are kept and all are
    empty texts, the script fails; here the question gets the answer "empty", as in the script if only one is kept.
    Probabilities are computed in float64. Raises NonFiniteError if a logit is infinite or not a
    number.
    """
    _require_finite(scores)
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
    """Write the JSON files that the guides' script writes, and return the paths of those that were written.

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
    return [
        path
        for path, content in paths.items()
        if output_files.write_result(path, json.dumps(content, indent=4) + "\n", on_error)
    ]


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


def _require_finite(scores: SpanScores) -> None:
    real_starts, real_ends = scores.start_index >= 0, scores.end_index >= 0
    logits = [scores.start_logit[real_starts], scores.end_logit[real_ends], scores.null_start, scores.null_end]
    require_finite_logits(logits, "answers are ranked by their logits")
